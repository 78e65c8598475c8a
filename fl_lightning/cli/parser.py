"""A LightningCLI parser whose errors are one line: the setting, the value and what would work."""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from jsonargparse._link_arguments import skip_apply_links
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser

from fl_lightning.cli.messages import _settings, behind, explain
from fl_lightning.errors import ConfigurationError


class ConciseParser(LightningArgumentParser):
    """Prints the one line of an error that matters, without pages of usage; takes no abbreviated settings."""

    owner = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation would make a misspelt setting (--model.local_step) pass as another one.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def add_class_arguments(
        self, class_type: type, nested_key: str | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """Add the settings of a class, and remember whose they are when the parser is for this class alone."""
        if nested_key is None:
            self.owner = class_type.__name__
        names: list[str] = super().add_class_arguments(class_type, nested_key, *args, **kwargs)
        return names

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Make the objects, and refuse callbacks that cannot be saved side by side."""
        made = super().instantiate(*args, **kwargs)
        # jsonargparse makes the objects of a subcommand with the parser of all of them
        section = made.get(made.get("subcommand") or "") or made
        callbacks = section.get("trainer.callbacks")
        if isinstance(callbacks, list):
            check_callbacks(callbacks, section.get("checkpoint"))
        return made

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print a short form of a parser's message to stderr and exit with status 2."""
        # what a class of this project or of the user says about itself is better than what became of it on the way
        own = next((" ".join(str(e).split()) for e in behind(ex) if isinstance(e, ConfigurationError)), None)
        print(f"error: {own or explain(message, ex, _settings(self), self.owner)}", file=sys.stderr)
        sys.exit(2)


def given_settings(parser: ArgumentParser, arguments: Any) -> Namespace:
    """What the command line and its files say themselves: no defaults, and no links between settings."""
    with skip_apply_links():
        given = parser.parse_args(arguments, defaults=False)
    return given[given.subcommand] if given.get("subcommand") else given


def check_settings(config: Namespace, given: Namespace) -> None:
    """Refuse values that nothing behind the parser answers with one line, before anything is made of them.

    Args:
        config: The parsed settings of a subcommand.
        given: Those that the user gave (:func:`given_settings`).

    Raises:
        ConfigurationError: A value is out of range, or another setting decides.
    """
    seed = config.seed_everything
    # a bool is an int: true would draw a seed that the links to data and model never see
    if isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ConfigurationError(
            f"seed_everything: {str(seed).lower()} must be a whole number from 0 to {2**32 - 1}"
        )
    data_seed = given.get("data.init_args.seed")
    if data_seed is not None and data_seed != seed:
        raise ConfigurationError(
            f"data.init_args.seed: {data_seed} contradicts seed_everything: {seed}, which decides; leave it out and set "
            "seed_everything"
        )
    if config.trainer.logger is True:
        raise ConfigurationError(
            "trainer.logger: true names no logger; use a class such as lightning.pytorch.loggers.WandbLogger, or false "
            "(metrics.jsonl is written in any case)"
        )
    data = config.data
    if data.class_path.rpartition(".")[2] == "FederatedDataModule" and not data.init_args.get("clients"):
        raise ConfigurationError(
            f"data: {data.class_path} has no clients; name a data set such as Digits, or a subclass of your own that "
            "makes its clients"
        )


def check_callbacks(callbacks: Sequence[Any], checkpoint: Any = None) -> None:
    """Refuse two callbacks whose states would be saved under one name.

    Args:
        callbacks: Those of the setting ``trainer.callbacks``.
        checkpoint: The one that the setting ``checkpoint`` makes in every run.

    Raises:
        ConfigurationError: A callback with a state is given twice.
    """
    always = checkpoint.state_key if isinstance(checkpoint, Callback) else None
    seen = {always}
    for callback in callbacks:
        stateful = type(callback).state_dict is not Callback.state_dict or (
            type(callback).on_save_checkpoint is not Callback.on_save_checkpoint
        )
        if stateful and callback.state_key in seen:
            remedy = (
                "every run has one: set checkpoint.* instead" if callback.state_key == always else "keep one"
            )
            raise ConfigurationError(f"trainer.callbacks: {type(callback).__name__} is given twice; {remedy}")
        seen.add(callback.state_key)
