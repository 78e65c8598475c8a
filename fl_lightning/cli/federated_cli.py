"""LightningCLI with the run directory, checkpoints of whole rounds and the result table."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.profilers import PassThroughProfiler

from fl_lightning.cli.messages import keep_traceback
from fl_lightning.cli.parser import ConciseParser, check_settings
from fl_lightning.dashboard.settings import WandbSettings
from fl_lightning.errors import ConfigurationError
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.trainer import check_trainer
from fl_lightning.run.training import Training, as_list, has_progress_bar, lock_resumed, plugins_of
from fl_lightning.run_directory.checkpoint_io import check_run, load_run
from fl_lightning.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.run_directory.directory import Attempt, directory_of
from fl_lightning.run_directory.result import write_predictions

_MODEL_LINKS = ("num_classes", "in_channels", "image_size")


class FederatedCLI(LightningCLI):
    """Adds to LightningCLI the run directory, checkpoints of whole rounds and the result table."""

    training: Training | None = None
    resumed: Attempt | None = None
    checkpoint: dict[str, Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._asked = next(iter(kwargs.get("args") or ()), None)
        with ExitStack() as self.held:  # a folder is free for the next run as soon as this one ends
            super().__init__(*args, **kwargs)

    @property
    def attempt(self) -> Attempt | None:
        """The run's folder, None where nothing is written (``fast_dev_run``)."""
        return self.training.start.attempt if self.training is not None else None

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # needs the arguments
        """Those of LightningCLI; only the one that is asked for where it exists, since each parser takes its time."""
        known = LightningCLI.subcommands()
        return {self._asked: known[self._asked]} if self._asked in known else known

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would look for settings in the checkpoint, which has none, before it is checked."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's name, its checkpoints and the links between data and model."""
        parser.add_argument(
            "--name", type=str | None, default=None, help="runs/NAME/... (default: the YAML's name)"
        )
        parser.add_argument("--run_root", type=str, default="runs", help="the folder of all runs")
        parser.add_argument(
            "--threads", type=PositiveInt | None, default=None, help="CPU threads (default: torch's choice)"
        )
        parser.add_argument(
            "--accept_data", action="store_true", help="go on with other data than those of --ckpt_path"
        )
        parser.add_lightning_class_args(RoundCheckpoint, "checkpoint")
        parser.add_class_arguments(WandbSettings, "wandb")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        for name in _MODEL_LINKS:
            parser.link_arguments(
                f"data.{name}", f"model.model.init_args.{name}", self._decide(name), apply_on="instantiate"
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the settings, and refuse those that another setting or the data set decides."""
        super().parse_arguments(parser, args)
        assert isinstance(parser, ConciseParser)
        self.given = parser.given
        config = self.config[self.config.subcommand]
        if config.get("weights_only") is False and "--weights_only" not in {
            argument.partition("=")[0] for argument in args
        }:
            raise ConfigurationError(
                "weights_only: false in a file would run what a checkpoint holds; leave it out there"
            )
        check_settings(config, self.given)

    def _decide(self, name: str) -> Callable[[Any], Any]:
        """What a setting of the model that is linked to the data set becomes: a link alone would ignore what is given."""

        def of_data(value: Any) -> Any:
            setting = f"model.model.init_args.{name}"
            # before the link is applied it is what the user gave, or the model's default
            parsed = self.config[self.config.subcommand].get(setting)
            given = parsed if f"model.model.{name}" in self.given else None
            # only a model with this setting has a default; one whose default is None does without
            if value is None and given is None and parsed is not None:
                raise ConfigurationError(
                    f"{setting}: the data set does not say its {name}; set {setting}, or {name} in the data module"
                )
            if value is not None and given not in (None, value):
                raise ConfigurationError(
                    f"{setting}: {given} contradicts the data set, which decides: its {name} is {value}; leave it out"
                )
            return given if value is None else value

        return of_data

    def before_instantiate_classes(self) -> None:
        """Find out where the run lives, before any logger exists."""
        config = self.config[self.subcommand]
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        stem = Path(config.config[-1].relative).stem if config.get("config") else "run"
        config.name = config.name or stem  # saved too: the saved configuration runs beside this run
        again = config.clone()
        # the saved configuration starts a run, also that of a resumed one
        again.ckpt_path, again.accept_data = None, False
        self.config_yaml = self._parser(self.subcommand).dump(again, "yaml", False)  # False keeps nulls
        self.directory = directory_of(yaml.safe_load(self.config_yaml))
        if config.ckpt_path == "auto":
            config.ckpt_path = self.directory.newest_checkpoint()
        if config.ckpt_path:
            path = self.directory.resolve_checkpoint(str(config.ckpt_path))
            config.ckpt_path = str(path)
            if self.subcommand == "fit" and not config.trainer.fast_dev_run:
                self.resumed = lock_resumed(self.directory, path, self.held)
            self.checkpoint = load_run(config.ckpt_path, config.get("weights_only"))
        elif self.subcommand != "fit":
            raise ConfigurationError(
                f"ckpt_path: {self.subcommand} needs a trained model; use --ckpt_path last or a file"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer with this project's logger, checkpoints, progress and, for ``fit``, the run's folder."""
        settings = self._get(self.config_init, "trainer")
        path = self._get(self.config_init, "ckpt_path")
        assert isinstance(self.model, FederatedModule)
        if self.checkpoint is not None:
            self.model.accept_data = self._get(self.config_init, "accept_data")
            optimizer = self.model.configure_optimizers() if self.subcommand == "fit" else None
            check_run(path, self.checkpoint, self.model.model, optimizer)
        if self.subcommand == "fit":
            run = (
                self.model,
                self.datamodule,
                self.config_yaml,
                self.directory,
                self._get(self.config_init, "checkpoint"),
            )
            self.training = Training(*run, "the same command with --ckpt_path last")
            self.held.push(self._keep_traceback)
            self.held.enter_context(self.training)
            if not settings.fast_dev_run:
                source = Path(path) if path else None
                self.training.begin(source, self.checkpoint or {}, self.resumed)
            kwargs |= self.training.equipment(vars(settings), self._get(self.config_init, "wandb"))
        elif not has_progress_bar(as_list(settings.callbacks)) and settings.enable_progress_bar is None:
            kwargs["enable_progress_bar"] = sys.stdout.isatty()  # no bar in a log file
        self.checkpoint = None  # the trainer reads it again; two of them need not fit into memory
        return self._make_trainer(settings, **kwargs)

    def _make_trainer(self, settings: Namespace, **kwargs: Any) -> Trainer:
        try:
            trainer = super().instantiate_trainer(plugins=plugins_of(vars(settings)), **kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            place = f"accelerator: {settings.accelerator}, devices: {settings.devices}"
            raise ConfigurationError(f"trainer ({place}): {error}") from error
        check_trainer(trainer)
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # set in a helper of the trainer
        if (
            self.attempt is not None
            and profiler.dirpath is None
            and not isinstance(profiler, PassThroughProfiler)
        ):
            profiler.dirpath, profiler.filename = self.attempt.path, profiler.filename or "profile"
        return trainer

    def _keep_traceback(self, kind: Any, error: Any, trace: Any) -> None:
        """Write what ended the run into its folder, where it is kept."""
        if isinstance(error, Exception) and self.attempt is not None and self.attempt.path.exists():
            keep_traceback(error, self.attempt.path)

    def fit(self, **kwargs: Any) -> None:
        """Train in the run's folder."""
        assert self.training is not None
        self.training.fit(self.trainer, **kwargs)

    def predict(self, **kwargs: Any) -> None:
        """Write the predictions on the test data to ``predictions.csv`` in the run's folder."""
        outputs: list[Any] = self.trainer.predict(**{**kwargs, "return_predictions": True}) or []
        attempt = self.directory.attempt_of(Path(kwargs["ckpt_path"]))
        path = (attempt.path if attempt is not None else Path()) / "predictions.csv"
        count = write_predictions(path, outputs, self.datamodule.predict_dataloader())
        print(f"{count:,} predictions written to {path}")

    def after_fit(self) -> None:
        """Evaluate the final server model on the test data; print and write the result."""
        assert self.training is not None
        self.training.finish(self.trainer)
