"""Words for the first mistake in a user's settings.

jsonargparse describes a mistake only in prose. If jsonargparse refuses the settings, this module
checks the settings again, in the user's order, against the types of the parser's settings.
"""

import inspect
from collections.abc import Callable as AbstractCallable
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser

from fl_lightning import models
from fl_lightning.cli.messages import broken_module
from fl_lightning.cli.user_settings import Given, place_in, plain_name
from fl_lightning.errors import ConfigurationError, missing_module, nearest
from fl_lightning.folders import FOLDERS

_COMMON = ("fl_lightning", "torch", "lightning")
_SHIPPED = (*_COMMON, "torchvision", "torchmetrics")
"""Packages whose classes are suggested to the user."""

_MOST_SUGGESTED = 17


def first_mistake(parser: ArgumentParser, given: Sequence[Given]) -> str:
    """Return one line about the first wrong setting; empty if the settings' types are all right.

    Args:
        parser: The parser that refused the settings.
        given: The user's settings.
    """
    check = _Check(parser)
    for entry in given:  # find all classes first, because their settings are suggested
        with suppress(ConfigurationError):
            check(entry)
    for entry in given:
        try:
            check(entry)
        except ConfigurationError as error:
            return str(error) + (broken_module(error) or place_in(entry.file, entry.line))
    return check.missing({entry.setting for entry in given})


class _Settings:
    """The settings of a parser.

    Args:
        parser: A parser.
        owner: Name of the class whose settings the parser reads; empty for the command's parser.

    Attributes:
        names: The plain names of the settings that a user can give.
        kinds: The type of each setting, keyed by plain name. The type of a linked setting is None.
        required: The settings that a user must give.
    """

    def __init__(self, parser: Any, owner: str = "") -> None:
        self.owner, self.names = owner, list(parser.settings())
        parsers = parser.commands.choices.values() if parser.commands else [parser]
        actions = [action for parser in parsers for action in parser._actions]
        typed = {plain_name(action.dest): getattr(action, "_typehint", None) for action in actions}
        inner = {name.rpartition(".")[0] for name in typed if not name.endswith(".help")}
        self.kinds = {name: kind for name, kind in typed.items() if name not in inner or kind is not None}
        self.required = list(dict.fromkeys(action.dest for action in actions if action.required))

    def takes_classes(self, name: str) -> bool:
        """Return whether the setting's value is a class. Each such setting has an option for help."""
        return f"{name}.help" in self.kinds

    def in_words(self, name: str) -> str:
        return f"{self.owner}.{name}" if self.owner else name


