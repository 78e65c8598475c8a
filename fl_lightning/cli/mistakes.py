"""Words for a mistake in a user's settings.

jsonargparse describes a mistake in many lines. This module names the setting, the user's value and
place, and what would work.
"""

import inspect
import re
from collections.abc import Callable as AbstractCallable
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from fl_lightning import models
from fl_lightning.cli.print_errors import broken_module
from fl_lightning.cli.user_settings import Given, place_in, plain_name
from fl_lightning.errors import ConfigurationError, missing_module, nearest
from fl_lightning.folders import FOLDERS
from fl_lightning.recorded import parameters

_COMMON = ("fl_lightning", "torch", "lightning")
_SHIPPED = (*_COMMON, "torchvision", "torchmetrics")
"""Packages whose classes are suggested to the user."""

_MOST_SUGGESTED = 17


_UNKNOWN = re.compile(
    r"unrecognized arguments: --([^\s=]+)"
    r"|(?:Group '(.*)' does not accept o|Subcommand .* does not accept o|O)ption '([^']+)'"
)
_VALUE = re.compile(r'Parser key "([^"]+)"')
_REFUSED = re.compile(r"(?:Got|Given) value: (.*)")
_INNER = re.compile(r"Given value: NestedArg\(key='([^']+)'")
"""Messages of jsonargparse: an unknown setting, a wrong value, this value, and a setting of a class that is null."""


def in_one_line(parser: Any, message: str, given: Sequence[Given]) -> str:
    """Return jsonargparse's message as a line with the setting, its value and a remedy.

    Args:
        parser: The parser that refused the settings: that of the command, or of a class.
        message: jsonargparse's message.
        given: The user's settings.

    Returns:
        The line; empty if the message is of another kind.
    """
    settings = _Settings(parser)
    if unknown := _UNKNOWN.match(message):
        name = settings.unknown(settings.plain(".".join(filter(None, unknown.groups()))))
        return f"{_unknown(name, settings, given)}{_place(_named_so(given, name))}"
    if message.startswith("the following arguments are required: ") and settings.owner:
        return f"{settings.owner}: {message}"
    if not _VALUE.match(message):
        return ""
    key = settings.plain(_VALUE.findall(message)[-1])  # a section that is one text has a message in a message
    values = [" ".join(value.split()) for value in _REFUSED.findall(message)]
    same = _named_so(given, key) or [entry for entry in given if f".{key}." in f".{entry.setting}."]
    same = [entry for entry in same if {entry.text, str(entry.value)} & {*values}] or same
    kind, shown = settings.kinds.get(key), settings.in_words(key)
    takes_classes = f"{key}.help" in settings.kinds
    if takes_classes and (inner := _INNER.search(message)):
        name = plain_name(inner[1])
        full = next((x.setting for x in same if x.setting.endswith(f".{name}")), key).removesuffix(f".{name}")
        classes = ", ".join(sorted(_suggested(kind)))
        return f"{shown}.{name}: {shown} is null; give its class first, --{full} CLASS ({classes})"
    if takes_classes and (wrong := [*filter(None, (_wrong_class(key, kind, shown, x) for x in given))]):
        return wrong[0]
    if not same:
        return ""
    _, _, rest = f".{same[-1].setting}.".rpartition(f".{key}.")
    remedy = _remedy(kind) if takes_classes else f"it takes {in_words(kind)}"
    name = f"{shown}.{rest}".rstrip(".")
    return f"{name}: {same[-1].text} is not valid; {remedy}{_place(same[-1:])}"


class _Settings:
    """The settings of a parser.

    Args:
        parser: A parser.

    Attributes:
        owner: Name of the class whose settings the parser reads; empty for the command's parser.
        names: The plain names of the settings that a user can give.
        kinds: The type of each setting, keyed by plain name. The type of a linked setting is None.
    """

    def __init__(self, parser: Any) -> None:
        self.owner, self.names = parser.owner, list(parser.settings())
        self._commands = (
            tuple(f"{command}." for command in parser.commands.choices) if parser.commands else ()
        )
        parsers = parser.commands.choices.values() if parser.commands else [parser]
        self.kinds = {
            plain_name(x.dest): getattr(x, "_typehint", None) for one in parsers for x in one._actions
        }

    def plain(self, key: str) -> str:
        """Return the plain name of a setting, without a command."""
        start = next((x for x in self._commands if key.startswith(x)), "")
        return plain_name(key.removeprefix(start)).removesuffix("+")

    def unknown(self, name: str) -> str:
        """Return the first part of a dotted name that is not a setting or a section."""
        parts = name.split(".")
        starts = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((x for x in starts if not any(f"{y}.".startswith(f"{x}.") for y in self.names)), name)

    def in_words(self, name: str) -> str:
        return f"{self.owner}.{name}" if self.owner else name


