"""Parser of LightningCLI with one-line errors.

An error names the file and the line of a setting, and suggests similar names.
"""

import enum
import inspect
from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
import yaml
from jsonargparse import Namespace, add_instantiator, set_loader
from jsonargparse.typing import register_type
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn
from torchmetrics import Metric

from fl_lightning.cli.mistakes import in_one_line, in_words, refuse_class_defaults
from fl_lightning.cli.print_errors import Refusal, broken_module, one_line
from fl_lightning.cli.user_settings import Given, plain_name, read_given
from fl_lightning.errors import ConfigurationError, doing
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.recorded import parameters
from fl_lightning.yaml_file import plain_yaml

# let jsonargparse read YAML as the other parts of the program do
set_loader("yaml", plain_yaml, (yaml.YAMLError, ValueError))

# Lightning's Timer has the enum Interval.step as a default: write the value of an enum
yaml.SafeDumper.add_multi_representer(enum.Enum, lambda dumper, member: dumper.represent_data(member.value))

# a tensor in a file is a list of numbers, such as the class weights of a loss
register_type(torch.Tensor, torch.Tensor.tolist, lambda numbers: torch.tensor(numbers, dtype=torch.float32))


class ConciseParser(LightningArgumentParser):
    """Parser with one-line errors. It does not accept abbreviated names of settings.

    Attributes:
        given: The user's settings, with file names and line numbers for error messages.
        commands: The subcommands of the parser; None without subcommands.
        owner: Name of the class or function whose settings the parser reads; empty for a command.
    """

    given: Sequence[Given] = ()
    owner = ""
    _asked: ClassVar["ConciseParser | None"] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # with abbreviations, the misspelt --model.local_step would set --model.local_steps
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.commands: Any = None

    def add_class_arguments(
        self, class_type: type, nested_key: str | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """Add the settings of a class."""
        self.owner = self.owner if nested_key else class_type.__name__
        refuse_class_defaults(class_type)
        names: list[str] = super().add_class_arguments(class_type, nested_key, *args, **kwargs)
        self._let_links_decide(kwargs.get("linked_targets"))
        if issubclass(class_type, Metric):
            self._let_data_decide_classes()
        return names

    def add_function_arguments(
        self, function: Callable[..., Any], *args: Any, linked_targets: object = None, **kwargs: Any
    ) -> list[str]:
        """Add the settings of a function that makes a model.

        jsonargparse calls this method with ``linked_targets``. jsonargparse's own method does not
        accept this argument.
        """
        self.owner = function.__name__
        # the argument instantiators of jsonargparse's instantiate affects only classes
        add_instantiator(_make, function)  # type: ignore[arg-type]  # a function works, too
        refuse_class_defaults(function)
        names: list[str] = super().add_function_arguments(function, *args, **kwargs)
        self._let_links_decide(linked_targets)
        parameters, made = inspect.signature(function).parameters.values(), get_type_hints(function)["return"]
        passes_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
        if passes_on and "num_classes" not in names and issubclass(made, nn.Module):
            # add num_classes, which functions such as timm's create_model hide behind **kwargs
            names.append(self.add_argument("--num_classes", type=int | None, default=None).dest)
        return names

    def _let_links_decide(self, targets: Any) -> None:
        """Set the default of a linked setting to None if the default is unknown.

        jsonargparse would ignore a link to a setting whose default is unknown.
        """
        for action in self._actions:
            if action.dest in (targets or ()) and type(action.default).__module__.startswith("jsonargparse"):
                action.default = None

    def _let_data_decide_classes(self) -> None:
        """Make a metric's required setting ``num_classes`` optional."""
        for action in self._actions:
            if action.dest == "num_classes" and action.required:
                action.required = False
                typed: Any = action  # jsonargparse adds the type of the setting
                typed._typehint |= None

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Add the subcommands, and store them, because :meth:`settings` needs them."""
        self.commands = super().add_subcommands(*args, **kwargs)
        return self.commands

    def instantiate(self, *args: Any, **kwargs: Any) -> Namespace:
        """Create the configured objects.

        If a constructor raises an exception, a note with the class and its settings is added.
        """
        made: Namespace = super().instantiate(*args, instantiators=[(_make, object, True)], **kwargs)
        return made

    def settings(self) -> list[str]:
        """Return the plain names of all settings, including the settings of subcommands."""
        parsers = self.commands.choices.values() if self.commands else [self]
        names = [name for parser in parsers for name, _ in parser.get_defaults().items()]
        return list(dict.fromkeys(map(plain_name, names)))

    def parse_args(self, args: Sequence[str], *more: Any, **settings: Any) -> Namespace:  # type: ignore[override]  # no default
        """Read the user's settings. Parsers of subcommands and of classes read a part of them."""
        if ConciseParser._asked is not None:
            return super().parse_args(args, *more, **settings)
        self.given = self.given or read_given(args)
        ConciseParser._asked = self
        try:
            return super().parse_args(args, *more, **settings)
        finally:
            ConciseParser._asked = None

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ``Refusal`` with jsonargparse's message in one line."""
        asked = ConciseParser._asked or self
        if line := in_one_line(self, message, asked.given):
            raise Refusal(line)
        for command in asked.commands.choices if asked.commands else ():
            message = message.replace(f" {command}.", " ")  # users write settings without a command
        raise Refusal(one_line(message) + broken_module(ex))


def _make(class_type: type, *args: Any, **settings: Any) -> Any:
    plain = {name: value for name, value in settings.items() if isinstance(value, str | int | float)}
    words = ", ".join(f"{name}={value!r}" for name, value in plain.items())
    with doing(f"making {class_type.__name__}({words})"):
        _refuse_null(class_type, settings)
        return class_type(*args, **settings)


def _refuse_null(class_type: type, settings: Config) -> None:
    """Raise an error if a setting is null, although the setting's type excludes null.

    jsonargparse itself would accept null.
    """
    for name in [name for name, value in settings.items() if value is None]:
        known = parameters(class_type).get(name)
        if known is None or known.default is None:
            continue
        if known.annotation is known.empty:
            # jsonargparse would not require a setting that has neither a type nor a default
            if known.default is known.empty:
                raise ConfigurationError(f"{class_type.__name__}.{name} is missing; give it")
            continue
        if not _takes_null(known.annotation):
            takes = in_words(known.annotation)
            raise ConfigurationError(f"{class_type.__name__}.{name}: null is not valid; it takes {takes}")


def _takes_null(kind: Any) -> bool:
    """Return whether null is a value of a type. If the type is unknown, return True."""
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return any(_takes_null(part) for part in get_args(kind))
    if origin is Literal:
        return None in get_args(kind)
    return origin in (Any, object, NoneType, Annotated) or not isinstance(origin, type)


def new_lists(arguments: Sequence[str]) -> list[str]:
    """Insert ``--trainer.callbacks=null`` before each list of callbacks, except before the first.

    Without this option, jsonargparse would mix settings of the earlier list into the later list.
    """
    result, is_given = [], False
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        words = [argument] if "=" in argument else [argument, following]
        if argument == "-c" or argument.startswith("--"):
            lists = [entry for entry in read_given(words) if entry.setting.endswith("trainer.callbacks")]
            if is_given and any(isinstance(x.value, list) and not x.name.endswith("+") for x in lists):
                result.append("--trainer.callbacks=null")
            is_given = is_given or bool(lists)
        result.append(argument)
    return result
