"""The command line: LightningCLI with the shipped callbacks, data sets and models known by their bare names."""

import logging
import shutil
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse.typing import PositiveInt
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import fl_lightning
import fl_lightning.aggregation
import fl_lightning.executors
import fl_lightning.models
import fl_lightning.schedules  # imported so that bare class names resolve in YAML
from fl_lightning.checkpointing import AtomicCheckpointIO, RoundCheckpoint
from fl_lightning.datamodule import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.interruption import FinishRound
from fl_lightning.metrics_log import JSONLinesLogger, read_rows
from fl_lightning.module import FederatedModule
from fl_lightning.parser import ConciseParser, behind
from fl_lightning.progress import RoundProgress
from fl_lightning.results import RunFiles, collect_result, print_result, write_predictions
from fl_lightning.run_directory import Attempt, RunDirectory, attempt_of, config_hash, write_json

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
_HASHED = ("model", "data", "trainer")
_MODEL_LINKS = ("num_classes", "in_channels", "image_size")


class FederatedCLI(LightningCLI):
    """Adds to LightningCLI the run directory, checkpoints of whole rounds and the result table."""

    attempt: Attempt | None = None
    interruption: FinishRound
    is_new_attempt = False

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's name, its checkpoints and the links between data and model."""
        parser.add_argument(
            "--name", type=str | None, default=None, help="runs/NAME/... (default: the YAML's name)"
        )
        parser.add_argument("--run_root", type=str, default="runs", help="the folder of all runs")
        parser.add_argument(
            "--threads", type=PositiveInt | None, default=None, help="CPU threads (default: torch's choice)"
        )
        parser.add_lightning_class_args(RoundCheckpoint, "checkpoint")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        for name in _MODEL_LINKS:
            parser.link_arguments(f"data.{name}", f"model.model.init_args.{name}", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Find out where the run lives, before any logger exists."""
        self.interruption = FinishRound()
        config = self.config[self.subcommand]
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        stem = Path(config.config[-1].relative).stem if config.get("config") else "run"
        config.name = config.name or stem  # saved too: the saved configuration runs beside this run
        self.config_yaml = self._parser(self.subcommand).dump(config, "yaml", False)  # False keeps nulls
        resolved = {key: value for key, value in yaml.safe_load(self.config_yaml).items() if key in _HASHED}
        self.directory = RunDirectory(
            Path(config.run_root) / config.name, f"{config_hash(resolved)}-s{config.seed_everything}"
        )
        if config.ckpt_path:
            config.ckpt_path = str(self.directory.resolve_checkpoint(config.ckpt_path))
        elif self.subcommand != "fit":
            raise ConfigurationError(
                f"ckpt_path: {self.subcommand} needs a trained model; use --ckpt_path last or a file"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer with this project's logger, checkpoints, progress and, for ``fit``, the run's folder."""
        settings = self._get(self.config_init, "trainer")
        if settings.check_val_every_n_epoch is not None and settings.check_val_every_n_epoch < 1:
            raise ConfigurationError(
                f"trainer.check_val_every_n_epoch: {settings.check_val_every_n_epoch} must be at least 1 round"
            )
        if self.subcommand == "fit" and not settings.fast_dev_run:
            ckpt_path = self._get(self.config_init, "ckpt_path")
            self.attempt = attempt_of(Path(ckpt_path)) if ckpt_path else None
            self.is_new_attempt = self.attempt is None
            self.attempt = self.attempt or self.directory.new_attempt()
        callbacks = _as_list(settings.callbacks)
        if settings.enable_progress_bar is not False and not any(
            isinstance(callback, ProgressBar) for callback in callbacks
        ):
            callbacks.append(RoundProgress())
        if self.subcommand == "fit":
            # first, so that it prints before a progress bar takes the terminal
            callbacks.insert(0, RunFiles(self.attempt, self.config_yaml))
            callbacks.append(self.interruption)
        loggers = _as_list(settings.logger)
        if self.attempt is not None:
            loggers.append(JSONLinesLogger(self.attempt.path))
            kwargs["default_root_dir"] = str(self.attempt.path)
        plugins = [*_as_list(settings.plugins), AtomicCheckpointIO()]
        try:
            trainer = super().instantiate_trainer(
                callbacks=callbacks, logger=loggers or False, plugins=plugins, **kwargs
            )
            if trainer.world_size > 1:
                raise ConfigurationError(
                    f"trainer.devices: {settings.devices} is not possible yet; use devices: 1"
                )
        except (ValueError, TypeError, MisconfigurationException) as error:
            self._discard_untrained()
            if isinstance(error, ConfigurationError):
                raise
            place = f"accelerator: {settings.accelerator}, devices: {settings.devices}"
            raise ConfigurationError(f"trainer ({place}): {error}") from error
        return trainer

    def fit(self, **kwargs: Any) -> None:
        """Train; a run that fails before the end of its first round leaves no folder behind."""
        try:
            self.trainer.fit(**kwargs)
        except BaseException:
            self._discard_untrained()
            raise

    def _discard_untrained(self) -> None:
        if self.attempt is None or not self.is_new_attempt:
            return
        metrics = self.attempt.metrics
        if not (metrics.exists() and any(row["round"] > 0 for row in read_rows(metrics))):
            shutil.rmtree(self.attempt.path)

    def predict(self, **kwargs: Any) -> None:
        """Write the predictions on the test data to ``predictions.csv`` in the run's folder."""
        outputs: list[Any] = self.trainer.predict(**{**kwargs, "return_predictions": True}) or []
        attempt = attempt_of(Path(kwargs["ckpt_path"]))
        path = (attempt.path if attempt is not None else Path()) / "predictions.csv"
        count = write_predictions(path, outputs, self.datamodule.predict_dataloader())
        print(f"{count:,} predictions written to {path}")

    def after_fit(self) -> None:
        """Evaluate the final server model on the test data; print and write the result."""
        assert isinstance(self.model, FederatedModule)
        if self.interruption.requested and self.trainer.global_step != self.trainer.max_epochs:
            rounds = self.trainer.global_step
            print(
                f"stopped after round {rounds}; the same command with --ckpt_path last goes on",
                file=sys.stderr,
            )
            sys.exit(128 + signal.SIGINT)
        metrics = {name: value for name, value in self.model.row.items() if name.startswith("val/")}
        if not metrics and self.datamodule.fit_split == "val" and self.datamodule.val_dataloader():
            metrics |= self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)[0]
        if self.datamodule.test_dataloader():
            metrics |= self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)[0]
        result = collect_result(self.trainer, self.model, self.attempt, metrics)
        if self.attempt is not None:
            write_json(self.attempt.result, result)
        print_result(result)


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
    _quiet_host()
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        _import_shipped()
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
    except Exception as error:
        told = next(
            (e for e in behind(error) if isinstance(e, ConfigurationError | MisconfigurationException)), None
        )
        if told is None:
            raise
        print(f"error: {' '.join(str(told).split())}", file=sys.stderr)
        sys.exit(2)


