"""The command line: the shipped callbacks, data sets and models are known by their bare names."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import fl_lightning
import fl_lightning.aggregation
import fl_lightning.execution.vectorized
import fl_lightning.models
import fl_lightning.optimizers.schedules
import fl_lightning.optimizers.server  # imported so that bare class names resolve in YAML
from fl_lightning.cli.federated_cli import FederatedCLI
from fl_lightning.cli.messages import command
from fl_lightning.cli.parser import ConciseParser
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run.training import TRAINER_DEFAULTS
from fl_lightning.round.module import FederatedModule

_HOME = Path(fl_lightning.__file__).resolve().parent.parent


@command()
def main(
    args: Sequence[str] | None = None,
    model_class: type[FederatedModule] = FederatedModule,
    cli_class: type[FederatedCLI] = FederatedCLI,
) -> FederatedCLI:
    """Run the command line.

    Args:
        args: Arguments without the program's name; those of the process when None.
        model_class: The module: a subclass of ``FederatedModule`` with a loss of its own, say.
        cli_class: What is done with the settings.

    Returns:
        The finished command line, with its trainer, model and data.
    """
    import_shipped()
    # the agent of a sweep at W&B adds an argument of its own where it starts a run again
    given = [argument for argument in (sys.argv[1:] if args is None else args) if argument[:8] != "--_wandb"]
    return cli_class(
        model_class,
        FederatedDataModule,
        save_config_callback=None,
        parser_class=ConciseParser,
        parser_kwargs={"prog": "python -m fl_lightning"},
        trainer_defaults=TRAINER_DEFAULTS,
        seed_everything_default=0,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        args=_with_shipped_configs(given),
    )


def _with_shipped_configs(arguments: list[str]) -> list[str]:
    """Let ``--config configs/X.yaml`` find the shipped file from any working directory."""

    def located(argument: str) -> str:
        option, _, value = argument.rpartition("=")
        return (f"{option}=" if option else "") + shipped(value)

    return [located(argument) for argument in arguments]


def shipped(path: str) -> str:
    """Where a file lies: the shipped one of its name where it begins with ``configs/`` and is not there."""
    found = path.startswith("configs/") and not Path(path).exists() and (_HOME / path).is_file()
    return str(_HOME / path) if found else path


def import_shipped() -> dict[str, ModuleType]:
    """Import the shipped callbacks and data sets, and refuse foreign ones of the same names without executing them.

    Returns:
        The packages by name.

    Raises:
        ConfigurationError: Another package named ``callbacks`` or ``datamodules`` comes first on the path.
    """
    packages = {}
    for name in ("callbacks", "datamodules"):
        found = find_spec(name)
        home = Path((found and found.origin) or "").resolve()
        if _HOME / name not in home.parents:
            raise ConfigurationError(
                f"the package {name!r} found at {home} is not fl_lightning's; rename it or start from another folder"
            )
        packages[name] = import_module(name)
    return packages


if __name__ == "__main__":
    main()
