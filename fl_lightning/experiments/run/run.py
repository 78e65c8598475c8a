"""Runs from Python scripts. They have the same run directories as runs from the command line."""

import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run.interruption import stoppable
from fl_lightning.experiments.run.trainer import MOST_THREADS, on_cpu, use_threads
from fl_lightning.experiments.run.training import TRAINER_DEFAULTS, Training, quiet_host
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.experiments.run_directory.directory import Attempt, Config, RunDirectory
from fl_lightning.experiments.run_directory.python_config import python_config
from fl_lightning.experiments.run_directory.result import Result
from fl_lightning.experiments.weights_and_biases.settings import WandbSettings
from fl_lightning.files import folder_below
from fl_lightning.round.module import FederatedModule


class Run:
    """A run of a module on its data, with a folder for metrics, checkpoints, pictures and result.

    The folder is ``<run_root>/<name>/s<seed>``. A second run with the same name and seed is a new
    attempt in the folder ``s<seed>.2``. ``fit(resume=True)`` resumes the newest attempt.

    Args:
        module: The module, whose seed is the run's seed.
        data: The module's data.
        name: Name of the run.
        callbacks: Methods and other Lightning callbacks. The run adds callbacks for checkpoints and
            the progress line.
        run_root: Folder of all runs.
        checkpoint: Settings of the checkpoints. Default: ``RoundCheckpoint()``.
        wandb: Mode of Weights & Biases (default ``"disabled"``), as ``wandb.mode`` on the command
            line.
        threads: Number of CPU threads, from 1 to 1024. The default is 1 thread per rank on CPUs,
            and torch's default on a GPU. With more than 1 thread, the run has one rank (process),
            unless the trainer's arguments set another number. The end of a fit restores the
            previous number of threads.
        trainer: Arguments of Lightning's ``Trainer``; ``max_epochs`` is the number of rounds.

    Attributes:
        attempt: Folder of the last fit; ``attempt.path`` is the folder's path. None before the
            first fit.

    Example:
        >>> from functools import partial
        >>> from tempfile import TemporaryDirectory
        >>> from fl_lightning.testing import SGD, blobs, small_cnn
        >>> module = FederatedModule(small_cnn().double(), client_optimizer=SGD, local_steps=1)
        >>> with TemporaryDirectory() as folder:
        ...     run = Run(module, blobs(), name="mine", max_epochs=2, run_root=folder)
        ...     result = run.fit()
        State of the model
        ...
        >>> result["rounds"]
        2
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
        threads: int | None = None,
        **trainer: Any,
    ) -> None:
        if not isinstance(module, FederatedModule):
            raise ConfigurationError(f"module: {type(module).__name__}; give a FederatedModule(model, ...)")
        if threads is not None and not (type(threads) is int and 1 <= threads <= MOST_THREADS):
            raise ConfigurationError(f"threads: {threads} must be a whole number from 1 to {MOST_THREADS}")
        self.module, self.data, self.callbacks = module, data, list(callbacks)
        self.checkpoint, self.wandb = checkpoint or RoundCheckpoint(), WandbSettings(wandb)
        self.trainer_settings = TRAINER_DEFAULTS | trainer
        self.attempt: Attempt | None = None
        if threads is None and on_cpu(self.trainer_settings["accelerator"]):
            threads = 1
        self._place: dict[str, Any] = {"name": name, "run_root": str(run_root), "threads": threads}

    @property
    def config(self) -> Config:
        """Settings of the run, as in ``config.yaml``.

        The settings are the arguments with which the objects were built, as far as these are
        numbers, strings, lists, dicts, or objects of which the same is true.
        """
        settings = {**self.trainer_settings, "callbacks": self.callbacks}
        built = python_config(self.module, self.data, settings)
        return {**self._place, **built}

    def fit(
        self, resume: bool | str | os.PathLike[str] = False, accept_data: bool = False, verbose: bool = False
    ) -> Result:
        """Train the model, and evaluate the final model; write and print the result.

        Args:
            resume: Checkpoint to resume from: ``True`` for the last checkpoint of the newest attempt
                with this name and seed, ``"best"`` for its best checkpoint, or the path of a file.
                ``"auto"`` resumes from the last checkpoint if it exists, and otherwise starts a
                new run. The default is a new run. With a path, settings may differ from those of
                the checkpoint; the run is then a new attempt.
            accept_data: Whether the data may differ from the data of the checkpoint.
            verbose: Whether to print all values of the result (default: at most 15 rows), and each
                decision about speed.

        Returns:
            The content of ``result.json``.

        Raises:
            Stopped: A signal stopped the run after a complete round.
            ConfigurationError: The checkpoint is missing, or a setting differs from the setting of
                the run to resume, or a new run gets a module that was already trained.
        """
        self.module.accept_data = accept_data
        settings = {**self.trainer_settings, "callbacks": self.callbacks}
        root = folder_below(self._place["run_root"], self._place["name"])
        directory = RunDirectory(root, f"s{self.module.seed}")
        training = Training(self.module, self.data, self.config, self.checkpoint, directory, verbose)
        ckpt_path = "last" if resume is True else resume or None
        if ckpt_path == "auto":
            ckpt_path = "last" if directory.newest_checkpoint() is not None else None
        with warnings.catch_warnings(), stoppable(), ExitStack() as held:
            quiet_host()
            if (threads := self._place["threads"]) is not None:
                held.callback(torch.set_num_threads, torch.get_num_threads())
                settings["devices"] = use_threads(threads, settings["devices"])
            with training.prepare(settings, self.wandb, ckpt_path):
                self.attempt = training.start.attempt
                return training.run()

    @property
    def path(self) -> Path:
        """Folder of the last fit.

        Raises:
            ConfigurationError: There has been no fit yet.
        """
        if self.attempt is None:
            raise ConfigurationError("path: the run has no folder yet; call fit()")
        return self.attempt.path
