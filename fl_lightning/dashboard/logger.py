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
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.dashboard import contents
from fl_lightning.dashboard.settings import Mode, WandbSettings, in_a_line, names_of_run, open_run
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
        attempt: The run's folder, which also holds the files of W&B.
        module: The module, whose tables are part of the run.
        mode: ``"online"`` or ``"offline"``.
        log_checkpoints: Whether the checkpoints become an artifact of the run.
        beside: A logger of the user's own that has the run and logs its rows; this one then adds all the rest to it.
        config: The configuration of the run.
        kwargs: As for Lightning's ``WandbLogger``: ``project``, ``name``, ``group``, ``tags``, ...
    """

    def __init__(
        self,
        attempt: Attempt,
        module: FederatedModule,
        mode: Mode,
        log_checkpoints: bool,
        beside: WandbLogger | None,
        config: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        # W&B's process may have another working directory
        super().__init__(save_dir=str(attempt.path.resolve()), **kwargs)
        self.attempt = attempt
        self.module = module
        self.mode = mode
        self.log_checkpoints = log_checkpoints
        self.beside = beside
        self._config = dict(config)
        self._newest = -1
        self._defined: set[str] = set()
        self._result: dict[str, float | bool] = {}
        self._failed = self._closed = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run; before a fit, and where W&B does not work, an object that ignores everything."""
        if self.beside is not None:
            self._open()
        return _DummyExperiment() if self._experiment is None else self._experiment

    def _open(self) -> None:
        if self._experiment is not None:
            return
        if self.beside is not None:
            self._experiment = self.beside.experiment
            return
        known = self.attempt.wandb_id
        earlier = known.read_text().strip() if known.is_file() else None
        self._wandb_init["id"] = earlier or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        self._experiment, self.mode = open_run(self.mode, self._wandb_init)
        if self.mode != "disabled":
            self._newest = self._experiment.starting_step - 1
            write_text(known, self._experiment.id + "\n")

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace) -> None:
        """Keep the settings of a module for the configuration of the run."""
        self._config |= vars(params) if isinstance(params, Namespace) else params

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Start the run, since a fit begins; no graph is drawn."""
        self._open()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the row of a round.

        Args:
            metrics: Numbers by name; without ``"round"`` nothing is logged.
            step: Not used: the round is in the metrics.
        """
        if "round" in metrics:
            self._open()  # first: it knows which rows the server has
            self._catch_up(int(metrics["round"]))
            self._log_row(metrics)

    @rank_zero_only
    def log_result(self, result: Mapping[str, Any]) -> None:
        """Take the numbers of ``result.json`` into the summary by names such as ``final/test/accuracy``, and ``diverged``."""
        numbers = {f"final/{name}": value for name, value in result.items() if type(value) in (int, float)}
        self._result = numbers | {"diverged": bool(result["diverged"])}

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
        if self._failed and self.beside is None:
            # all of it once more, in a new process of W&B
            with suppress(Exception):
                import wandb

                wandb.teardown()
            self._experiment, self._newest, self._failed = None, -1, False
            self._defined.clear()
            self._open()
            self._finish(failed)

    def _finish(self, failed: bool) -> None:
        self._catch_up(None)
        self._attempt_to(self._log_media)
        if self.log_checkpoints:
            self._attempt_to(lambda: contents.log_checkpoints(self.experiment, self.module))
        self._attempt_to(lambda: self.experiment.summary.update(self._result))
        if self.beside is None:
            self._attempt_to(lambda: self.experiment.finish(exit_code=int(failed)))
            if self.mode != "disabled":
                self._attempt_to(self._remove_superseded)

    @property
    def place(self) -> str | None:
        """Where the run is, in a line for the user; None where there is no run of this logger's own."""
        run = self._experiment
        if run is None or self._failed or self.beside is not None or self.mode == "disabled":
            return None
        if self.mode == "online":
            return f"W&B: {run.url}"
        return f"W&B: offline; to upload the run: wandb sync {os.path.relpath(Path(run.dir).parent)}"

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
        if self.beside is not None or round_number == self._newest + 1:
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
            known = self._config | contents.facts(self.module)
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
            media = contents.tables(self.module) | contents.pictures(self.attempt)
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
            kept = f"all metrics are in {self.attempt.metrics}"
            print(f"W&B failed, the run goes on without it; {kept}: {in_a_line(error)}", file=sys.stderr)


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
    return RoundWandbLogger(attempt, module, mode, settings.log_checkpoints, own, resolved | added, **names)
