"""A run at Weights & Biases: one history row per communication round, online or in files that ``wandb sync`` uploads."""

import os
import shutil
import sys
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.fabric.loggers.logger import _DummyExperiment, rank_zero_experiment
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.dashboard import contents
from fl_lightning.dashboard.settings import Mode, WandbSettings, in_a_line, names_of_run, open_run
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import write_text
from fl_lightning.round.module import FederatedModule
from fl_lightning.run_directory.describe import describe_environment
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.metrics import read_metrics


class RoundWandbLogger(WandbLogger):
    """Logs the row of each round, with the round as the x-axis, and at the end tables, pictures and the result.

    W&B is never in the way of a run: where it fails, training goes on without it, with one line that says so, and
    :meth:`close` brings the rows back from ``metrics.jsonl``, the source of truth. A resumed run keeps its id, except
    where a sweep gives it another one. Online, rows that the server has are not sent again. Offline, the whole run is
    written anew, since ``wandb sync`` cannot join its pieces, and the files of the earlier part are removed when the new
    ones are complete.

    Args:
        attempt: The run's folder, which also holds the files of W&B; None for a run without one, whose files are in
            ``save_dir``.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``.
        log_checkpoints: Whether the checkpoints become an artifact of the run.
        beside: A logger of the user's own that has the run and logs its rows; this one then adds all the rest to it.
        kwargs: As for Lightning's ``WandbLogger``: ``project``, ``name``, ``group``, ``tags``, ``config``, ...
    """

    def __init__(
        self,
        attempt: Attempt | None = None,
        mode: Mode = "online",
        log_checkpoints: bool = False,
        beside: WandbLogger | None = None,
        **kwargs: Any,
    ) -> None:
        folder = attempt.path if attempt is not None else Path(kwargs.get("save_dir") or ".")
        kwargs["save_dir"] = str(folder.resolve())  # W&B's process may have another working directory
        self._config = kwargs.pop("config", None) or {}
        super().__init__(**kwargs)
        self.attempt = attempt
        self.mode = mode
        self.log_checkpoints = log_checkpoints
        self.beside = beside
        self._module: FederatedModule | None = None
        self._newest = self._seen = -1
        self._defined: set[str] = set()
        self._result: dict[str, float | bool] = {}
        self._failed = self._closed = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run; before a fit, and where W&B is disabled or does not work, an object that ignores everything."""
        if self.beside is not None:
            self._open()
        return _DummyExperiment() if self._experiment is None else self._experiment

    def _open(self) -> None:
        if self._experiment is not None:
            return
        if self.beside is not None:
            self._experiment = self.beside.experiment
            return
        known = self.attempt.wandb_id if self.attempt is not None and self.mode != "disabled" else None
        earlier = known.read_text().strip() if known is not None and known.is_file() else None
        asked = self._wandb_init["id"] or os.environ.get("WANDB_RUN_ID")
        self._wandb_init["id"] = earlier or asked or uuid.uuid4().hex[:8]
        run, self.mode = open_run(self.mode, self._wandb_init)
        self._experiment = run
        if self.mode == "disabled":
            return
        self._newest = run.starting_step - 1
        if earlier not in (None, run.id):
            print(
                f"W&B: the sweep gives this run the id {run.id}; all its rounds are logged there, and {earlier} is no "
                "longer continued",
                file=sys.stderr,
            )
        if known is not None:
            write_text(known, run.id + "\n")

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace) -> None:
        """Keep the settings of a module for the configuration of the run."""
        self._config = {**self._config, **(vars(params) if isinstance(params, Namespace) else params)}

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Take note of the module, whose tables are part of the run; its graph is not drawn."""
        self._module = model if isinstance(model, FederatedModule) else None
        if self._module is not None and _is_fitting(self._module):
            self._open()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the row of a round.

        Args:
            metrics: Numbers by name; without ``"round"`` nothing is logged.
            step: Not used: the round is in the metrics.

        Raises:
            ConfigurationError: The logger has had this round already, from another fit.
        """
        if "round" not in metrics:
            return
        number = int(metrics["round"])
        if number <= self._seen:
            raise ConfigurationError(
                f"RoundWandbLogger: round {number} comes after round {self._seen}; a logger is for one run, make a new "
                "one for the next fit"
            )
        self._seen = number
        self._open()  # first: it knows which rows the server has
        self._catch_up(number)
        self._log_row(metrics)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Add the tables to the row of the last round of a fit; of a run with a folder :meth:`close` does."""
        module = self._module
        if self.attempt is None and module is not None and _is_fitting(module):
            self._attempt_to(self._log_media)

    @rank_zero_only
    def log_result(self, result: Mapping[str, Any]) -> None:
        """Take the numbers of a finished run's result into its summary."""
        self._result = contents.final_numbers(result)

    @rank_zero_only
    def close(self, failed: bool = False) -> None:
        """Log what belongs to the end of a run and finish it; a second call does nothing.

        Args:
            failed: Whether the run has broken off.
        """
        if self._experiment is None or self._closed:
            return
        self._closed = True
        self._finish(failed)
        if self._failed and self.attempt is not None and self.beside is None:
            # all of it once more, in a new process of W&B
            with suppress(Exception):
                import wandb

                wandb.teardown()
            self._experiment, self._newest, self._failed = None, -1, False
            self._defined.clear()
            self._finish(failed)

    def _finish(self, failed: bool) -> None:
        self._open()
        self._catch_up(None)
        module = self._module
        if self.attempt is not None:
            self._attempt_to(self._log_media)
        if self.log_checkpoints and module is not None:
            self._attempt_to(lambda: contents.log_checkpoints(self.experiment, module))
        self._attempt_to(lambda: self.experiment.summary.update(self._result))
        if self.beside is None:
            self._attempt_to(lambda: self.experiment.finish(exit_code=int(failed)))
            if self.attempt is not None and self.mode != "disabled":
                self._attempt_to(self._remove_superseded)

    @property
    def place(self) -> str | None:
        """Where the run is, in a line for the user; None where there is no run of this logger's own."""
        run = self._experiment
        if run is None or self._failed or self.beside is not None or self.mode == "disabled":
            return None
        if self.mode == "online":
            return f"W&B: {run.url}"
        folder, here = Path(run.dir).parent, Path.cwd()
        shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
        return f"W&B: offline; to upload the run: wandb sync {shown}"

    def _remove_superseded(self) -> None:
        """Remove the offline files of the earlier parts of a resumed run, once its new ones are complete on the disk."""
        import wandb

        folder = Path(self.experiment.dir).parent
        earlier = [path for path in folder.parent.glob("offline-run-*") if path != folder]
        if earlier:
            wandb.teardown()  # its process may still be writing when finish() returns
        for path in earlier:
            shutil.rmtree(path, ignore_errors=True)

    def _catch_up(self, round_number: int | None) -> None:
        """Log the rows of ``metrics.jsonl`` that the run has not got, up to the one before a round."""
        if self.attempt is None or self.beside is not None or round_number == self._newest + 1:
            return
        for row in read_metrics(self.attempt.metrics) if self.attempt.metrics.exists() else []:
            if round_number is None or row["round"] < round_number:
                self._log_row(row)

    def _log_row(self, row: Mapping[str, Any]) -> None:
        number = int(row["round"])
        if number <= self._newest:
            return
        unknown = row.keys() - self._defined
        if unknown:
            self._attempt_to(lambda: self._define(unknown))
        if self.beside is None:
            # a step is written when the next one comes: what is logged last belongs to the last round
            self._attempt_to(lambda: self.experiment.log({**row, "round": number}, step=number))
        self._newest = number

    def _define(self, names: set[str]) -> None:
        if not self._defined:
            known = self._config | (contents.facts(self._module) if self._module is not None else {})
            self.experiment.config.update(known, allow_val_change=True)
        for name in sorted(names, key=lambda name: (name != "round", name)):
            axis = None if name == "round" else "round"
            self.experiment.define_metric(name, step_metric=axis, summary=contents.summary_of(name))
        self._defined |= names

    def _log_media(self) -> None:
        """Add tables and pictures to the row of the last round."""
        if self._newest < 0:
            return
        with contents.staged_in(Path(self.experiment.dir).parent):
            media = contents.tables(self._module) if self._module is not None else {}
            media |= contents.pictures(self.attempt) if self.attempt is not None else {}
            if self.beside is None:
                self.experiment.log(media, step=self._newest)
            else:
                self.experiment.log({**media, "round": self._newest})

    def _attempt_to(self, action: Callable[[], Any]) -> None:
        """Do something with the run; after a failure nothing more is tried before the end of the run."""
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001  # such as a service that was killed: it must not end the training
            self._failed = True
            kept = f"; all metrics are in {self.attempt.metrics}" if self.attempt is not None else ""
            print(f"W&B failed, the run goes on without it{kept}: {in_a_line(error)}", file=sys.stderr)


