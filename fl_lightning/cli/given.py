"""What the user gave: the settings in YAML files and on the command line, before any default, type or link."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import user_path


def given_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings that the files and the arguments name, by plain name (:func:`plain_name`); later ones win.

    Args:
        arguments: The command line without the program's name.

    Raises:
        ConfigurationError: A file is not YAML, or it holds no settings.
    """
    given: dict[str, Any] = {}
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, value = argument.partition("=")
        if option == "-c" or option.startswith("--"):
            name = "" if option in ("-c", "--config") else option.removeprefix("--")
            given |= dict(_walk(_value(value if equals else following), name, Path()))
    return given


def plain_name(setting: str) -> str:
    """A dotted name without ``init_args`` and ``class_path``, which the command line lets out as well."""
    return ".".join(part for part in setting.split(".") if part not in ("init_args", "class_path"))


def _walk(tree: Any, name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    may_be_file = isinstance(tree, str) and (not name or tree.endswith((".yaml", ".yml")))
    if may_be_file and (path := folder / user_path("config", tree)).is_file():
        folder, tree = path.parent, _read(path)
    if not isinstance(tree, dict):
        yield plain_name(name), tree
        return
    for key, value in tree.items():
        yield from _walk(value, f"{name}.{key}".lstrip("."), folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), _OnceEach)  # a SafeLoader
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"config {path} is not text in UTF-8 (byte {error.start + 1} is 0x{error.object[error.start]:02x}); save it as UTF-8"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"config {path} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"config {path} holds no settings such as 'model: ...': {settings}")
    return settings


class _OnceEach(yaml.SafeLoader):
    """Refuses a key that is given twice: the last one would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{key!r} is given twice{node.start_mark}; keep one of them")
        return super().construct_mapping(node, deep)


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # a date that no calendar has
        return text
