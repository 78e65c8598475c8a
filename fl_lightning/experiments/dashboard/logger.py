"""Logger for Weights & Biases: a row per round, online or in files for ``wandb sync``."""

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
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.files import write_text


class RoundWandbLogger(Logger):
    """Logger that uploads a run's folder: a row per round, then tables, pictures and the result.

    The W&B run starts after the first trained round. It logs all rows of ``metrics.jsonl`` that W&B
    does not have yet. A resumed run keeps its W&B id and sends no row twice. Offline, a resumed run
    writes all rows again, since ``wandb sync`` cannot join the parts of a run. If W&B fails, one
    line reports the failure, and training continues.

    Args:
        attempt: The run's folder, which also holds W&B's files.
        settings: The run's W&B settings.
    """

    name = version = ""  # empty: Lightning would add folders of these names

    def __init__(self, attempt: Attempt, settings: WandbSettings) -> None:
        super().__init__()
        self.attempt, self.settings = attempt, settings
        self._run: Any = None
        self._round = 0
        self._defined = {"round"}
        self._summaries: dict[str, str] = {}  # W&B's summary by metric; default: last value
        self._failed = False

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Ignore the hyperparameters, since ``config.yaml`` has all settings of the run."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the row of a round.

        Args:
            metrics: Numbers by name. A row without ``"round"`` is ignored. Row 0 is written before
                the run's other files, and is logged together with round 1.
            step: Ignored, as the metrics include the round.
        """
        if not metrics.get("round") or self._failed:
            return
        if self._run is None:
            self.start()
        else:
            with self._harmless():
                self._log_row(metrics)

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
            preempted: Whether a scheduler has ended the run; a W&B sweep then starts the run again.
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
                # W&B stores files that are not uploaded yet in the run's folder, for wandb sync
                os.environ["WANDB_DATA_DIR"] = str(Path(self._run.dir).parent)
                # W&B writes a step when the next one begins, so the last round's step is still open
                self._run.log(tested | contents.media(self.attempt), step=self._round)
                if self.settings.log_checkpoints:
                    contents.log_checkpoints(self._run, self.attempt, self._round)
        with self._harmless():
            self._run.finish(exit_code=int(not finished))
        if self._failed:
            with suppress(Exception):
                sys.modules["wandb"].teardown()  # otherwise W&B fails again when the process exits

    @property
    def place(self) -> str | None:
        """Message with the address or the offline files of the W&B run; None without a W&B run."""
        if self._run is None or self._failed:
            return None
        if not self._run.offline:
            return f"W&B: {self._run.url}"
        return f"W&B: offline; to upload the run: wandb sync {os.path.relpath(Path(self._run.dir).parent)}"

    def _start(self) -> None:
        folder = self.attempt.path.resolve()  # W&B's process may have another working directory
        id_file = self.attempt.wandb_id
        for earlier in folder.glob("wandb/offline-run-*"):
            shutil.rmtree(earlier, ignore_errors=True)
        run_id = id_file.read_text().strip() if id_file.is_file() else os.environ.get("WANDB_RUN_ID")
        config = yaml.safe_load(self.attempt.config.read_text())
        config_hash = folder.name.partition("-")[0]
        group = f"{config['name']}-{config_hash}"  # the same for all seeds of a configuration
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
            return  # W&B already has this row
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
