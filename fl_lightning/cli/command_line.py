"""The command line: the shipped callbacks, data sets and models are known by their bare names."""

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import fl_lightning
import fl_lightning.aggregation
import fl_lightning.executors.processes
import fl_lightning.executors.vectorized
import fl_lightning.models
import fl_lightning.optimizers.schedules
import fl_lightning.optimizers.server  # imported so that bare class names resolve in YAML
from fl_lightning.cli.federated_cli import FederatedCLI
from fl_lightning.cli.interruption import command
from fl_lightning.cli.messages import fail
from fl_lightning.cli.parser import ConciseParser
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.round.module import FederatedModule

_HOME = Path(fl_lightning.__file__).resolve().parent.parent

_TRAINER_DEFAULTS: dict[str, Any] = {
    "accelerator": "auto",
    "devices": 1,
    "max_epochs": -1,
    "logger": False,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 1,
    "enable_model_summary": False,
}


@command()
def main(
    args: Sequence[str] | None = None, model_class: type[FederatedModule] = FederatedModule
) -> FederatedCLI:
    """Run the command line.

    Args:
        args: Arguments without the program's name; those of the process when None.
        model_class: The module: a subclass of ``FederatedModule`` with a loss of its own, say.

    Returns:
        The finished command line, with its trainer, model and data.
    """
    quiet_host()
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        import_shipped()
        return FederatedCLI(
            model_class,
            FederatedDataModule,
            save_config_callback=None,
            parser_class=ConciseParser,
            parser_kwargs={"prog": "python -m fl_lightning"},
            trainer_defaults=_TRAINER_DEFAULTS,
            seed_everything_default=0,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=_with_shipped_configs(arguments),
        )
    except Exception as error:  # noqa: BLE001  # whatever it is, the user gets one line
        fail(error)


def _with_shipped_configs(arguments: list[str]) -> list[str]:
    """Let ``--config configs/X.yaml`` find the shipped file from any working directory."""

    def located(argument: str) -> str:
        option, _, value = argument.rpartition("=")
        shipped = _HOME / value
        found = value.startswith("configs/") and not Path(value).exists() and shipped.is_file()
        return (f"{option}=" if option else "") + str(shipped) if found else argument

    return [located(argument) for argument in arguments]


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
        places = [found.origin, *(found.submodule_search_locations or [])] if found else []
        home = Path(next(filter(None, places), "")).resolve()
        if _HOME / name not in home.parents:
            raise ConfigurationError(
                f"the package {name!r} found at {home} is not fl_lightning's; rename it or start from another folder"
            )
        packages[name] = import_module(name)
    return packages


def quiet_host() -> None:
    """Silence what Lightning says about hardware and loaders that cannot matter here."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # LightningCLI 2.6 uses jsonargparse in ways that it deprecates; nothing a user of either could change
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for message in (
        ".*LightningCLI's args parameter.*",  # what it warns of, main() does on purpose
        ".*does not have many workers.*",  # in-memory data need none
        ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning 2.6 on torch 2.12 and later, harmless
        "Implicitly cleaning up <TemporaryDirectory",  # W&B's, for the pictures of a run
        ".*Total length of `list` across ranks is zero.*",  # a federation without evaluation data
    ):
        warnings.filterwarnings("ignore", message)


if __name__ == "__main__":
    main()
