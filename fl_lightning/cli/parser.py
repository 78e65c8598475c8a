"""A LightningCLI parser whose errors are one line: the setting, the value and what would work."""

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, get_type_hints

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from fl_lightning.cli.given import given_settings, plain_name
from fl_lightning.cli.messages import explain
from fl_lightning.errors import ConfigurationError, doing


class ConciseParser(LightningArgumentParser):
    """Prints the one line of an error that matters, without pages of usage; takes no abbreviated settings.

    Attributes:
        owner: The class whose settings it reads, empty where they are of several.
        given: What the user gave (:func:`fl_lightning.cli.given.given_settings`).
    """

    owner = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation would make a misspelt setting (--model.local_step) pass as another one.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.given: dict[str, Any] = {}
        self._commands: Any = None

    def add_class_arguments(
        self, class_type: type, nested_key: str | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """Add the settings of a class, and remember whose they are when the parser is for this class alone."""
        if nested_key is None:
            self.owner = class_type.__name__
        names: list[str] = super().add_class_arguments(class_type, nested_key, *args, **kwargs)
        return names

    def add_function_arguments(
        self, function: Callable[..., Any], *args: Any, linked_targets: object = None, **kwargs: Any
    ) -> list[str]:
        """Add the settings of a function that makes a model; jsonargparse says which are linked, and knows it only of classes."""
        self.owner = function.__name__
        names: list[str] = super().add_function_arguments(function, *args, **kwargs)
        parameters, made = inspect.signature(function).parameters.values(), get_type_hints(function)["return"]
        passes_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
        if passes_on and "num_classes" not in names and issubclass(made, nn.Module):
            # a function that looks up another by name, as timm's does, hides what that one takes
            names.append(self.add_argument("--num_classes", type=int | None, default=None).dest)
        return names

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Add the place of the subcommands, and remember it."""
        self._commands = super().add_subcommands(*args, **kwargs)
        return self._commands

    def instantiate(self, *args: Any, **kwargs: Any) -> Namespace:
        """Make the classes that the settings name; an exception of theirs notes which one, and with which values."""
        made: Namespace = super().instantiate(*args, instantiators=[(_make, object, True)], **kwargs)
        return made

    def settings(self) -> list[str]:
        """The names of the settings that the parser and its subcommands take, without ``init_args``."""
        parsers = self._commands.choices.values() if self._commands else [self]
        return list(
            dict.fromkeys(plain_name(name) for parser in parsers for name, _ in parser.get_defaults().items())
        )

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]  # the arguments alone are ours
        """Read the settings, once it is known that each file and each section has some."""
        arguments = list(sys.argv[1:] if args is None else args)
        try:
            given = given_settings(arguments)
        except ConfigurationError as error:
            _refuse(" ".join(str(error).split()))
        commands = self._commands.choices if self._commands else {}
        command = next((argument for argument in arguments if argument in commands), "")
        # a file for all commands has a section for each
        self.given = {name.removeprefix(f"{command}."): value for name, value in given.items()}
        known = self.settings()
        for name, value in self.given.items():
            inner = [setting for setting in known if setting.startswith(f"{name}.")]
            if inner and name not in known:
                _refuse(f"{name}: {'null' if value is None else value} holds no settings such as {inner[0]}")
        return super().parse_args(_one_moment(arguments, self.given), *others, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print a short form of a parser's message to stderr and exit with status 2."""
        _refuse(explain(message, self.settings(), self.owner))


def _nan_settings(value: Any, name: str) -> Iterator[str]:
    """The names of settings that are NaN: every comparison with it is false, so ranges let it pass."""
    if isinstance(value, Namespace | dict):
        for key, inner in (vars(value) if isinstance(value, Namespace) else value).items():
            yield from _nan_settings(inner, plain_name(f"{name}.{key}").lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _nan_settings(inner, name)
    elif isinstance(value, float) and math.isnan(value):
        yield name


def _make(class_type: type, *args: Any, **settings: Any) -> Any:
    given = {name: value for name, value in settings.items() if isinstance(value, str | int | float)}
    with doing(
        f"making {class_type.__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
    ):
        return class_type(*args, **settings)


def _one_moment(arguments: list[str], given: Mapping[str, Any]) -> list[str]:
    """``--trainer.callbacks.freeze_round 2`` replaces the ``freeze_fraction`` of a YAML, and the other way round."""
    others = {"freeze_round": "freeze_fraction", "freeze_fraction": "freeze_round"}
    options = [argument.partition("=")[0] for argument in arguments]
    found: list[str] = []
    for option, argument in zip(options, arguments, strict=True):
        owner, _, name = option.rpartition(".")
        other = others.get(name, "")
        if (
            other
            and owner not in options
            and f"{owner}.{other}" not in options
            and f"'{other}'" in str(given)
        ):
            found.append(f"{owner}.{other}=null")
        found.append(argument)
    return found


def _refuse(line: str) -> NoReturn:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def check_settings(config: Namespace, given: Mapping[str, Any]) -> None:
    """Refuse values that nothing behind the parser answers with one line, before anything is made of them.

    Args:
        config: The parsed settings of a subcommand.
        given: What the user gave (:func:`fl_lightning.cli.given.given_settings`).

    Raises:
        ConfigurationError: A value is out of range, or another setting decides.
    """
    for name in _nan_settings(config, ""):
        raise ConfigurationError(f"{name}: nan is no number; give one")
    cores = os.cpu_count() or 1
    if config.threads is not None and config.threads > 8 * cores:
        raise ConfigurationError(
            f"threads: {config.threads} is more than this machine can run; use at most {cores}, its cores"
        )
    if config.ckpt_path == "":
        raise ConfigurationError(
            "ckpt_path: '' names no checkpoint; give a file, 'last' or 'best', or leave it out"
        )
    seed = config.seed_everything
    # a bool is an int: true would draw a seed that the links to data and model never see
    if isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ConfigurationError(
            f"seed_everything: {str(seed).lower()} must be a whole number from 0 to {2**32 - 1}"
        )
    for setting in ("data.init_args.seed", "model.seed"):
        own = given.get(plain_name(setting))
        if own is not None and own != seed:
            raise ConfigurationError(
                f"{setting}: {own} contradicts seed_everything: {seed}, which decides; leave it out and set seed_everything"
            )
    data = config.data
    if data.class_path.rpartition(".")[2] == "FederatedDataModule" and not data.init_args.get("clients"):
        raise ConfigurationError(
            f"data: {data.class_path} has no clients; name a data set such as Digits, or a subclass of your own that "
            "makes its clients"
        )
