"""Logger for Weights & Biases. It logs a row per round, online or to files for ``wandb sync``."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from fl_lightning.experiments.run_directory.config_digest import hash_of_run
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.metrics_log import joined, read_metrics
from fl_lightning.experiments.run_directory.result import metric_values, read_result
from fl_lightning.experiments.weights_and_biases import contents
from fl_lightning.experiments.weights_and_biases.settings import (
    WandbSettings,
    error_in_one_line,
    open_run,
    tear_down,
)
from fl_lightning.files import write_text
from fl_lightning.round.module import FederatedModule


class RoundWandbLogger(WandbLogger):
    """Lightning's W&B logger with rounds as steps, and tables, pictures and the result at the end.

    The W&B run starts after the first trained round. The logger then sends all rows of
    ``metrics.jsonl`` that W&B does not have yet. A resumed run keeps its W&B id, and sends no row
    twice. If W&B is offline, a resumed run writes all rows again, since ``wandb sync`` cannot join
    the parts of a run.

    If W&B fails, one line reports the failure, and training continues.

    Args:
        attempt: The run's folder, which also holds W&B's files.
        settings: The run's W&B settings.
    """

    def __init__(self, attempt: Attempt, settings: WandbSettings) -> None:
        project = settings.project or os.environ.get("WANDB_PROJECT") or "fl_lightning"
        # absolute: W&B's process may have another working directory
        super().__init__(project=project, save_dir=attempt.path.resolve())
        self.attempt, self.settings = attempt, settings
        self._run: Any = None
        self._round = 0
        self._failed = False

    @property
    def experiment(self) -> Any:
        """The run at W&B; None before the first trained round, and if W&B does not work."""
        return self._run

    def log_hyperparams(self, params: Any) -> None:
        """Ignore the hyperparameters, since ``config.yaml`` has all settings of the run."""

    @rank_zero_only
    @joined
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the row of a round, with the tables and pictures of ``log_table`` and ``log_image``.

        Row 0 is logged together with round 1, because the run's other files are written after row 0.

        Args:
            metrics: Numbers of the row, keyed by name.
            step: Ignored, because the metrics include the round.
        """
        if metrics["round"]:
            self.start()
            self._call(self._log_row, metrics)

    @rank_zero_only
    def start(self) -> None:
        """Start or resume the run at W&B, and log all rows that W&B does not have yet."""
        if self._run is None:
            self._call(self._start)

    @rank_zero_only
    def close(self, module: FederatedModule, preempted: bool = False) -> None:
        """Log tables, pictures and result, and finish the run at W&B.

        A run without a result is marked as failed.

        Args:
            module: The trained module.
            preempted: Whether a scheduler has ended the run. In this case, a W&B sweep starts the
                run again.
        """
        if self._run is None:
            return
        status = int(not self.attempt.result.is_file())
        self._call(self._log_end, module, preempted)
        self._call(self._run.finish, status)
        if self._failed:
            tear_down(status)

    @property
    def place(self) -> str | None:
        """Message that names the address or the offline files of the W&B run, or None."""
        if self._run is None or self._failed:
            return None
        if not self._run.offline:
            return f"W&B: {self._run.url}"
        return f"W&B: offline; to upload the run: wandb sync {shlex.quote(os.path.relpath(self._folder))}"

    @property
    def _folder(self) -> Path:
        return Path(self._run.dir).parent

    def _start(self) -> None:
        attempt, id_file = self.attempt, self.attempt.wandb_id
        for earlier in attempt.path.glob("wandb/offline-run-*"):
            shutil.rmtree(earlier, ignore_errors=True)
        config, facts = yaml.safe_load(attempt.config.read_text()), json.loads(attempt.identity.read_text())
        config_hash = hash_of_run(attempt, config)
        # this group is the same for all seeds of a configuration
        names = contents.names(facts, self.settings, group=f"{config['name']}-{config_hash}")
        run_id = id_file.read_text().strip() if id_file.is_file() else None
        init = {"id": run_id, "resume": "allow", "dir": self.save_dir, "project": self.name, **names}
        self._run = open_run(self.settings.asked, **init)
        if self._run is None:
            self._failed = True
            return
        write_text(id_file, self._run.id + "\n")
        columns = {x: fact for x, fact in facts.items() if x not in ("name", "tags", "metrics")}
        columns |= {"config_hash": config_hash, "callbacks": contents.callback_settings(config)}
        self._run.config.update(config | columns, allow_val_change=True)
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")
        rows = read_metrics(attempt.metrics)
        for name, metric in facts["metrics"].items():
            own = any(name in row for row in rows)  # the full name of a LightningModule's metric
            for full in (name,) if own else (f"val/{name}", f"test/{name}"):
                best = f"{metric['best']},last"  # the default is the last value
                self._run.define_metric(full, step_metric="round", summary=best)
        for row in rows:
            self._log_row(row)

    def _log_row(self, row: Mapping[str, float]) -> None:
        self._round = int(row["round"])
        if self._round >= self._run.starting_step:  # W&B has the rows before this step
            self._run.log(dict(row), step=self._round)

    def _log_end(self, module: FederatedModule, preempted: bool) -> None:
        if preempted:
            self._run.mark_preempting()
        shown = contents.media(self.attempt, module)
        if self.attempt.result.is_file():
            result = read_result(self.attempt.result)
            self._run.summary.update(contents.summary(result))
            shown |= {x: value for x, value in metric_values(result).items() if x.startswith("test/")}
        # files that W&B has not uploaded yet stay in the run's folder, for wandb sync
        os.environ["WANDB_DATA_DIR"] = str(self._folder)
        # W&B keeps the last step open, so that tables and pictures can be added to the step
        self._run.log(shown, step=self._round)
        if self.settings.log_checkpoints:
            contents.log_checkpoints(self._run, self.attempt, self._round)

    def _call(self, action: Callable[..., object], *arguments: object) -> None:
        """Call a function of W&B. Print the first error; after an error, call no function."""
        if self._failed:
            return
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001  # whatever the error, training continues
            self._failed = True
            remedy = f"the run continues without it, all metrics are in {self.attempt.metrics}"
            print(f"W&B failed: {error_in_one_line(error)}; {remedy}", file=sys.stderr)
