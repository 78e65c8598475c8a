"""Logger for Weights & Biases. It logs a row per round, online or to files for ``wandb sync``."""

import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from fl_lightning.experiments.dashboard import contents
from fl_lightning.experiments.dashboard.settings import WandbSettings, open_run
from fl_lightning.experiments.run_directory.config_digest import hash_of_run
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.files import write_text


class RoundWandbLogger(Logger):
    """Logger that sends each round to W&B, and tables, pictures and the result at the end.

    The W&B run starts after the first trained round. The logger then sends all rows of
    ``metrics.jsonl`` that W&B does not have yet. A resumed run keeps its W&B id, and sends no row
    twice. If W&B is offline, a resumed run writes all rows again, since ``wandb sync`` cannot join
    the parts of a run.

    If W&B fails, one line reports the failure, and training continues.

    Args:
        attempt: The run's folder, which also holds W&B's files.
        settings: The run's W&B settings.
    """

    name = version = ""  # empty, since Lightning would create folders with these names

    def __init__(self, attempt: Attempt, settings: WandbSettings) -> None:
        super().__init__()
        self.attempt, self.settings = attempt, settings
        self._run: Any = None
        self._round = 0
        self._waiting: dict[str, Any] = {}
        self._defined = {"round"}
        # value of each metric in W&B's summary, such as max; the default is the last value
        self._summaries: dict[str, str] = {}
        self._failed = False

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Ignore the hyperparameters, since ``config.yaml`` has all settings of the run."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the row of a round.

        Args:
            metrics: Numbers of the row, keyed by name. Metrics without ``"round"`` are added to the
                next row. Row 0 is logged together with round 1, because the run's other files are
                written after row 0.
            step: Ignored, because the metrics include the round.
        """
        if "round" not in metrics:
            self._waiting |= {name: value for name, value in metrics.items() if name != "epoch"}
            return
        row, self._waiting = {**self._waiting, **metrics}, {}
        if not row["round"] or self._failed:
            return
        if self._run is None:
            self.start()
        else:
            with self._harmless():
                self._log_row(row)

    @rank_zero_only
    def start(self) -> None:
        """Start or resume the run at W&B, and log all rows that W&B does not have yet."""
        with self._harmless():
            self._start()

    @rank_zero_only
    def close(self, preempted: bool = False) -> None:
        """Log tables, pictures and result, and finish the run at W&B.

        A run without a result is marked as failed.

        Args:
            preempted: Whether a scheduler has ended the run. In this case, a W&B sweep starts the
                run again.
        """
        if self._run is None:
            return
        finished, tested = self.attempt.result.is_file(), dict[str, float]()
        if not self._failed:
            with self._harmless():
                if preempted:
                    self._run.mark_preempting()
                if finished:
                    self._run.summary.update(contents.summary(self.attempt))
                    self._define(tested := contents.tested(self.attempt))
                # files that W&B has not uploaded yet stay in the run's folder, for wandb sync
                os.environ["WANDB_DATA_DIR"] = str(Path(self._run.dir).parent)
                # W&B keeps the last step open, so that tables and pictures can be added to the step
                self._run.log(tested | contents.media(self.attempt), step=self._round)
                if self.settings.log_checkpoints:
                    contents.log_checkpoints(self._run, self.attempt, self._round)
        with self._harmless():
            self._run.finish(exit_code=int(not finished))
        if self._failed:
            with suppress(Exception):
                # without teardown, W&B would fail again when the process exits
                sys.modules["wandb"].teardown()

    @property
    def place(self) -> str | None:
        """Message that names the address or the offline files of the W&B run, or None."""
        if self._run is None or self._failed:
            return None
        if not self._run.offline:
            return f"W&B: {self._run.url}"
        return f"W&B: offline; to upload the run: wandb sync {os.path.relpath(Path(self._run.dir).parent)}"

    def _start(self) -> None:
        # absolute: W&B's process may have another working directory
        folder = self.attempt.path.resolve()
        id_file = self.attempt.wandb_id
        for earlier in folder.glob("wandb/offline-run-*"):
            shutil.rmtree(earlier, ignore_errors=True)
        run_id = id_file.read_text().strip() if id_file.is_file() else os.environ.get("WANDB_RUN_ID")
        config = yaml.safe_load(self.attempt.config.read_text())
        config_hash = hash_of_run(self.attempt, config)
        # this group is the same for all seeds of a configuration
        group = f"{config['name']}-{config_hash}"
        names, facts = contents.identity(self.attempt, self.settings, group)
        init = {"id": run_id or uuid.uuid4().hex[:8], "resume": "allow", "dir": str(folder), **names}
        self._run = open_run(self.settings.asked, init)
        if self._run is None:
            self._failed = True
            return
        write_text(id_file, self._run.id + "\n")
        columns = facts | {"config_hash": config_hash, "callbacks": contents.callback_settings(config)}
        self._run.config.update(config | columns, allow_val_change=True)
        self._summaries = {
            f"{split}/{name}": f"{metric['best']},last"
            for name, metric in contents.metrics_of(self.attempt).items()
            for split in ("val", "test")
        }
        self._run.define_metric("round")
        for row in read_metrics(self.attempt.metrics):
            self._log_row(row)

    def _log_row(self, row: Mapping[str, float]) -> None:
        self._round = int(row["round"])
        if self._round < self._run.starting_step:
            return  # W&B has this row already
        self._define(row)
        self._run.log(dict(row), step=self._round)

    def _define(self, row: Mapping[str, float]) -> None:
        for name in sorted(row.keys() - self._defined):
            self._run.define_metric(name, step_metric="round", summary=self._summaries.get(name))
        self._defined |= row.keys()

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Suppress errors of W&B and print the first error.

        After an error, only :meth:`close` uses W&B.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever the error, training continues
            if not self._failed:
                reason = " ".join(str(error).split()) or type(error).__name__
                remedy = f"the run continues without it, all metrics are in {self.attempt.metrics}"
                print(f"W&B failed: {reason}; {remedy}", file=sys.stderr)
            self._failed = True
