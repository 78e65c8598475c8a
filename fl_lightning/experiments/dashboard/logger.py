"""A run at Weights & Biases: one history row per communication round, online or in files that ``wandb sync`` uploads."""

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
    """Uploads a run's folder while it is written: the row of each round, and at the end tables, pictures and the result.

    The run starts with the first trained round, whose row is in ``metrics.jsonl`` by then: all rows there that W&B lacks are
    logged. So a resumed run, which keeps its id, sends the server no row again; offline the whole run is written anew, since
    ``wandb sync`` cannot join its pieces. W&B is never in the way of a run: where it fails, one line says so.

    Args:
        attempt: The run's folder, which also holds the files of W&B.
        settings: Where the run is logged.
    """

    name = version = ""  # the folder is the run: nothing is nested in it by name

    def __init__(self, attempt: Attempt, settings: WandbSettings) -> None:
        super().__init__()
        self.attempt, self.settings = attempt, settings
        self._run: Any = None
        self._round = 0
        self._defined = {"round"}
        self._failed = False

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the run's settings are those of ``config.yaml``."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the row of a round.

        Args:
            metrics: Numbers by name; without ``"round"`` nothing is logged. Row 0, which is older than the run's other files,
                is logged with the first round.
            step: Not used: the round is in the metrics.
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
        """Start the run, or go on with it, and log all rows that it lacks."""
        with self._harmless():
            self._start()

    @rank_zero_only
    def close(self, preempted: bool = False) -> None:
        """Log what belongs to the end of a run and finish it; without a result it has broken off.

        Args:
            preempted: Whether a scheduler has ended the run, so that a sweep starts it again.
        """
        if self._run is None:
            return
        finished = self.attempt.result.is_file()
        if not self._failed:
            with self._harmless():
                if preempted:
                    self._run.mark_preempting()
                if finished:
                    self._run.summary.update(contents.summary(self.attempt))
                # what waits to be uploaded stays with the run, for wandb sync
                os.environ["WANDB_DATA_DIR"] = str(Path(self._run.dir).parent)
                # a step is written when the next one comes: these belong to the last round
                self._run.log(contents.media(self.attempt), step=self._round)
                if self.settings.log_checkpoints:
                    contents.log_checkpoints(self._run, self.attempt, self._round)
        with self._harmless():
            self._run.finish(exit_code=int(not finished))
        if self._failed:
            with suppress(Exception):
                sys.modules["wandb"].teardown()  # else it fails once more when the process ends

    @property
    def place(self) -> str | None:
        """Where the run is, in a line for the user; None where there is none."""
        if self._run is None or self._failed:
            return None
        if not self._run.offline:
            return f"W&B: {self._run.url}"
        return f"W&B: offline; to upload the run: wandb sync {os.path.relpath(Path(self._run.dir).parent)}"

    def _start(self) -> None:
        # W&B's process may have another working directory
        folder, kept_id = self.attempt.path.resolve(), self.attempt.wandb_id
        for earlier in folder.glob("wandb/offline-run-*"):
            shutil.rmtree(earlier, ignore_errors=True)
        run_id = kept_id.read_text().strip() if kept_id.is_file() else os.environ.get("WANDB_RUN_ID")
        config = yaml.safe_load(self.attempt.config.read_text())
        config_hash = folder.name.partition("-")[0]
        group = f"{config['name']}-{config_hash}"  # the seeds of a configuration
        names, facts = contents.identity(self.attempt, self.settings, group)
        init = {"id": run_id or uuid.uuid4().hex[:8], "resume": "allow", "dir": str(folder), **names}
        self._run = open_run(self.settings.asked, init)
        if self._run is None:
            self._failed = True
            return
        write_text(kept_id, self._run.id + "\n")
        self._run.config.update(config | facts | {"config_hash": config_hash}, allow_val_change=True)
        self._run.define_metric("round")
        for row in read_metrics(self.attempt.metrics):
            self._log_row(row)

    def _log_row(self, row: Mapping[str, float]) -> None:
        self._round = int(row["round"])
        if self._round < self._run.starting_step:
            return  # the server has it
        for name in sorted(row.keys() - self._defined):
            self._run.define_metric(name, step_metric="round", summary=contents.SUMMARIES.get(name))
        self._defined |= row.keys()
        self._run.log(dict(row), step=self._round)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Do something with the run; after a failure nothing more is tried but its end."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # such as a service that was killed: it must not end the training
            if not self._failed:
                kept = f"all metrics are in {self.attempt.metrics}"
                wrong = " ".join(str(error).split()) or type(error).__name__
                print(f"W&B failed, the run goes on without it; {kept}: {wrong}", file=sys.stderr)
            self._failed = True
