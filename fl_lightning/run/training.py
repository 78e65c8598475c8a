"""What is around the trainer's ``fit`` in a run: the folder, the loggers, the pictures and the result."""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import lightning as L
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import WandbLogger

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.dashboard.logger import RoundWandbLogger
from fl_lightning.dashboard.settings import WandbSettings
from fl_lightning.errors import ConfigurationError
from fl_lightning.round.module import FederatedModule
from fl_lightning.run.interruption import FinishRound, Stopped
from fl_lightning.run.progress import RoundProgress
from fl_lightning.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.run_directory.continuation import Start, find_start
from fl_lightning.run_directory.directory import Attempt, RunDirectory
from fl_lightning.run_directory.files import RunStart, draw_pictures
from fl_lightning.run_directory.metrics import JSONLinesLogger
from fl_lightning.run_directory.result import finish_run

TRAINER_DEFAULTS: dict[str, Any] = {
    "accelerator": "auto",
    "devices": 1,
    "max_epochs": -1,
    "logger": False,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 1,
    "enable_model_summary": False,
}
"""Settings of the trainer that a run has unless they are given."""


class Training:
    """A training in its run directory, a context: it ends the run at W&B, and a run without a finished round leaves no folder.

    Args:
        module: The module.
        data: Its data.
        config: The resolved configuration as YAML.
        directory: All attempts at it.
        keeper: The run's own checkpoints.
        way_on: What goes on with a run that was stopped, in words.

    Attributes:
        start: The folder, and what it goes on from; without a folder until :meth:`begin`.
        interruption: Whether a signal has asked for a stop.
        wandb: The logger of the run at W&B, None where there is none.
    """

    def __init__(
        self,
        module: FederatedModule,
        data: FederatedDataModule,
        config: str,
        directory: RunDirectory,
        keeper: RoundCheckpoint,
        way_on: str,
    ) -> None:
        self.module, self.data, self.config, self.directory = module, data, config, directory
        self.keeper, self.way_on = keeper, way_on
        self.start, self.interruption = Start(), FinishRound()
        self.wandb: RoundWandbLogger | None = None
        self._held = ExitStack()

    def begin(self, ckpt_path: Path | None, checkpoint: Mapping[str, Any], resumed: Attempt | None) -> None:
        """Make the run's folder, or find that of the checkpoint (:func:`~fl_lightning.run_directory.continuation.find_start`).

        Args:
            ckpt_path: The checkpoint to go on from, None for a new run.
            checkpoint: What it holds.
            resumed: The folder that is locked already (:func:`lock_resumed`).
        """
        if ckpt_path is None:
            self.start = Start(self.directory.next_attempt(self._held))
        else:
            self.start = find_start(self.directory, ckpt_path, checkpoint, self.config, resumed, self._held)

    def equipment(self, settings: Mapping[str, Any], wandb: WandbSettings) -> dict[str, Any]:
        """Callbacks, loggers, plugins and folder of the trainer, as its arguments.

        Args:
            settings: The trainer's arguments that the user gives.
            wandb: Whether and where the run is logged to W&B.

        Raises:
            ConfigurationError: The logger is ``True``, which names none.
        """
        if settings.get("logger") is True:
            raise ConfigurationError(
                "trainer.logger: true names no logger; use a class such as lightning.pytorch.loggers.WandbLogger, or false "
                "(metrics.jsonl is written in any case)"
            )
        callbacks, loggers = as_list(settings.get("callbacks")), as_list(settings.get("logger"))
        if settings.get("enable_progress_bar") is not False and not has_progress_bar(callbacks):
            callbacks.append(RoundProgress())
        # RunStart first, so that it prints before a progress bar takes the terminal
        callbacks = [RunStart(self.start, self.config), *callbacks, self.interruption]
        attempt = self.start.attempt
        if attempt is None:
            return {"callbacks": callbacks, "logger": loggers or False}
        loggers = [*loggers, JSONLinesLogger(attempt.path)]
        if wandb.asked != "disabled" and not any(isinstance(logger, WandbLogger) for logger in loggers):
            self.wandb = RoundWandbLogger(attempt, self.module, wandb, self.config)
        for callback in callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                # a logger with a folder of its own, such as W&B's, would draw the checkpoints there
                callback.dirpath = str(attempt.checkpoints.resolve())
        return {
            "callbacks": callbacks,
            "logger": [*loggers, self.wandb] if self.wandb is not None else loggers,
            "default_root_dir": str(attempt.path),
        }

    def fit(self, trainer: L.Trainer, **kwargs: Any) -> None:
        """Train, and draw what a run that fails has found until then.

        Args:
            trainer: The trainer, made with the :meth:`equipment`.
            kwargs: Arguments of its ``fit``.

        Raises:
            ConfigurationError: A new attempt has nothing left to train.
        """
        start = self.start
        try:
            trainer.fit(**kwargs)
            untrained = start.round and trainer.global_step == start.round
            if untrained and start.is_new and not self.interruption.signal:
                raise ConfigurationError(
                    f"trainer.max_epochs: {trainer.max_epochs}, but {start.checkpoint} is of round {start.round}: nothing is left "
                    "to train; use more rounds or a larger model.budget_epochs, or python -m fl_lightning test"
                )
        except Exception:  # not on a signal: who stops a run does not wait for pictures
            if trainer.global_step > start.round:  # not a resume that was refused
                draw_pictures(start.attempt, self.module)
            raise

    def finish(self, trainer: L.Trainer) -> dict[str, Any]:
        """Evaluate the final server model, print and write the result.

        Args:
            trainer: The trainer that has fitted.

        Returns:
            What ``result.json`` holds.

        Raises:
            Stopped: A signal has stopped the run before its last round.
        """
        if self.interruption.signal and trainer.global_step != trainer.max_epochs:
            draw_pictures(self.start.attempt, self.module)
            raise Stopped(self.interruption.signal)
        result = finish_run(self.module, self.start.attempt)
        if self.wandb is not None:
            self.wandb.log_result(result)
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        attempt = self.start.attempt
        if attempt is None:
            return
        with self._held:
            if self.wandb is not None:
                self.wandb.close(kind is not None)
            if kind is not None:
                self.start.discard_untrained()
            saved = self.keeper.saved_round or self.start.round
            if isinstance(error, Stopped) and saved and attempt.path.exists():
                error.kept = f"{attempt.path} keeps round {saved}; {self.way_on} goes on"
            if self.wandb is not None and self.wandb.place is not None and attempt.path.exists():
                print(self.wandb.place, flush=True)


def as_list(setting: Any) -> list[Any]:
    """A setting that may be missing, one thing or a list of them, as a list."""
    if not setting:
        return []
    return list(setting) if isinstance(setting, list | tuple) else [setting]


def has_progress_bar(callbacks: Sequence[L.Callback]) -> bool:
    """Whether the user has a progress bar of another kind."""
    return any(isinstance(callback, ProgressBar) for callback in callbacks)


def plugins_of(settings: Mapping[str, Any]) -> list[Any]:
    """The trainer's plugins: the user's, and those of a run, which is one process whatever a launcher has started."""
    return [*as_list(settings.get("plugins")), AtomicCheckpointIO(), LightningEnvironment()]


def lock_resumed(directory: RunDirectory, ckpt_path: Path, held: ExitStack) -> Attempt | None:
    """Lock the folder of a checkpoint that its run may go on in, before it is read; None where it is another run's.

    Args:
        directory: All attempts of the run.
        ckpt_path: The checkpoint.
        held: Keeps the lock.
    """
    resumed = directory.attempt_of(ckpt_path) if ckpt_path.name == "last.ckpt" else None
    if resumed is None or resumed not in directory.attempts():
        return None
    held.enter_context(resumed.lock())
    return resumed


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
