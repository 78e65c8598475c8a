"""LightningCLI with run directories, checkpoints after rounds and a result table."""

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import Namespace
from jsonargparse.typing import restricted_number_type
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from fl_lightning.cli.mistakes import imported
from fl_lightning.cli.parser import ConciseParser, new_lists
from fl_lightning.cli.print_errors import fail
from fl_lightning.cli.user_settings import given_settings, read_given
from fl_lightning.client_data.federated import SIZES
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run.trainer import MOST_THREADS, as_list, make_trainer, use_threads
from fl_lightning.experiments.run.training import Training, has_progress_bar
from fl_lightning.experiments.run_directory.checkpoint_io import check_run, load_checkpoint
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.experiments.run_directory.ckpt_path import find_checkpoint
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.weights_and_biases.settings import WandbSettings
from fl_lightning.round.hooks import extend_model
from fl_lightning.round.module import FederatedModule

_Threads: Any = restricted_number_type("int_from_1_to_1024", int, [(">=", 1), ("<=", MOST_THREADS)])


class FederatedCLI(LightningCLI):
    """LightningCLI with run directories, checkpoints after rounds and a result table."""

    training: Training | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._asked = next(iter(kwargs.get("args") or ()), None)
        try:
            # this stack releases the lock of the run directory at the end of the run
            with ExitStack() as self.held:
                super().__init__(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # users see one line, whatever the error
            self.end(error)

    def end(self, error: Exception) -> NoReturn:
        """Print one line about an error, write a traceback to the run directory, and exit."""
        attempt = self.attempt
        fail(error, attempt.error if attempt is not None and attempt.path.exists() else None)

    @property
    def attempt(self) -> Attempt | None:
        """Run directory; None if no files are written, for example with ``fast_dev_run``."""
        return self.training.start.attempt if self.training is not None else None

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static in Lightning
        """Return the requested subcommand, or all subcommands if the requested one is unknown.

        Lightning makes a parser for each subcommand in the result, and making a parser takes time.
        The command ``predict`` reads a run directory instead of these settings. ``verbose`` is a
        setting of runs, in place of Lightning's setting of ``validate`` and ``test``.
        """
        known = {name: {*skipped, "verbose"} for name, skipped in LightningCLI.subcommands().items()}
        known.pop("predict")
        return {self._asked: known[self._asked]} if self._asked in known else known

    def _parse_ckpt_path(self) -> None:
        """Do nothing: checkpoints of fl_lightning contain no settings.

        Lightning's own method would load the checkpoint without the checks of fl_lightning.
        """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the settings of a run, such as ``--name`` and the checkpoints.

        The data module determines settings of the model such as ``num_classes``.
        ``seed_everything`` determines the seeds of the model and the data.
        """
        words = "folder of the run in --run_root (default: stem of the YAML)"
        parser.add_argument("--name", type=str | None, default=None, help=words)
        parser.add_argument("--run_root", type=str, default="runs", help="folder of all runs")
        words = "number of CPU threads; more than 1 implies one process (default: a rank per core)"
        parser.add_argument("--threads", type=_Threads | None, default=None, help=words)
        words = "resume with data that differ from the data of --ckpt_path"
        parser.add_argument("--accept_data", action="store_true", help=words)
        words = "print all values of the result (default: at most 15 rows), and each decision about speed"
        parser.add_argument("--verbose", action="store_true", help=words)
        parser.add_lightning_class_args(RoundCheckpoint, "checkpoint")
        parser.add_class_arguments(WandbSettings, "wandb")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        for name in SIZES:
            parser.link_arguments(
                f"data.{name}", f"model.model.init_args.{name}", self._decide(name), apply_on="instantiate"
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the settings. Raise an error for values that Lightning would misread or override."""
        assert isinstance(parser, ConciseParser)
        command = next((argument for argument in args if argument in LightningCLI.subcommands()), "")
        known = parser.settings()
        # a file for several commands has names such as fit.model.lr: remove the command's name
        read = [
            setting._replace(name=setting.name.removeprefix(f"{command}.")) for setting in read_given(args)
        ]
        parser.given, self.given = read, given_settings(read)
        seed = self.given.get("seed_everything", 0)
        # if seed_everything is true, Lightning would draw a random seed
        if type(seed) is not int or not 0 <= seed < 2**32:
            raise ConfigurationError(f"seed_everything: {seed} must be a whole number from 0 to {2**32 - 1}")
        for name, value in self.given.items():
            # range checks would accept nan, because all comparisons with nan are false
            if isinstance(value, float) and math.isnan(value):
                raise ConfigurationError(f"{name}: nan is no number; give a number")
            inner = [setting for setting in known if setting.startswith(f"{name}.")]
            if inner and name not in known:
                shown = "null" if value is None else value
                raise ConfigurationError(f"{name}: {shown} holds no settings such as {inner[0]}")
        super().parse_arguments(parser, new_lists(args))
        config = self.config[self.config.subcommand]
        if config.get("weights_only") is False and not any(x.startswith("--weights_only") for x in args):
            raise ConfigurationError(
                "weights_only: false in a file would run code from a checkpoint; remove it from the file"
            )
        seed = config.seed_everything
        for setting in ("data.seed", "model.seed"):
            given = self.given.get(setting, seed)
            if given != seed:
                raise ConfigurationError(
                    f"{setting}: {given} contradicts seed_everything: {seed}, which decides; leave it out"
                )

    def _decide(self, name: str) -> Callable[[Any], Any]:
        """Return a function that passes a setting of the data module to the model.

        The function raises an error if the user's value contradicts the data. Lightning's own links
        would override the user's value without an error.
        """

        def of_data(value: Any) -> Any:
            setting = f"model.model.init_args.{name}"
            # the link is not applied yet: the value is the user's value or the model's default
            parsed = self.config[self.config.subcommand].get(setting)
            given = parsed if self._gives(name) else None
            kind = imported(self.config[self.config.subcommand].model.model.class_path)
            keeps_default = isinstance(kind, type) and issubclass(kind, LightningModule)
            if value is None and (name == "in_features" or keeps_default):
                return parsed  # image data have no in_features
            # if the model's default is not None, the model needs a value for this setting
            if value is None and given is None and parsed is not None:
                raise ConfigurationError(
                    f"{setting}: the data set does not define its {name}; set {setting}, or {name} in the data module"
                )
            if value is not None and given not in (None, value):
                raise ConfigurationError(
                    f"{setting}: {given} contradicts the data set, which decides: its {name} is {value}; leave it out"
                )
            return given if value is None else value

        return of_data

    def before_instantiate_classes(self) -> None:
        """Set the run's name and store its resolved configuration."""
        config = self.config[self.subcommand]
        if config.threads is not None:
            config.trainer.devices = use_threads(config.threads, config.trainer.devices)
        stem = Path(config.config[-1].relative).stem if config.get("config") else "run"
        # save the name, too, so that a rerun with the saved file has the same name
        config.name = config.name or stem
        # do not save ckpt_path, because a rerun with the saved file must start a new run
        self.resolved = {**self.resolve(config), "ckpt_path": None, "accept_data": False, "verbose": False}

    def resolve(self, config: Namespace) -> Config:
        """Return a configuration as dicts, lists, strings and numbers.

        A setting of the model that the data can determine, such as the number of classes, is kept
        only if the user gives its value.
        """
        resolved = self.plain(config)
        # the class of the data may fix a value, such as CIFAR10's ten classes
        kind = imported(config.data.class_path)
        for name in SIZES:
            given = config.get(f"model.model.init_args.{name}")
            if given is not None and self._gives(name) and given != getattr(kind, name, None):
                resolved["model"]["model"].setdefault("init_args", {})[name] = given
        return resolved

    def plain(self, config: Namespace) -> Config:
        """Return a parsed configuration as dicts, lists, strings and numbers.

        Settings of the model that the data determine are left out.
        """
        parser = self._parser(self.config.subcommand)
        values: Config = yaml.safe_load(parser.dump(config, "yaml", False, skip_validation=True))
        return values

    def _gives(self, name: str) -> bool:
        """Return whether the user has set a model argument that the data can also determine."""
        return not {f"model.model.{name}", f"model.model.dict_kwargs.{name}"}.isdisjoint(self.given)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the trainer of a run (``fit``) or of an evaluation (other subcommands)."""
        config = self.config_init[self.subcommand]
        settings, ckpt_path = vars(config.trainer), config.ckpt_path
        assert isinstance(self.model, FederatedModule)
        training = Training(
            self.model, self.datamodule, self.resolved, config.checkpoint, verbose=config.verbose
        )
        self.model.accept_data = config.accept_data
        if self.subcommand == "fit":
            self.training = training
            self.held.enter_context(training.prepare(settings, config.wandb, ckpt_path, config.weights_only))
            return training.trainer
        path = find_checkpoint(training.directory, ckpt_path)
        if path is None:
            raise ConfigurationError(
                f"ckpt_path: {self.subcommand} needs a trained model; use --ckpt_path last or a file"
            )
        callbacks = as_list(config.trainer.callbacks)
        extend_model(self.model.model, callbacks, self.model.seed)
        check_run(path, load_checkpoint(path, config.get("weights_only")), self.model.model)
        config.ckpt_path = str(path)
        if config.trainer.enable_progress_bar is None and not has_progress_bar(callbacks):
            kwargs["enable_progress_bar"] = sys.stdout.isatty()  # a log file gets no progress bar
        return make_trainer(settings, **{**kwargs, "callbacks": [*callbacks, config.checkpoint]})

    def fit(self, **kwargs: Any) -> None:
        """Train in the run directory; print and write the result."""
        assert self.training is not None
        self.training.run()
