"""Preparation and end of a trainer's ``fit``: folder, loggers, pictures and result."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.choice import cpu_ranks
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.experiments.dashboard.logger import RoundWandbLogger
from fl_lightning.experiments.dashboard.settings import WandbSettings
from fl_lightning.experiments.run.interruption import FinishRound, Stopped
from fl_lightning.experiments.run.progress import RoundProgress
from fl_lightning.experiments.run.trainer import as_list, is_launched, make_trainer, useful_ranks
from fl_lightning.experiments.run_directory.checkpoint_io import check_run, load_run
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.experiments.run_directory.code import full_name
from fl_lightning.experiments.run_directory.continuation import Start, find_start
from fl_lightning.experiments.run_directory.description import directory_of
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.experiments.run_directory.drawings import draw_pictures
from fl_lightning.experiments.run_directory.finished import Result
from fl_lightning.experiments.run_directory.metrics_log import JSONLinesLogger
from fl_lightning.experiments.run_directory.result import finish_run
from fl_lightning.experiments.run_directory.start import RunStart
from fl_lightning.launched import launched_rank, silence
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.trained import refuse_trained

TRAINER_DEFAULTS: Config = {
    "accelerator": "auto",
    "devices": "auto",
    "max_epochs": -1,
    "logger": False,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 1,
    "enable_model_summary": False,
}
"""A run's defaults for the trainer's settings."""


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start, with a locked folder and a trainer.

    Attributes:
        module: The module.
        data: The module's data.
        start: The folder, and the checkpoint to resume from.
        trainer: The trainer.
        arguments: Arguments of the trainer's ``fit``: ``ckpt_path`` and ``weights_only``.
        chooses_ranks: Whether the run chooses the number of ranks (``devices: auto``).
        interruption: Callback that handles signals to stop the run.
    """

    module: FederatedModule
    data: FederatedDataModule
    start: Start
    trainer: L.Trainer
    arguments: Mapping[str, Any]
    chooses_ranks: bool
    interruption: FinishRound

    def run(self) -> Result:
        """Train and evaluate the final server model; print and write the result.

        Returns:
            The content of ``result.json``.

        Raises:
            ConfigurationError: A new attempt has no rounds left to train.
            Stopped: A signal stopped the run before its last round.
        """
        start, trainer, signal = self.start, self.trainer, self.interruption
        try:
            self._limit_ranks()
            trainer.fit(self.module, datamodule=self.data, **self.arguments)
            if start.round and trainer.global_step == start.round and start.is_new and not signal.signal:
                raise ConfigurationError(
                    f"trainer.max_epochs: {trainer.max_epochs}, but {start.checkpoint} is of round {start.round}: nothing is left "
                    "to train; use more rounds or a larger model.budget_epochs, or python -m fl_lightning test"
                )
            if signal.signal and trainer.global_step != trainer.max_epochs:
                draw_pictures(start.attempt, self.module)
                raise Stopped(signal.signal)
        except Exception:  # not Stopped, which is a SystemExit
            if trainer.global_step > start.round:  # at least one round was trained
                draw_pictures(start.attempt, self.module)
            raise
        stopped = stop_reason(trainer) if trainer.global_step < (trainer.max_epochs or 0) else None
        if stopped is not None:
            print(
                f"stopped after round {trainer.global_step} of {trainer.max_epochs} by {stopped}", flush=True
            )
        return finish_run(self.module, start.attempt, stopped)

    def _limit_ranks(self) -> None:
        """Set up the data before ranks are forked; for ``devices: auto``, limit their number."""
        strategy = self.trainer.strategy
        if isinstance(strategy, CohortStrategy) and strategy.launcher is not None:
            ranks = useful_ranks(self.module, self.data)
            if self.chooses_ranks and strategy.num_nodes == 1:
                strategy.limit(ranks)


