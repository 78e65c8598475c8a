"""Start and end of a fit: folder, loggers and trainer, then pictures and result."""

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError, Diverged
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.experiments.run.interruption import FinishRound, Stopped
from fl_lightning.experiments.run.number_of_ranks import cpu_ranks, limit_ranks
from fl_lightning.experiments.run.progress import RoundProgress
from fl_lightning.experiments.run.trainer import as_list, is_launched, make_trainer
from fl_lightning.experiments.run_directory.checkpoint_io import check_run, load_checkpoint
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.experiments.run_directory.ckpt_path import find_checkpoint
from fl_lightning.experiments.run_directory.config_digest import (
    changed_settings,
    deciding_settings,
    directory_of,
    full_name,
)
from fl_lightning.experiments.run_directory.directory import Config, RunDirectory
from fl_lightning.experiments.run_directory.drawings import draw_pictures
from fl_lightning.experiments.run_directory.finish_run import finish_run
from fl_lightning.experiments.run_directory.metrics_log import JSONLinesLogger, joined
from fl_lightning.experiments.run_directory.result import Result
from fl_lightning.experiments.run_directory.start import Start, find_start
from fl_lightning.experiments.run_directory.start_files import RunStart
from fl_lightning.experiments.weights_and_biases.logger import RoundWandbLogger
from fl_lightning.experiments.weights_and_biases.settings import WandbSettings
from fl_lightning.files import write_text
from fl_lightning.launched import launched_rank, silence
from fl_lightning.round.hooks import extend_model
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.trained import refuse_trained

TRAINER_DEFAULTS: Config = {
    "accelerator": "auto",
    "devices": "auto",
    "max_epochs": -1,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 1,
    "enable_model_summary": False,
}
"""Default values of the trainer's settings in a run."""


