"""A run from Python, in a run directory as those of the command line."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.dashboard.settings import WandbSettings
from fl_lightning.experiments.run.interruption import stoppable
from fl_lightning.experiments.run.training import TRAINER_DEFAULTS, Training, quiet_host
from fl_lightning.experiments.run_directory.built import built_in_python, without_decided
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.finished import Result
from fl_lightning.round.module import FederatedModule


class Run:
    """A module and its data in a run directory, with metrics, checkpoints, pictures and a result, as the command line's.

    ::

        run = Run(module, data, name="mine", max_epochs=100)
        run.fit()

    The folder is ``<run_root>/<name>/<hash>-s<seed>``. The hash is that of the settings of the module, the data, the callbacks and the
    trainer, so the same script finds its run again, and ``fit(resume=True)`` goes on with it.

    Args:
        module: The module; its seed is the run's.
        data: Its data.
        name: Name of the run.
        callbacks: Methods, and other callbacks of Lightning; checkpoints of whole rounds and the progress are added.
        run_root: The folder of all runs.
        checkpoint: When checkpoints are written. Default: ``RoundCheckpoint()``.
        wandb: Whether the run is logged to Weights & Biases, as ``wandb.mode`` of the command line.
        trainer: Arguments of Lightning's ``Trainer``: ``max_epochs`` is the number of rounds.

    Attributes:
        attempt: The folder of the newest fit, ``attempt.path``; None before.
        config: What the run is named by, as ``config.yaml`` has it.
    """

    def __init__(
        self,
        module: FederatedModule,
        data: FederatedDataModule,
        name: str = "run",
        *,
        callbacks: Sequence[L.Callback] = (),
        run_root: str | os.PathLike[str] = "runs",
        checkpoint: RoundCheckpoint | None = None,
        wandb: Literal["auto", "online", "offline", "disabled"] = "disabled",
        **trainer: Any,
    ) -> None:
        self.module, self.data, self.callbacks = module, data, list(callbacks)
        self.checkpoint, self.wandb = checkpoint or RoundCheckpoint(), WandbSettings(wandb)
        self.trainer_settings = TRAINER_DEFAULTS | trainer
        self.attempt: Attempt | None = None
        self._place: dict[str, Any] = {"name": name, "run_root": str(run_root)}
        self._describe()

    def _describe(self) -> None:
        """Describe what was built, which names the run."""
        settings = {**self.trainer_settings, "callbacks": self.callbacks}
        self._made = built_in_python(self.module, self.data, settings)
        dirpath = None if self.checkpoint.in_the_run else str(self.checkpoint.dirpath)
        self.config: Config = {
            **self._place,
            "checkpoint": {"dirpath": dirpath},
            **without_decided(self._made, self.data),
        }

    def fit(self, resume: bool | str | os.PathLike[str] = False, accept_data: bool = False) -> Result:
        """Train, evaluate the final model, and write and print the result.

        Args:
            resume: Whether to go on from the last checkpoint of the newest attempt; ``"best"`` or the path of a checkpoint goes on
                from that, ``"auto"`` from the last one where there is one.
            accept_data: Whether to go on with other data than those of the checkpoint.

        Returns:
            What ``result.json`` holds.

        Raises:
            Stopped: A signal has stopped the run, after a whole round.
            ConfigurationError: There is nothing to go on from, or the module was trained before and would start anew.
        """
        if self.attempt is None:  # also what was assigned since
            self._describe()
        self.module.accept_data = accept_data
        settings = {**self.trainer_settings, "callbacks": self.callbacks}
        training = Training(
            self.module,
            self.data,
            self.config,
            self._made,
            self.checkpoint,
            "fit(resume=True)",
            header="# built in Python\n",
        )
        with warnings.catch_warnings(), stoppable():
            quiet_host()
            with training.prepare(settings, self.wandb, "last" if resume is True else resume or None) as run:
                self.attempt = run.start.attempt
                return run.run()

    @property
    def path(self) -> Path:
        """The folder of the newest fit.

        Raises:
            ConfigurationError: There was none.
        """
        if self.attempt is None:
            raise ConfigurationError("path: the run has no folder yet; call fit()")
        return self.attempt.path