class Training:
    """The objects of a run and its folder.

    Args:
        module: The module.
        data: The module's data.
        config: The resolved configuration.
        made: The built objects (:func:`~fl_lightning.experiments.run_directory.built.built`).
        keeper: Callback for the run's checkpoints.
        way_on: How to resume a stopped run, for the message.
        header: Comment at the top of ``config.yaml``.

    Attributes:
        directory: All attempts at the run.
        start: The folder, and the checkpoint to resume from; empty before :meth:`prepare`.
    """

    def __init__(
        self,
        module: FederatedModule,
        data: FederatedDataModule,
        config: Config,
        made: Config,
        keeper: RoundCheckpoint,
        way_on: str,
        header: str = "",
    ) -> None:
        self.module, self.data, self.config, self.made, self.header = module, data, config, made, header
        self.keeper, self.way_on = keeper, way_on
        kind: Any = type(module)
        model = {"class_path": full_name(kind), "init_args": config["model"]}
        needs_class = kind is not FederatedModule and "class_path" not in config["model"]
        self.directory = directory_of({**config, "model": model} if needs_class else config)
        self.start = Start()
        self._wandb: RoundWandbLogger | None = None

    @contextmanager
    def prepare(
        self,
        settings: Config,
        wandb: WandbSettings,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> Iterator[Prepared]:
        """Lock the run's folder, which is new or the checkpoint's, and make the trainer.

        At the end of the block, the run ends at W&B. If an error has ended the block, a new folder
        without a trained round is removed.

        Args:
            settings: The user's arguments of the trainer; ``fast_dev_run`` makes no folder.
            wandb: The run's W&B settings.
            ckpt_path: Checkpoint to resume from: a path, ``"last"``, ``"best"`` or ``"auto"``; None
                for a new run.
            weights_only: Whether the checkpoint may only hold tensors and plain values.

        Raises:
            ConfigurationError: The checkpoint is missing or of another model, another process
                trains in its folder, or the trainer refuses a setting.
        """
        rank, rounds = launched_rank() if is_launched(settings) else 0, settings.get("max_epochs")
        with ExitStack() as held, self._ending():  # the folder's lock is released last
            path = None
            if rank:
                silence()
            else:
                path = self.found(ckpt_path, rounds)
                self._find_start(path, weights_only, settings, held)
            interruption = FinishRound()
            trainer = make_trainer(settings, cpu_ranks(), **self._equipment(settings, wandb, interruption))
            strategy = trainer.strategy
            if isinstance(strategy, CohortStrategy) and strategy.launcher is None:
                strategy.meet()
                path = strategy.broadcast(path)
            elif rank:  # this node forks its ranks later
                path = self.found(ckpt_path, rounds)
            profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # set in a helper of the trainer
            if self.start.attempt is not None and not isinstance(profiler, PassThroughProfiler):
                profiler.dirpath = profiler.dirpath or self.start.attempt.path
                profiler.filename = profiler.filename or "profile"
            yield Prepared(
                self.module,
                self.data,
                self.start,
                trainer,
                {"ckpt_path": path, "weights_only": weights_only},
                settings.get("devices", "auto") == "auto",
                interruption,
            )

    def found(self, ckpt_path: str | os.PathLike[str] | None, rounds: int | None = None) -> Path | None:
        """Return the checkpoint file of ``--ckpt_path``, or None for a new run.

        Args:
            ckpt_path: The setting; ``"auto"`` starts a new run if no attempt has as many planned
                rounds.
            rounds: Planned rounds of the run; None accepts any number.

        Raises:
            ConfigurationError: The checkpoint is missing.
        """
        if ckpt_path == "auto":
            paths = [attempt.checkpoints / "last.ckpt" for attempt in self.directory.attempts()]
            paths = [path for path in paths if path.is_file()]
            if not paths and (other := self.directory.other_checkpoint("last.ckpt")) is not None:
                print(
                    f"--ckpt_path auto starts a new run; {other} has other settings or an older version",
                    flush=True,
                )
            return next((path for path in paths if self._has_this_plan(path, rounds)), None)
        return None if ckpt_path is None else self.directory.resolve_checkpoint(str(ckpt_path))

    def _has_this_plan(self, path: Path, rounds: int | None) -> bool:
        """Return whether a run has these planned rounds, which decide freezing and rate decay."""
        if self.module.budget_epochs is not None or rounds in (None, -1):
            return True  # the data decide the rounds, and the hash covers the data
        planned = load_run(path)["fl_lightning"]["total_rounds"]
        if planned != rounds:
            print(
                f"{path} is of a run planned for {planned} rounds, not {rounds}: --ckpt_path auto ignores it; "
                "--ckpt_path last would extend that run",
                flush=True,
            )
        return bool(planned == rounds)

    def _find_start(
        self, path: Path | None, weights_only: bool | None, settings: Config, held: ExitStack
    ) -> None:
        """Check the checkpoint, and lock the folder in which the run trains.

        Args:
            path: The checkpoint; None for a new run.
            weights_only: Whether the checkpoint may only hold tensors and plain values.
            settings: The user's arguments of the trainer.
            held: Exit stack that holds the folder's lock.
        """
        writes = not settings.get("fast_dev_run")
        if path is None:
            refuse_trained(as_list(settings.get("callbacks")), self.module.model)
            if writes:
                self.start = Start(self.directory.next_attempt(held))
            return
        owner = self.directory.attempt_of(path) if path.name == "last.ckpt" else None
        resumed = owner if writes and owner in self.directory.attempts() else None
        if resumed is not None:
            held.enter_context(resumed.lock())  # lock before reading the checkpoint
        checkpoint = load_run(path, weights_only)
        check_run(path, checkpoint, self.module.model, self.module.configure_optimizers())
        if writes:
            self.start = find_start(self.directory, path, checkpoint, self.made, resumed, held)

    def _equipment(self, settings: Config, wandb: WandbSettings, interruption: FinishRound) -> dict[str, Any]:
        """Return the trainer's arguments for callbacks, loggers and folder."""
        callbacks = as_list(settings.get("callbacks"))
        # ignore true, Lightning's default logger: metrics.jsonl is always written
        loggers = [logger for logger in as_list(settings.get("logger")) if logger is not True]
        if settings.get("enable_progress_bar") is not False and not has_progress_bar(callbacks):
            callbacks.append(RoundProgress())
        # RunStart first, so that it prints before a progress bar takes the terminal
        beginning = RunStart(self.start, self.config, self.made, self.header)
        callbacks = [beginning, *callbacks, interruption, self.keeper]
        self.keeper.attempt = attempt = self.start.attempt
        if attempt is None:
            return {"callbacks": callbacks, "logger": loggers or False}
        loggers.append(JSONLinesLogger(attempt.path))
        if wandb.asked != "disabled" and not any(isinstance(logger, WandbLogger) for logger in loggers):
            self._wandb = RoundWandbLogger(attempt, wandb)
            loggers.append(self._wandb)
        for callback in callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                # otherwise checkpoints would go to the folder of a logger, such as W&B's
                callback.dirpath = str(attempt.checkpoints.resolve())
        return {"callbacks": callbacks, "logger": loggers, "default_root_dir": str(attempt.path)}

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Call :meth:`_end` at the end of the block, also after an exception."""
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """End the run at W&B, remove an untrained folder, and complete the message of a stop."""
        attempt = self.start.attempt
        if attempt is None:
            return
        if self._wandb is not None:
            self._wandb.close(preempted=isinstance(error, Stopped) and error.way == "SIGTERM")
        if error is not None:
            self.start.discard_untrained()
        saved = self.keeper.saved_round or self.start.round
        if isinstance(error, Stopped) and saved and attempt.path.exists():
            error.kept = f"{attempt.path} keeps round {saved}; {self.way_on} goes on"
        if self._wandb is not None and self._wandb.place is not None and attempt.path.exists():
            print(self._wandb.place, flush=True)


def stop_reason(trainer: L.Trainer) -> str:
    """Return in words which callback stopped the training before its last round, and why."""
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
    """Silence Lightning's messages on hardware and data loaders that do not apply to a run."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # the model summary, at a user's request, is such a message, too
    logging.getLogger("lightning.pytorch.callbacks.model_summary").setLevel(logging.INFO)
    # LightningCLI 2.6 uses deprecated functions of jsonargparse; users cannot change that
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for message in (
        ".*LightningCLI's args parameter.*",  # main() passes args on purpose
        ".*does not have many workers.*",  # in-memory data need no workers
        ".*isinstance\\(treespec, LeafSpec\\).*",  # harmless, from Lightning 2.6 with torch 2.12 and later
        "Implicitly cleaning up <TemporaryDirectory",  # from W&B, for the pictures of a run
        ".*The `srun` command is available.*",  # a run on a cluster's login node needs no srun
        ".*is smaller than the logging interval.*",  # an epoch is one round
        ".*Total length of `list` across ranks is zero.*",  # a federation may lack evaluation data
    ):
        warnings.filterwarnings("ignore", message)