def _as_list(setting: Any) -> list[Any]:
    """A setting that may be missing, one thing or a list of them, as a list."""
    if not setting:
        return []
    return list(setting) if isinstance(setting, list | tuple) else [setting]


def _with_shipped_configs(arguments: list[str]) -> list[str]:
    """Let ``--config configs/X.yaml`` find the shipped file from any working directory."""

    def located(argument: str) -> str:
        option, _, value = argument.rpartition("=")
        shipped = _HOME / value
        found = value.startswith("configs/") and not Path(value).exists() and shipped.is_file()
        return (f"{option}=" if option else "") + str(shipped) if found else argument

    return [located(argument) for argument in arguments]


def _import_shipped() -> None:
    """Import the shipped callbacks and data sets, and refuse foreign packages of the same names.

    Raises:
        ConfigurationError: Another package named ``callbacks`` or ``datamodules`` comes first on the path.
    """
    for name in ("callbacks", "datamodules"):
        package = __import__(name)
        home = Path(package.__file__ or str(next(iter(package.__path__)))).resolve()
        if _HOME not in home.parents:
            raise ConfigurationError(
                f"the package {name!r} found at {home} is not fl_lightning's; rename it or start from another folder"
            )


def _quiet_host() -> None:
    """Silence what Lightning says about hardware and loaders that cannot matter here."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*LightningCLI's args parameter.*",  # what it warns of, main() does on purpose
        ".*does not have many workers.*",  # in-memory data need none
        ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning 2.6 on torch 2.12 and later, harmless
        ".*You defined a `validation_step` but have no `val_dataloader`.*",  # a federation without evaluation data
    ):
        warnings.filterwarnings("ignore", message)


if __name__ == "__main__":
    main()
