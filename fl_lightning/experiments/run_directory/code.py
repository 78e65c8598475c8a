"""Functions that find the import path of a class or function, and describe its code."""

import dis
import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from jsonargparse._util import get_import_path

_NOT_CODE = (
    "__doc__",
    "__module__",
    "__dict__",
    "__weakref__",
    "__annotations__",
    "__abstractmethods__",
    "_abc_impl",
    *("__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"),
)


@functools.cache
def full_name(maker: Any) -> str:
    """Return the shortest import path of a class or function.

    The path is the same in the main process and in child processes.
    """
    try:
        path = str(get_import_path(maker))
    except (ValueError, ImportError, AttributeError):
        path = f"{maker.__module__}.{getattr(maker, '__qualname__', type(maker).__qualname__)}"
    return path.replace("__mp_main__", "__main__")


def is_local(maker: Any) -> bool:
    """Return whether a class or function is defined where it cannot be imported.

    Examples are definitions in a script, in a notebook and in the body of a function.
    """
    inner = inspect.unwrap(maker)
    path = f"{inner.__module__}.{getattr(inner, '__qualname__', '<')}"
    if "<" in path or path.startswith(("__main__.", "__mp_main__.", "None.")):
        return True
    if not isinstance(inner, type) and not hasattr(inner, "__code__"):
        return False
    value: Any = sys.modules.get(inner.__module__)
    for part in inner.__qualname__.split("."):
        value = getattr(value, part, None)
    return value is None


def code_of(maker: Any, reference: Callable[[Any], Any]) -> Any:
    """Describe the code of a class or function by its bytecode and the objects that it uses.

    Args:
        maker: The class, or the function without wrappers.
        reference: Function that describes a used object, such as a global or a default value.
    """
    if isinstance(maker, type):
        members = [[name, reference(x)] for name, x in vars(maker).items() if name not in _NOT_CODE]
        return [full_name(maker), [reference(base) for base in maker.__bases__], members]
    code = getattr(maker, "__code__", None)
    if code is None:
        return full_name(maker)
    used = {name: maker.__globals__[name] for name in _names(code) if name in maker.__globals__}
    closure = dict(zip(code.co_freevars, (_content(x) for x in maker.__closure__ or ()), strict=True))
    return [
        _instructions(code),
        [[name, reference(x)] for name, x in (used | closure).items()],
        reference([maker.__defaults__, maker.__kwdefaults__]),
    ]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # reading a closure cell without content raises this error
        return None


def _names(code: CodeType) -> list[str]:
    """Return the names of the globals that a function and its nested functions read."""
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in _names(x)]
    outer = [x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return list(dict.fromkeys([*outer, *inner]))


def _instructions(code: CodeType) -> list[Any]:
    """Return the bytecode as pairs (operation, operand), without the docstring's operations."""
    steps = list(dis.get_instructions(code))
    # the bytecode of a class body has two operations that load and store the docstring
    stored = [*steps[1:], None]
    docs = [x for x in stored if x is not None and (x.opname, x.argval) == ("STORE_NAME", "__doc__")]
    code_steps = [x for x, after in zip(steps, stored, strict=True) if x not in docs and after not in docs]
    return [[x.opname, _operand(x.argval)] for x in code_steps]


def _operand(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _instructions(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
