"""The user's settings, from the command line and from files.

This module does not import PyTorch.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.files import shipped, user_path


class Given(NamedTuple):
    """A setting that the user gave.

    Attributes:
        name: Dotted name as the user wrote it.
        value: Value of the setting.
        file: File that gives the setting; empty for the command line.
        line: Line number of the setting's key in the file.
    """

    name: str
    value: Any
    file: str = ""
    line: int = 0

    @property
    def setting(self) -> str:
        """Plain name of the setting (see :func:`plain_name`), without a final ``+``."""
        return plain_name(self.name).removesuffix("+")


_SECTION = object()
"""Placeholder for the value of a YAML section, whose settings have separate entries."""


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
            given += _walk(Given(name, _value(value if equals else following)), Path())
    return given


def given_settings(given: Sequence[Given]) -> Config:
    """Return the settings' values, keyed by :func:`plain_name`.

    If a setting is given several times, the last value is returned.
    """
    return {entry.setting: entry.value for entry in given if entry.value is not _SECTION}


def plain_name(setting: str) -> str:
    """Return a dotted name without ``init_args`` and ``class_path``.

    The result is the name that users write on the command line.
    """
    return ".".join(part for part in setting.split(".") if part not in ("init_args", "class_path"))


def _walk(given: Given, folder: Path) -> Iterator[Given]:
    name, tree, file, _ = given
    may_be_file = isinstance(tree, str) and (not name or tree.endswith((".yaml", ".yml")))
    if may_be_file and (path := folder / user_path("config", tree)).is_file():
        folder, tree, file = path.parent, _read(path), str(path)
    elif not name and isinstance(tree, str) and not path.exists():
        raise ConfigurationError(
            f"config: {tree} does not exist; give a file, such as configs/quickstart.yaml"
        )
    if not isinstance(tree, dict):
        yield given
        for item in tree if isinstance(tree, list) else ():
            if isinstance(item, dict):
                yield from _walk(Given(name, item, file), folder)
        return
    if "class_path" in tree:
        _check_class(tree, plain_name(name), place_in(file, getattr(tree, "lines", {}).get("class_path", 0)))
    if given.line:
        yield given._replace(value=_SECTION)
    for key, value in tree.items():
        line = getattr(tree, "lines", {}).get(key, 0)
        yield from _walk(Given(f"{name}.{key}".lstrip("."), value, file, line), folder)


def place_in(file: str, line: int) -> str:
    """Return a clause with a file and a line, such as `` (mine.yaml, line 7)``.

    If the file or the line is unknown, the clause is empty.
    """
    return f" ({file}, line {line})" if file and line else ""


def _check_class(tree: Config, name: str, place: str) -> None:
    """Raise an error if the entry of a class is malformed.

    ``class_path`` must be a name. ``init_args`` must be a mapping of settings, or a file with
    settings. All settings of the entry must be in ``init_args``.
    """
    kind, settings = tree["class_path"], tree.get("init_args") or {}
    if not isinstance(kind, str):
        raise ConfigurationError(f"{name}: class_path: {kind} must be the name of one class{place}")
    if not isinstance(settings, dict | str):
        raise ConfigurationError(
            f"{name}: init_args of {kind}: {settings} must be settings with names, such as {{name: value}}{place}"
        )
    if beside := tree.keys() - {"class_path", "init_args", "dict_kwargs"}:
        raise ConfigurationError(
            f"{name}: {', '.join(sorted(beside))} beside class_path: {kind}; settings of a class go below its init_args{place}"
        )


def _read(path: Path) -> Config:
    try:
        # _OnceEach is a SafeLoader: a file cannot run code
        settings = yaml.load(path.read_text(encoding="utf-8"), _OnceEach)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else error
        raise ConfigurationError(f"config {path} is not YAML: {reason}") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"config {path} holds no settings such as 'model: ...': {settings}")
    return settings


class _Lined(dict[Any, Any]):
    """A mapping in a YAML file, with the line number of each key."""

    lines: Mapping[Any, int]


class _OnceEach(yaml.SafeLoader):
    """YAML loader that stores the line number of each key.

    A duplicate key is an error, although PyYAML's own loaders accept duplicate keys.
    """

    def lined(self, node: yaml.MappingNode) -> Iterator[_Lined]:
        """Yield an empty dict, and fill it later, because a mapping in YAML may contain itself."""
        mapping = _Lined()
        yield mapping
        keys: dict[Any, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.tag != "tag:yaml.org,2002:merge" and key.value in keys:
                problem = f"{key.value!r} is given twice; keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys[key.value] = key.start_mark.line + 1
        mapping.update(self.construct_mapping(node))
        mapping.lines = keys


_OnceEach.add_constructor("tag:yaml.org,2002:map", _OnceEach.lined)


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    # a date that does not exist, such as 2024-02-30, gives a ValueError
    except (yaml.YAMLError, ValueError):
        return text


def with_shipped_configs(arguments: Sequence[str]) -> list[str]:
    """Replace ``configs/X.yaml`` in arguments by the shipped file, if the user has no such file."""

    def located(argument: str) -> str:
        option, _, value = argument.rpartition("=")
        return (f"{option}=" if option else "") + str(shipped(value) or value)

    return [located(argument) for argument in arguments]