def _named_so(given: Sequence[Given], name: str) -> list[Given]:
    """Return the entries for a setting whose dotted name ends with ``name``."""
    return [entry for entry in given if f".{entry.setting}".endswith(f".{name}")]


def _place(entries: Sequence[Given]) -> str:
    return place_in(entries[0].file, entries[0].line) if entries else ""


def _unknown(name: str, settings: _Settings, given: Sequence[Given]) -> str:
    known = settings.names
    if settings.owner:
        among = ", ".join(known) or "none, or its class_path is missing"
        return f"{settings.owner}: there is no setting {name!r} among {among}{nearest(name, known)}"
    every = dict.fromkeys((*known, *(x.setting for x in given)))
    same = [x for x in every if x.endswith(f".{name.rpartition('.')[2]}") and x != name][:3]
    near = f"; did you mean {' or '.join(same)}?" if same and "." in name else ""
    sections = (other.partition(".")[0] for other in known)
    return f"there is no setting {name!r}{near or nearest(name, [*known, *sections])}"


def _wrong_class(key: str, kind: Any, shown: str, entry: Given) -> str:
    """Return a line if an entry of the user's is no class of a setting, else an empty text."""
    _, is_here, inner = f".{entry.setting}.".partition(f".{key}.")
    inner = f".{inner}".rstrip(".")
    is_class = not isinstance(entry.value, dict) and (not inner or entry.name.endswith(".class_path"))
    if not is_here or not is_class or (inner and not _is_mapping(kind)):
        return ""
    is_list = isinstance(entry.value, list)
    for item in entry.value if is_list else [entry.value]:
        if isinstance(item, dict):
            continue
        is_name = isinstance(item, str) or not (entry.file or is_list)
        if not is_name or (is_list and list not in _origins(kind)):
            what = "a list, not one class" if is_list and list not in _origins(kind) else "no class"
            return f"{shown}{inner}: {entry.text} is {what}; {_remedy(kind)}{_place([entry])}"
        try:
            _check_class(item if is_list else entry.text, kind, f"{shown}{inner}")
        except ConfigurationError as error:
            return f"{error}{broken_module(error) or _place([entry])}"
    return ""


def _check_class(text: str, kind: Any, shown: str) -> None:
    """Raise an error if a name or dotted path is no class of a type."""
    made = imported(text, shown) if "." in text else _named(text, kind, shown)
    bases = tuple(_bases(kind))
    if isinstance(made, type):
        is_valid = issubclass(made, bases)
    else:
        result = get_type_hints(made).get("return") if inspect.isfunction(made) else None
        is_valid = isinstance(result, type) and issubclass(result, bases)
        if not is_valid and callable(made) and AbstractCallable in _origins(kind):
            return
    if not is_valid:
        name = bases[0].__name__
        raise ConfigurationError(
            f"{shown}: {text} is no {name}, nor a function annotated to return one; {_remedy(kind)}"
        )
    try:
        refuse_class_defaults(made)
    except ConfigurationError as error:
        raise ConfigurationError(f"{shown}: {error}") from error


def refuse_class_defaults(maker: AbstractCallable[..., Any]) -> None:
    """Raise an error if a setting is by default a class that cannot be made without arguments."""
    for name, setting in parameters(maker).items():
        kind = setting.default
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            continue
        needed = inspect.signature(kind).parameters.values()
        if any(x.default is x.empty and x.kind == x.POSITIONAL_OR_KEYWORD for x in needed):
            raise ConfigurationError(
                f"{maker.__name__}: its setting {name} is a class by default, which a configuration cannot name; use "
                f"fl_lightning.models.library_model with function: {maker.__module__}.{maker.__name__}"
            )


