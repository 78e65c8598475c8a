"""The arguments that an object was made with: the one record that a run's name, words and provenance read."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from jsonargparse._parameter_resolvers import UnknownDefault, get_signature_parameters

Item = TypeVar("Item", bound=Callable[..., Any])

_RECORD = "_made_with"


class Making(NamedTuple):
    """The maker of an object, and its arguments.

    Attributes:
        maker: The class or function.
        arguments: Its arguments by name, with the defaults of arguments that were left out.
        again: Makes an equal object.
    """

    maker: Callable[..., Any]
    arguments: dict[str, Any]
    again: Callable[[], Any]


class Recorded:
    """Base class whose objects record the arguments that they are made with.

    Attributes:
        deciding_files: Names of arguments that are files whose content decides results.

    A setting counts as it was given: an attribute that is renamed, computed or not kept changes nothing.

    ::

        class Noise(Recorded):
            def __init__(self, sigma: float = 1.0) -> None:
                self.variance = sigma**2

        making(Noise(2.0)).arguments  # {"sigma": 2.0}
    """

    deciding_files: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **settings: Any) -> None:
        """Record the arguments of a class that makes its objects itself, too: it may not pass them on."""
        super().__init_subclass__(**settings)
        if "__new__" in vars(cls):
            make = cls.__new__

            @functools.wraps(make)
            def recorded(kind: type, *args: Any, **kwargs: Any) -> Any:
                made = make(kind, *args, **kwargs)
                record(made, kind, args, kwargs)
                return made

            cls.__new__ = recorded  # type: ignore[method-assign,assignment]  # of the same arguments

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments before the constructor runs: its signature stays what it is."""
        made = super().__new__(cls)
        record(made, cls, args, kwargs)
        return made


def records(*deciding_files: str) -> Callable[[Item], Item]:
    """Let a function that makes objects, such as a model, record its arguments on them.

    Args:
        deciding_files: Names of arguments that are files whose content decides results.
    """

    def of(function: Item) -> Item:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            record(made, make, args, kwargs)
            return made

        vars(make)["deciding_files"] = deciding_files
        return cast(Item, make)

    return of


def record(made: Any, maker: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Record how an object was made; an object that takes no attributes stays without a record."""
    try:
        # bypass nn.Module: a module among the arguments does not become a child
        object.__setattr__(made, _RECORD, (maker, _copied([*args]), _copied(dict(kwargs))))
    except (AttributeError, TypeError):
        return


def making(made: object) -> Making | None:
    """Return how an object was made; None if it has no record."""
    try:
        maker, args, kwargs = object.__getattribute__(made, _RECORD)
    except AttributeError:
        return None
    known = parameters(maker)
    given: dict[str, Any] = {}
    positional = [name for name, one in known.items() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    given |= dict(zip(positional, args, strict=False)) | kwargs
    if rest := args[len(positional) :]:
        given["*"] = rest
    missing = {
        name: one.default
        for name, one in known.items()
        if name not in given and one.default is not inspect.Parameter.empty
    }
    order = [*known, *(name for name in given if name not in known)]
    arguments = {name: x for name in order for x in _lookup(name, given, missing)}
    return Making(maker, arguments, functools.partial(maker, *args, **kwargs))


@functools.cache
def parameters(maker: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class or function by name, as a configuration takes them.

    Further arguments that are passed on (``**kwargs``) are resolved: those of a base class are included, but for the ones
    that the subclass sets itself. A default that depends on other settings is left out.
    """
    found = {}
    for one in get_signature_parameters(maker, logger=False):
        unknown = isinstance(one.default, UnknownDefault)
        default = inspect.Parameter.empty if unknown else one.default
        kind = one.kind or inspect.Parameter.KEYWORD_ONLY
        found[one.name] = inspect.Parameter(one.name, kind, default=default, annotation=one.annotation)
    return found


def _copied(value: Any) -> Any:
    """Copy a container: the object may change the one that it was given."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def _lookup(name: str, *sources: Mapping[str, Any]) -> list[Any]:
    return next(([source[name]] for source in sources if name in source), [])


def in_words(value: object) -> str:
    """Write a setting's value: an object without words of its own as :func:`describe` writes it."""
    return describe(value) if type(value).__repr__ is object.__repr__ else str(value)


def describe(thing: object) -> str:
    """Write an object as it could be made: its class and the arguments that differ from the defaults."""
    made = making(thing)
    if made is None:
        return f"{type(thing).__name__}()"
    defaults = {name: one.default for name, one in parameters(made.maker).items()}
    words = [
        f"{name}={in_words(value)}"
        for name, value in made.arguments.items()
        if name not in defaults or not _equal(value, defaults[name])
    ]
    return f"{type(thing).__name__}({', '.join(words)})"


def _equal(value: Any, default: Any) -> bool:
    return (
        value is default
        or (type(value) is type(default) and bool(value == default))
        or _numbers(value, default)
    )


def _numbers(value: Any, default: Any) -> bool:
    return isinstance(value, int | float) and isinstance(default, int | float) and value == default
