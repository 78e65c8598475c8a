"""Records of the arguments with which objects were made, for names of methods and ``config.yaml``."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

from jsonargparse._parameter_resolvers import UnknownDefault, get_signature_parameters

from fl_lightning.errors import check_choice

Item = TypeVar("Item", bound=Callable[..., Any])

_RECORD = "_made_with"


class Making(NamedTuple):
    """The class or function that made an object, with its arguments.

    Attributes:
        maker: The class or function.
        arguments: All arguments by name, including defaults.
    """

    maker: Callable[..., Any]
    arguments: dict[str, Any]


class Recorded:
    """Base class of objects that record their constructor's arguments.

    An argument whose type is a ``Literal`` must be one of the choices.

    Raises:
        ConfigurationError: An argument is not one of the choices of its type.

    Attributes:
        deciding_files: Names of arguments that are paths of files whose content affects results.

    The record does not depend on the attributes that ``__init__`` sets:

    ::

        class Noise(Recorded):
            def __init__(self, sigma: float = 1.0) -> None:
                self.variance = sigma**2

        making(Noise(2.0)).arguments  # {"sigma": 2.0}
    """

    deciding_files: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]  # keeps the signature
        if "__new__" in vars(cls):
            cls.__new__ = _recording(cls.__new__)  # type: ignore[method-assign]  # keeps the signature

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Record the constructor's arguments before ``__init__`` runs."""
        made = super().__new__(cls)
        _record(made, cls, args, kwargs)
        return made


def _checked(start: Callable[..., None]) -> Callable[..., None]:
    """Let an ``__init__`` check its choices, also if a subclass calls it."""
    names, choices = [*inspect.signature(start).parameters][1:], dict[str, list[Any]]()
    for name, given in inspect.signature(start).parameters.items():
        kind = given.annotation
        options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        literals = [option for option in options if get_origin(option) is Literal]
        if literals and {*options}.difference(literals) <= {NoneType}:
            choices[name] = [*get_args(literals[0]), *([None] if NoneType in options else [])]

    @functools.wraps(start)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            if value not in choices.get(name, [value]):
                check_choice(f"{type(self).__name__}.{name}", value, filter(None, choices[name]))
        start(self, *args, **kwargs)

    return init if choices else start


def _recording(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let a subclass's ``__new__`` record all arguments, also those that it does not pass on."""

    @functools.wraps(make)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = make(cls, *args, **kwargs)
        _record(made, cls, args, kwargs)
        return made

    return new


def records(*deciding_files: str) -> Callable[[Item], Item]:
    """Decorate a function that makes objects such as models.

    Each object then has a record of the function's arguments.

    Args:
        deciding_files: Names of arguments that are paths of files whose content affects results.
    """

    def of(function: Item) -> Item:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            _record(made, make, args, kwargs)
            return made

        vars(make)["deciding_files"] = deciding_files
        return cast(Item, make)

    return of


def _record(made: Any, maker: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    # nn.Module's own __setattr__ would register a module in the arguments as a submodule
    object.__setattr__(made, _RECORD, (maker, _copied([*args]), _copied(dict(kwargs))))


def making(made: object) -> Making | None:
    """Return the class or function that made an object, with its arguments; None if unrecorded."""
    try:
        maker, args, kwargs = object.__getattribute__(made, _RECORD)
    except AttributeError:
        return None
    known, empty = parameters(maker), inspect.Parameter.empty
    positional = [
        name for name, parameter in known.items() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    values = {name: parameter.default for name, parameter in known.items() if parameter.default is not empty}
    values |= dict(zip(positional, args, strict=False)) | kwargs
    if rest := args[len(positional) :]:
        values["*"] = rest
    return Making(maker, {name: values[name] for name in {**known, **values} if name in values})


@functools.cache
def parameters(maker: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class or function by name.

    If a class passes ``**kwargs`` to its base class, the parameters of the base class replace
    ``**kwargs``. Parameters of the base class that the class itself sets are omitted. Defaults that
    depend on other settings are omitted as well.
    """
    known = {}
    for parameter in get_signature_parameters(maker, logger=False):
        name, default, kind = parameter.name, parameter.default, parameter.kind
        default = inspect.Parameter.empty if isinstance(default, UnknownDefault) else default
        kind = kind or inspect.Parameter.KEYWORD_ONLY
        known[name] = inspect.Parameter(name, kind, default=default, annotation=parameter.annotation)
    return known


def _copied(value: Any) -> Any:
    """Return a copy of a dict or list, because an object may modify its arguments.

    Any other value is returned unchanged.
    """
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def value_in_words(value: object) -> str:
    """Format the value of a setting.

    If the value's class does not define ``__repr__``, the value is formatted by :func:`describe`.
    """
    return describe(value) if type(value).__repr__ is object.__repr__ else str(value)


def describe(thing: object) -> str:
    """Format an object as a call of its class, with the arguments that differ from defaults."""
    made = making(thing)
    if made is None:
        return f"{type(thing).__name__}()"
    defaults = {name: parameter.default for name, parameter in parameters(made.maker).items()}
    words = [
        f"{name}={value_in_words(value)}"
        for name, value in made.arguments.items()
        if name not in defaults or not _equal(value, defaults[name])
    ]
    return f"{type(thing).__name__}({', '.join(words)})"


def _equal(value: Any, default: Any) -> bool:
    return (
        value is default
        or (type(value) is type(default) and bool(value == default))
        or (isinstance(value, int | float) and isinstance(default, int | float) and value == default)
    )