class Training:
    """The objects of a run, and the run's folder.

    Args:
        module: The module.
        data: The module's data.
        config: The resolved configuration.
        keeper: Callback that writes the run's checkpoints.
        directory: The folders of all attempts at a run of a Python script. Their name does not depend
            on the settings; a run that is resumed by its name must have the same settings. Default:
            the folders that the digest of the configuration names.
        verbose: Whether to print all values of the result, and each decision about speed.

    Attributes:
        directory: The folders of all attempts at the run.
        start: The folder, and the checkpoint to resume from. Before :meth:`prepare`, ``start`` has
            no folder.
        trainer: The run's trainer, once :meth:`prepare` has made it.
    """

    def __init__(
        self,
        module: FederatedModule,
        data: FederatedDataModule,
        config: Config,
        keeper: RoundCheckpoint,
        directory: RunDirectory | None = None,
        verbose: bool = False,
    ) -> None:
        self.module, self.data, self.config, self.keeper = module, data, config, keeper
        self.verbose = verbose
        kind = type(module)
        self._complete = config
        if kind is not FederatedModule and "class_path" not in config["model"]:
            model = {"class_path": full_name(kind), "init_args": config["model"]}
            self._complete = {**config, "model": model}
        self._of_script = directory is not None
        self.directory = directory_of(self._complete) if directory is None else directory
        self.start = Start()
        self._interruption = FinishRound()
        self._wandb: RoundWandbLogger | None = None

    @contextmanager
    def prepare(
        self,
        settings: Config,
        wandb: WandbSettings,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> Iterator[None]:
        """Choose and lock the run's folder, and make the trainer.

        The end of the ``with`` block also ends the run at W&B. If an error occurs before the first
        round is trained, the run's new folder is removed.

        Args:
            settings: The user's arguments of the trainer. With ``fast_dev_run``, the run has no
                folder.
            wandb: The run's W&B settings.
            ckpt_path: Checkpoint to resume from: a path, ``"last"``, ``"best"`` or ``"auto"``. None
                starts a new run.
            weights_only: Whether to refuse a checkpoint that holds more than tensors, numbers,
                strings, lists and dicts.

        Raises:
            ConfigurationError: The checkpoint is missing or belongs to another model, or its folder
                is in use. The error is also raised if the trainer refuses a setting.
        """
        rank, rounds = launched_rank() if is_launched(settings) else 0, settings.get("max_epochs")
        with ExitStack() as held, ExitStack() as ending:
            # ``held`` ends last, and then releases the lock of the folder
            ending.push(lambda kind, error, trace: self._end(error))
            path = None
            if rank:
                silence()
            else:
                path = find_checkpoint(self.directory, ckpt_path, self._planned(rounds))
                self._find_start(path, weights_only, settings, held, by_name=ckpt_path in ("last", "best"))
            self.keeper.weights_only = weights_only
            trainer = make_trainer(settings, cpu_ranks(), **self._equipment(settings, wandb))
            strategy = trainer.strategy
            if isinstance(strategy, CohortStrategy) and strategy.launcher is None:
                strategy.meet()
                path = strategy.broadcast(path)
            elif rank:  # first rank of a further node; it forks the other ranks of the node later
                path = find_checkpoint(self.directory, ckpt_path, self._planned(rounds))
            profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # set in a helper of the trainer
            if self.start.attempt is not None and not isinstance(profiler, PassThroughProfiler):
                profiler.dirpath = profiler.dirpath or self.start.attempt.path
                profiler.filename = profiler.filename or "profile"
            self.trainer = trainer
            self._arguments: dict[str, Any] = {"ckpt_path": path, "weights_only": weights_only}
            self._chooses_ranks = settings.get("devices", "auto") == "auto"
            yield

    def run(self) -> Result:
        """Train the server model, and evaluate the final model; print and write the result.

        Returns:
            The content of ``result.json``.

        Raises:
            ConfigurationError: The checkpoint already has all rounds, so that nothing is left to
                train.
            Stopped: A signal stopped the run before its last round.
        """
        start, trainer, signal = self.start, self.trainer, self._interruption
        try:
            limit_ranks(trainer, self.module, self.data, by_default=self._chooses_ranks)
            trainer.fit(self.module, datamodule=self.data, **self._arguments)
            if start.round and trainer.global_step == start.round and start.is_new and not signal.signal:
                raise ConfigurationError(
                    f"trainer.max_epochs: {trainer.max_epochs}, but {start.checkpoint} is of round {start.round}: nothing is left "
                    "to train; use more rounds or a larger model.budget_epochs, or python -m fl_lightning test"
                )
            if signal.signal and trainer.global_step != trainer.max_epochs:
                draw_pictures(start.attempt, self.module)
                raise Stopped(signal.signal)
        except Exception:  # Stopped is a SystemExit and is not caught here
            if trainer.global_step > start.round:  # this fit has trained a round
                draw_pictures(start.attempt, self.module)
            raise
        stopped = stop_reason(trainer) if trainer.global_step < (trainer.max_epochs or 0) else None
        if stopped is not None:
            print(
                f"stopped after round {trainer.global_step} of {trainer.max_epochs} by {stopped}", flush=True
            )
        return finish_run(self.module, start.attempt, stopped, self.verbose)

    def _planned(self, rounds: int | None) -> int | None:
        """Return the number of planned rounds; None if a budget of epochs determines it."""
        # with a budget, the data determine the number; attempts at one run have equal data
        return None if self.module.budget_epochs is not None or rounds == -1 else rounds

    def _find_start(
        self, path: Path | None, weights_only: bool | None, settings: Config, held: ExitStack, by_name: bool
    ) -> None:
        """Check the checkpoint, and lock the folder in which the run trains.

        ``path`` is the checkpoint, or None for a new run. ``held`` is the exit stack that releases
        the lock. ``by_name`` says whether the user gave a word such as ``last`` instead of a path.
        """
        writes = not settings.get("fast_dev_run")
        if path is None:
            refuse_trained(as_list(settings.get("callbacks")), self.module.model)
            if writes:
                self.start = Start(self.directory.next_attempt(held))
            return
        owner = self.directory.attempt_of(path) if path.name == "last.ckpt" else None
        resumed = owner if writes and owner in self.directory.attempts() else None
        with ExitStack() as locked:
            if resumed is not None:
                locked.enter_context(resumed.lock())  # lock the folder before the checkpoint is read
            checkpoint = load_checkpoint(path, weights_only)
            before = checkpoint["fl_lightning"]["record"]["description"]
            differs: dict[str, list[Any]] = {"settings": ["unknown", "those of config.yaml"]}
            if before:  # empty if a trainer wrote the checkpoint without a run
                differs = changed_settings(before, deciding_settings(self._complete))
            if by_name and self._of_script:
                planned, rounds = checkpoint["fl_lightning"]["total_rounds"], settings.get("max_epochs")
                plans = {"trainer.max_epochs": [planned, rounds]}
                _refuse_changes(
                    path, differs | (plans if self._planned(rounds) not in (None, planned) else {})
                )
            if differs:
                resumed = None
            else:
                held.push(locked.pop_all())
        extend_model(self.module.model, as_list(settings.get("callbacks")), self.module.seed)
        check_run(path, checkpoint, self.module.model, self.module.configure_optimizers())
        if writes:
            self.start = find_start(self.directory, path, checkpoint, differs, resumed, held)

    def _equipment(self, settings: Config, wandb: WandbSettings) -> dict[str, Any]:
        callbacks = as_list(settings.get("callbacks"))
        # True stands for Lightning's default logger, which the run replaces by metrics.jsonl
        loggers = [logger for logger in as_list(settings.get("logger")) if logger is not True]
        if settings.get("enable_progress_bar") is not False and not has_progress_bar(callbacks):
            callbacks.append(RoundProgress())
        # RunStart is the first callback, so that it prints before the progress bar opens its line
        beginning = RunStart(self.start, self.config, self._complete, self._of_script, self.verbose)
        callbacks = [beginning, *callbacks, self._interruption, self.keeper]
        attempt = self.start.attempt
        if attempt is None:
            return {"callbacks": callbacks, "logger": loggers or False}
        loggers.append(JSONLinesLogger(attempt.path))
        if wandb.asked != "disabled" and not any(isinstance(logger, WandbLogger) for logger in loggers):
            self._wandb = RoundWandbLogger(attempt, wandb)
            loggers.append(self._wandb)
            if settings.get("logger") is False:
                print("trainer.logger: false leaves W&B on; wandb.mode: disabled turns W&B off", flush=True)
        for logger in loggers:
            if isinstance(logger, CSVLogger):
                vars(logger)["log_metrics"] = joined(type(logger).log_metrics).__get__(logger)
                if self.start.metrics:  # RunStart writes all rows; Lightning would warn, and delete them
                    Path(logger.log_dir, "metrics.csv").unlink(missing_ok=True)
        for callback in callbacks:
            if isinstance(callback, ModelCheckpoint):
                # otherwise Lightning would write checkpoints to the folder of a logger
                callback.dirpath = callback.dirpath or str(attempt.checkpoints.resolve())
                _avoid_folders(callback)
        return {"callbacks": callbacks, "logger": loggers, "default_root_dir": str(attempt.path)}

    def _end(self, error: BaseException | None) -> None:
        """End the run at W&B, and complete the message of :class:`Stopped`.

        After an error, remove a new folder that has no trained round. Note a divergence in
        ``error.txt``.
        """
        attempt = self.start.attempt
        if attempt is None:
            return
        if self._wandb is not None:
            if error is None:
                self._wandb.start()  # has started, unless this fit had no round left to train
            self._wandb.close(self.module, preempted=isinstance(error, Stopped) and error.way == "SIGTERM")
        if error is not None:
            self.start.discard_untrained()
        if isinstance(error, Diverged) and attempt.path.exists():
            write_text(attempt.error, f"Diverged: {error}\n")
        saved = self.keeper.saved_round or self.start.round
        if isinstance(error, Stopped) and saved and attempt.path.exists():
            way_on = "fit(resume=True)" if self._of_script else "the same command with --ckpt_path last"
            error.kept = f"{attempt.path} keeps round {saved}; {way_on} resumes the run"
        if self._wandb is not None and self._wandb.place is not None and attempt.path.exists():
            print(self._wandb.place, flush=True)


def _avoid_folders(callback: ModelCheckpoint) -> None:
    """Let ``{val/loss}`` in a file name become ``val_loss=0.5``: a slash would make a folder."""
    if callback.auto_insert_metric_name and "/" in (name := callback.filename or ""):
        equals, callback.auto_insert_metric_name = callback.CHECKPOINT_EQUALS_CHAR, False
        callback.filename = re.sub(r"\{([^:}]*)", lambda x: x[1].replace("/", "_") + equals + x[0], name)


def _refuse_changes(path: Path, differs: Mapping[str, list[Any]]) -> None:
    """Raise an error if settings differ from the settings of the run that is resumed by its name."""
    if not differs:
        return
    words = ", ".join(
        f"{name} is {new}, but {old} in {path.parents[1]}" for name, (old, new) in differs.items()
    )
    raise ConfigurationError(
        f"resume: {words}; give the settings of that run, or call fit() for a new run, or "
        f"fit(resume={str(path)!r}) to continue from this file with the new settings"
    )


def stop_reason(trainer: L.Trainer) -> str:
    """Return a text that says which callback stopped the training early, and why."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]  # set in a helper of the trainer
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, EarlyStopping) and callback.stopped_epoch + 1 == trainer.global_step:
            words = (callback.stopping_reason_message or "").removesuffix(" Signaling Trainer to stop.")
            return f"{name}: {words}"
        if isinstance(callback, Timer) and (callback.time_remaining() or 1) <= 0:
            return f"{name}: {round(callback.time_elapsed())} s have passed"
    return "a callback: it has set trainer.should_stop"


def has_progress_bar(callbacks: Sequence[L.Callback]) -> bool:
    """Return whether the callbacks include a progress bar."""
    return any(isinstance(callback, ProgressBar) for callback in callbacks)


def quiet_host() -> None:
    """Silence messages of Lightning that do not apply to a run, such as advice on data loaders."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # a model summary, which the user may request, is logged at level INFO
    logging.getLogger("lightning.pytorch.callbacks.model_summary").setLevel(logging.INFO)
    # LightningCLI 2.6 uses deprecated functions of jsonargparse: users need no warning about this
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for message in (
        ".*LightningCLI's args parameter.*",  # this project passes the argument args on purpose
        ".*does not have many workers.*",  # data in memory need no data workers
        ".*isinstance\\(treespec, LeafSpec\\).*",  # harmless warning of Lightning 2.6 with torch >= 2.12
        "Implicitly cleaning up <TemporaryDirectory",  # W&B causes this warning when it uploads pictures
        ".*The `srun` command is available.*",  # a run on a cluster's login node does not need srun
        ".*is smaller than the logging interval.*",  # an epoch is one round, and has one training step
        ".*Total length of `list` across ranks is zero.*",  # a federation may have no evaluation data
    ):
        warnings.filterwarnings("ignore", message)