def imported(path: str, setting: str = "") -> Any:
    """Return the object at a dotted path.

    Args:
        path: The dotted path.
        setting: Name of the setting, for the message.

    Raises:
        ConfigurationError: The object cannot be imported.
    """
    module, _, name = path.rpartition(".")
    start = f"{setting}: " if setting else ""
    folder = Path(path.partition(".")[0])
    no_package = folder.name in FOLDERS and folder.is_dir() and not (folder / "__init__.py").is_file()
    hint = f"; your folder {folder} needs an __init__.py" if no_package else ""
    try:
        try:
            owner = import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module or "." not in module:
                raise
            owner = getattr(import_module(module.rpartition(".")[0]), module.rpartition(".")[2])
        return getattr(owner, name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{start}{error}") from error
    except AttributeError as error:
        near = hint or nearest(name, [x for x in dir(error.obj) if x[:1].isupper() == name[:1].isupper()])
        raise ConfigurationError(f"{start}class {path!r} cannot be imported: {error}{near}") from error
    except Exception as error:  # a module may raise anything
        near = missing_module(error.name or "", path) if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigurationError(f"{start}class {path!r} cannot be imported: {error}{near}") from error


def _named(name: str, kind: Any, shown: str) -> Any:
    known = {made.__name__: made for base in _bases(kind) for made in (base, *_subclasses(base))}
    if name in known:
        return known[name]
    if any(_is_shipped(made, _COMMON) for made in _subclasses(object) if made.__name__ == name):
        raise ConfigurationError(f"{shown}: the class {name!r} is of another kind; {_remedy(kind)}")
    near = nearest(name, _suggested(kind))
    # a configuration must name a function by its dotted path
    near = f"; did you mean {models.__name__}.{name}?" if name in models.__all__ else near
    near = f"; give one class, or for a list [{name}]" if "," in name else near
    raise ConfigurationError(f"{shown}: there is no class {name!r}{near or '; ' + _remedy(kind)}")


def base_classes() -> tuple[type, ...]:
    """Return the shipped base classes. A configuration cannot name a base class itself."""
    from fl_lightning import attacks, datamodules  # imported late, because it is rarely needed

    return (
        datamodules.PartitionedDataModule,
        datamodules.InMemoryDataModule,
        datamodules.InMemorySamples,
        datamodules.ImageFiles,
        datamodules.Partition,
        attacks.Attack,
    )


def _suggested(kind: Any) -> dict[str, type]:
    classes = {made.__name__: made for base in _bases(kind) for made in _subclasses(base)}
    return {x: made for x, made in classes.items() if _is_shipped(made) and made not in base_classes()}


def _is_shipped(made: type, packages: Sequence[str] = _SHIPPED) -> bool:
    return str(made.__module__).partition(".")[0] in packages and not made.__name__.startswith("_")


def _remedy(kind: Any) -> str:
    known = _suggested(kind)
    if 0 < len(known) <= _MOST_SUGGESTED:
        return f"there are {', '.join(sorted(known))}"
    return "give one that this setting takes, or the dotted path of your own"


def _subclasses(base: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(base)
    for made in subclasses:
        yield made
        yield from _subclasses(made)


def _parts(kind: Any) -> Iterator[Any]:
    """Yield a type and the types inside it, but not the arguments of functions."""
    yield kind
    if get_origin(kind) is not Literal:
        inner = get_args(kind)
        for part in inner[-1:] if get_origin(kind) is AbstractCallable else inner:
            yield from _parts(part)


def _bases(kind: Any) -> list[type]:
    """Return the classes in a type, other than Python's own classes."""
    return [part for part in _parts(kind) if isinstance(part, type) and part.__module__ != "builtins"]


def _origins(kind: Any) -> set[Any]:
    return {get_origin(part) for part in _parts(kind)}


def _is_mapping(kind: Any) -> bool:
    return any(isinstance(origin, type) and issubclass(origin, Mapping) for origin in _origins(kind))


def in_words(kind: Any) -> str:
    """Return a type in words, such as ``int, null``."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return str([*inner])
    if origin in (Union, UnionType):
        return ", ".join(map(in_words, inner))
    if kind is NoneType:
        return "null"
    if inner:
        return f"{origin.__name__}[{', '.join(map(in_words, inner))}]"
    return getattr(kind, "__name__", str(kind))
