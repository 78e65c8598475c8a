"""The command line. Users can name shipped callbacks, data and models without a dotted path."""

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

# imported so that YAML can name these classes without their dotted path
import fl_lightning.aggregation
import fl_lightning.callbacks
import fl_lightning.datamodules
import fl_lightning.execution.vectorized
import fl_lightning.models
import fl_lightning.optimizers.client_lr
import fl_lightning.optimizers.server  # noqa: F401
from fl_lightning.cli.federated_cli import FederatedCLI
from fl_lightning.cli.parser import ConciseParser
from fl_lightning.cli.print_errors import command, refusals
from fl_lightning.cli.user_settings import with_shipped_configs
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.experiments.run.training import TRAINER_DEFAULTS
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.round.module import FederatedModule


@command()
def main(
    args: Sequence[str] | None = None,
    cli_class: type[FederatedCLI] = FederatedCLI,
) -> FederatedCLI:
    """Run the command line.

    Args:
        args: Arguments without the program's name; None for ``sys.argv[1:]``.
        cli_class: Class of the command line.

    Returns:
        The command line object, after its command has ended. This object holds the trainer, the
        model and the data.
    """
    # remove the argument --_wandb... that a W&B sweep adds when it restarts a run
    given = [argument for argument in (sys.argv[1:] if args is None else args) if argument[:8] != "--_wandb"]
    return _started(given, cli_class)


def _started(args: Sequence[str], cli_class: type[FederatedCLI]) -> FederatedCLI:
    return cli_class(
        FederatedModule,
        FederatedDataModule,
        save_config_callback=None,
        parser_class=ConciseParser,
        parser_kwargs={"prog": "python -m fl_lightning"},
        trainer_defaults=TRAINER_DEFAULTS,
        seed_everything_default=0,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        args=with_shipped_configs(args),
    )


class _Built(Exception):
    """Exception that stops a command line after its parser is built. Its argument is the command line."""


class _Raising(FederatedCLI):
    """Command line that raises errors instead of printing them."""

    def end(self, error: Exception) -> NoReturn:
        raise error


class _Reader(_Raising):
    """Command line that only builds its parser. No arguments are parsed, and no command runs."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> NoReturn:
        raise _Built(self)


class _Builder(_Raising):
    """Command line that builds data, model and callbacks, but no trainer."""

    def instantiate_trainer(self, **kwargs: Any) -> None:  # type: ignore[override]  # nothing is trained
        """Return no trainer."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing, because there is no trainer."""


def build(args: Sequence[str]) -> FederatedCLI:
    """Build data, model and callbacks of ``fit`` without training.

    Args:
        args: Arguments of ``fit``.

    Returns:
        The command line, with its model, data and settings.

    Raises:
        ConfigurationError: A setting is invalid.
    """
    with refusals():
        return _started(["fit", *args], _Builder)


@cache
def _reader() -> FederatedCLI:
    """Return a cached command line, because building a parser is slow."""
    try:
        return _started(["fit"], _Reader)
    except _Built as built:
        cli: FederatedCLI = built.args[0]
        return cli


def resolve(args: Sequence[str]) -> Config:
    """Return the resolved configuration of ``fit``, including all defaults.

    Args:
        args: Arguments of ``fit``.

    Raises:
        ConfigurationError: A setting is invalid.
    """
    with refusals():
        reader = _reader()
        FederatedCLI.parse_arguments(reader, reader.parser, ["fit", *with_shipped_configs(args)])
        return reader.resolve(reader.config.fit)


if __name__ == "__main__":
    main()
