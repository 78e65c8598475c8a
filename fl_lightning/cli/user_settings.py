"""The user's settings, from the command line and from files.

This module does not import PyTorch.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.files import shipped, user_path
from fl_lightning.yaml_file import Lined, read_yaml, reason


class Given(NamedTuple):
    """A setting that the user gave.

    Attributes:
        name: Dotted name as the user wrote it.
        value: Value of the setting. The value of a section is a dict.
        text: Value as the user wrote it on the command line, or the value from a file as a text.
        file: File that gives the setting; empty for the command line.
        line: Line number of the setting's key in the file.
    """

    name: str
    value: Any
    text: str
    file: str = ""
    line: int = 0

    @property
    def setting(self) -> str:
        """Plain name of the setting (see :func:`plain_name`), without a final ``+``."""
        return plain_name(self.name).removesuffix("+")


def read_given(arguments: Sequence[str]) -> list[Given]:
    """Return the settings on the command line, and in all files that the command line names.

    The result has an entry for each section of a file, and an entry for each setting in a section.

    Args:
        arguments: Command line without the program's name.

    Raises:
        ConfigurationError: A file is not YAML or holds no settings.
    """
    given: list[Given] = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, value = argument.partition("=")
        if option == "-c" or option.startswith("--"):
            name = "" if option in ("-c", "--config") else option.removeprefix("--")
            text = value if equals else following
            given += _walk(Given(name, _value(text), text), Path())
    return given


def given_settings(given: Sequence[Given]) -> Config:
    """Return the settings' values, keyed by :func:`plain_name`. Sections are left out.

    If a setting is given several times, the last value is returned.
    """
    return {entry.setting: entry.value for entry in given if not isinstance(entry.value, dict)}


def plain_name(setting: str) -> str:
    """Return a dotted name without ``init_args`` and ``class_path``.

    The result is the name that users write on the command line.
    """
    return ".".join(part for part in setting.split(".") if part not in ("init_args", "class_path"))


def _walk(given: Given, folder: Path) -> Iterator[Given]:
    name, tree, file = given.name, given.value, given.file
    may_be_file = isinstance(tree, str) and (not name or tree.endswith((".yaml", ".yml")))
    if may_be_file and (path := folder / user_path("config", tree)).is_file():
        folder, tree, file = path.parent, _read(path), str(path)
    elif not name and isinstance(tree, str) and not path.exists():
        raise ConfigurationError(
            f"config: {tree} does not exist; give a file, such as configs/quickstart.yaml"
        )
    if name and not name.endswith(".init_args"):
        yield given._replace(value=tree)
    for item in tree if isinstance(tree, list) else ():
        if isinstance(item, dict):
            yield from _walk(given._replace(value=item, file=file), folder)
    if not isinstance(tree, dict):
        return
    lines = tree.lines if isinstance(tree, Lined) else {}
    if "class_path" in tree:
        _check_class(tree, plain_name(name), place_in(file, lines.get("class_path", 0)))
    for key, value in tree.items():
        text = "null" if value is None else str(value)
        yield from _walk(Given(f"{name}.{key}".lstrip("."), value, text, file, lines.get(key, 0)), folder)


def place_in(file: str, line: int) -> str:
    """Return a clause with a file and a line, such as `` (mine.yaml, line 7)``.

    If the file or the line is unknown, the clause is empty.
    """
    return f" ({file}, line {line})" if file and line else ""


def _check_class(tree: Config, name: str, place: str) -> None:
    """Raise an error if settings of a class have no names, or are not in the entry's ``init_args``."""
    if not isinstance(settings := tree.get("init_args"), dict | str | None):
        raise ConfigurationError(
            f"{name}: init_args of {tree['class_path']}: {settings} must be settings with names, such as {{name: value}}{place}"
        )
    if beside := tree.keys() - {"class_path", "init_args", "dict_kwargs"}:
        raise ConfigurationError(
            f"{name}: {', '.join(sorted(beside))} beside class_path: {tree['class_path']}; settings of a class go below its init_args{place}"
        )


def _read(path: Path) -> Config:
    try:
        settings = read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"config {path} is not YAML: {reason(error)}") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"config {path} holds no settings such as 'model: ...': {settings}")
    return settings


def _value(text: str) -> Any:
    try:
        return read_yaml(text)
    # a number with very many digits gives a ValueError
    except (yaml.YAMLError, ValueError):
        return text


def with_shipped_configs(arguments: Sequence[str]) -> list[str]:
    """Replace ``configs/X.yaml`` in arguments by the shipped file, if the user has no such file."""

    def located(argument: str) -> str:
        option, _, value = argument.rpartition("=")
        return (f"{option}=" if option else "") + str(shipped(value) or value)

    return [located(argument) for argument in arguments]
