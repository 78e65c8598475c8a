"""What the user gave: the settings in YAML files and on the command line, before any default, type or link."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import ConfigurationError


def given_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings that the files and the arguments name, by dotted name; later ones win.

    ``init_args`` and ``class_path`` are left out of the names, as they may be on the command line: the class of
    ``model.model`` is ``model.model``, its setting ``norm`` is ``model.model.norm``.

    Args:
        arguments: The command line without the program's name.

    Raises:
        ConfigurationError: A file is not YAML, or it holds no settings.
    """
    given: dict[str, Any] = {}
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, text = argument.partition("=")
        text = text if equals else following
        if option in ("-c", "--config"):
            settings = read_config(text) if Path(text).is_file() else _value(text)
            given |= dict(_walk(settings, "", Path(text).parent))
        elif option.startswith("--"):
            given |= dict(_walk(_value(text), option.removeprefix("--"), Path()))
    return given


def read_config(path: str) -> dict[str, Any]:
    """The settings of a YAML file.

    Raises:
        ConfigurationError: It is not YAML, or it holds no settings.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"config {path} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"config {path} holds no settings such as 'model: ...': {settings}")
    return settings


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def plain_name(setting: str) -> str:
    """The name of a setting without ``init_args`` and ``class_path``."""
    return ".".join(part for part in setting.split(".") if part not in ("init_args", "class_path"))


def _walk(tree: Any, name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, str) and tree.endswith((".yaml", ".yml", ".json")) and (folder / tree).is_file():
        tree = read_config(str(folder / tree))
    if not isinstance(tree, dict):
        yield plain_name(name), tree
        return
    for key, value in tree.items():
        yield from _walk(value, f"{name}.{key}".lstrip("."), folder)