def _is_fitting(module: FederatedModule) -> bool:
    return module.trainer.state.fn == TrainerFn.FITTING


def wandb_logger(
    settings: WandbSettings,
    loggers: Sequence[Logger],
    attempt: Attempt,
    config: str,
    module: FederatedModule,
    data: FederatedDataModule,
    callbacks: Sequence[L.Callback],
) -> RoundWandbLogger | None:
    """The logger of a run: there is one W&B run per configuration and seed, in one group for all seeds.

    Args:
        settings: Whether and where the run is logged.
        loggers: The user's own: where a ``WandbLogger`` is among them, its run is used and no other is started.
        attempt: The run's folder.
        config: The resolved configuration as YAML.
        module: The module.
        data: Its data.
        callbacks: The trainer's callbacks.

    Returns:
        None where W&B is disabled.
    """
    own = next((logger for logger in loggers if isinstance(logger, WandbLogger)), None)
    mode = "online" if own is not None else settings.resolve_mode()
    if mode == "disabled":
        return None
    resolved = yaml.safe_load(config)
    config_hash = attempt.path.name.partition("-")[0]
    added = {"config_hash": config_hash, "git_commit": describe_environment()["git_commit"]}
    names = names_of_run(settings, f"{resolved['name']}-{config_hash}", module, data, callbacks)
    return RoundWandbLogger(
        attempt, mode, settings.log_checkpoints, beside=own, config=resolved | added, **names
    )
