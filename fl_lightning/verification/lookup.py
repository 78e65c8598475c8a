"""From the words of a command line to the callback that they mean."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import yaml

from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.round.callback import FederatedCallback


def find(name: str, methods: Mapping[str, type[FederatedCallback]]) -> type[FederatedCallback]:
    """The callback class of a shipped name or a dotted path.

    Raises:
        ConfigurationError: There is none, or it is something else.
    """
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        if name not in methods:
            raise ConfigurationError(
                f"--callback: there is no shipped method {name!r}{nearest(name, methods)}; shipped are "
                f"{', '.join(methods)}; your own needs its dotted path, such as methods.{name}"
            )
        return methods[name]
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a file of the user's raises
        raise ConfigurationError(
            f"--callback: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        own = [key for key, value in vars(module).items() if is_method(value)]
        raise ConfigurationError(f"--callback: {module_name} has no {class_name!r}{nearest(class_name, own)}")
    if not is_method(found):
        raise ConfigurationError(
            f"--callback: {name} is no subclass of FederatedCallback, so no round calls it"
        )
    return found


def is_method(thing: object) -> TypeGuard[type[FederatedCallback]]:
    """Whether something is a class of a method."""
    return isinstance(thing, type) and issubclass(thing, FederatedCallback) and thing is not FederatedCallback


def read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Constructor arguments from texts such as ``"mu=0.1"``; values are read as YAML.

    Raises:
        ConfigurationError: A text is of another form.
    """
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigurationError(f"--init: {text!r} is not of the form key=value, such as mu=0.1")
        settings[key] = _value(value)
    return settings


def maker(cls: type[FederatedCallback], settings: Mapping[str, Any]) -> Callable[[], FederatedCallback]:
    """What makes the callback, once its settings fit its constructor.

    Raises:
        ConfigurationError: Settings are missing, unknown or refused.
    """
    parameters = {
        name: one
        for name, one in inspect.signature(cls).parameters.items()
        if one.kind is not one.VAR_POSITIONAL
    }
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for key in settings:
        if key not in parameters and not open_ended:
            raise ConfigurationError(
                f"--init: {cls.__name__} has no setting {key!r}; it has {', '.join(parameters) or 'none'}"
                f"{nearest(key, parameters)}"
            )
    missing = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind is not one.VAR_KEYWORD and name not in settings
    ]
    if missing:
        wanted = " ".join(f"{name}=VALUE" for name in missing)
        raise ConfigurationError(f"{cls.__name__} needs {', '.join(missing)}: add --init {wanted}")
    make = partial(cls, **settings)
    try:
        make()
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{cls.__name__}(...) raises {type(error).__name__}: {error}") from error
    return make


def _value(text: str) -> Any:
    """A value as YAML reads it, numbers such as 1e-3 included, which YAML 1.1 takes for text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--init: {text!r} is not a YAML value") from error
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    return value