class _Check:
    """Check of the user's settings, one after the other.

    Attributes:
        chosen: The settings of each class that the user has chosen, keyed by the setting that has
            this class as its value.
    """

    def __init__(self, parser: ArgumentParser) -> None:
        self.parser, self.settings = parser, _Settings(parser)
        self.chosen: dict[str, _Settings] = {}

    def __call__(self, entry: Given) -> None:
        """Raise a ConfigurationError if the setting is unknown, or if its value is not valid."""
        owner = max(
            (name for name in self.chosen if entry.setting.startswith(f"{name}.")), key=len, default=""
        )
        settings = self.chosen.get(owner, self.settings)
        rest = entry.setting.removeprefix(f"{owner}.") if owner else entry.setting
        if not rest or rest.startswith("dict_kwargs"):
            return
        name = max((x for x in settings.kinds if f"{rest}.".startswith(f"{x}.")), key=len, default="")
        if not name:
            if not any(known.startswith(f"{rest}.") for known in settings.kinds):
                self._refuse_unknown(rest, settings)
            return
        kind, shown, full = settings.kinds[name], settings.in_words(name), f"{owner}.{name}".lstrip(".")
        if rest == name:
            self._check_value(entry, settings.takes_classes(name), kind, shown, full)
        elif entry.name.endswith(".class_path"):  # a class in a dict, such as one of model.metrics
            inner = rest.removeprefix(name)
            self._choose(entry.text, kind, f"{shown}{inner}", f"{full}{inner}")
        elif settings.takes_classes(name) and not _is_mapping(kind):
            classes = ", ".join(sorted(_suggested(kind)))
            inner = rest.removeprefix(name)
            raise ConfigurationError(
                f"{shown}{inner}: {shown} is null; give its class first, --{full} CLASS ({classes})"
            )

    def _check_value(self, entry: Given, takes_classes: bool, kind: Any, shown: str, full: str) -> None:
        value = entry.value
        if isinstance(value, dict) and ("class_path" in value or (takes_classes and _is_mapping(kind))):
            return  # the classes and their settings have entries of their own
        is_name = takes_classes and (isinstance(value, str) or not (entry.file or isinstance(value, list)))
        if is_name and _accepts(kind, entry) and "." not in entry.text:
            with suppress(ConfigurationError):
                self._choose(entry.text, kind, shown, full)
            return
        if is_name and value is not None:
            self._choose(entry.text, kind, shown, full)
        elif takes_classes and isinstance(value, list) and list in _origins(kind):
            for item in value:
                if not isinstance(item, str | dict):
                    raise ConfigurationError(f"{shown}: {entry.text} is no class; {_remedy(kind)}")
                if isinstance(item, str):
                    self._choose(item, kind, shown, full)
        elif not _accepts(kind, entry):
            if takes_classes:
                what = "a list, not one class" if isinstance(value, list) else "no class"
                raise ConfigurationError(f"{shown}: {entry.text} is {what}; {_remedy(kind)}")
            raise ConfigurationError(f"{shown}: {entry.text} is not valid; it takes {in_words(kind)}")

    def _choose(self, text: str, kind: Any, shown: str, full: str) -> None:
        """Store the settings of a class, given its name or dotted path."""
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
        parser: Any = type(self.parser)(exit_on_error=False)
        try:
            if isinstance(made, type):
                functions = (get_args(part) for part in _parts(kind) if get_origin(part) is AbstractCallable)
                # the first arguments, such as the parameters of an optimizer, are given later
                skip = {len(x) for x, result in functions if issubclass(made, tuple(_bases(result)))}
                parser.add_class_arguments(made, skip=skip)
            else:
                parser.add_function_arguments(made)
        except ConfigurationError as error:
            raise ConfigurationError(f"{shown}: {error}") from error
        self.chosen[full] = _Settings(parser, made.__name__)

    def _refuse_unknown(self, name: str, settings: _Settings) -> NoReturn:
        if settings.owner:
            among = ", ".join(settings.names) or "none, or its class_path is missing"
            near = nearest(name, settings.names)
            raise ConfigurationError(f"{settings.owner}: there is no setting {name!r} among {among}{near}")
        parts = name.split(".")
        starts = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        known = settings.names
        name = next(x for x in starts if not any(f"{other}.".startswith(f"{x}.") for other in known))
        inner = [f"{full}.{x}" for full, chosen in self.chosen.items() for x in chosen.names]
        last = name.rpartition(".")[2]
        same = [x for x in (*known, *inner) if x.endswith(f".{last}") and x != name][:3]
        sections = (other.partition(".")[0] for other in known)
        near = f"; did you mean {' or '.join(same)}?" if same and "." in name else ""
        near = near or nearest(name, [*known, *sections])
        raise ConfigurationError(f"there is no setting {name!r}{near}")

    def missing(self, given: set[str]) -> str:
        """Return a line about required settings that the user has not given; empty if none."""
        for full, settings in [("", self.settings), *self.chosen.items()]:
            names = [name for name in settings.required if f"{full}.{name}".lstrip(".") not in given]
            if names:
                owner = f"{settings.owner}: " if settings.owner else ""
                return f"{owner}the following arguments are required: {', '.join(names)}"
        return ""


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


def _accepts(kind: Any, entry: Given) -> bool:
    if kind is None:
        return True
    probe = ArgumentParser(exit_on_error=False)
    probe.add_argument("--value", type=kind)
    try:
        if entry.file:
            probe.parse_object({"value": entry.value})
        else:
            probe.parse_args([f"--value={entry.text}"])
    except ArgumentError:
        return False
    return True


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
