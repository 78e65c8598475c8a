"""Start of a fit: a new run, a resumed run, or a new attempt from a checkpoint."""

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.experiments.run_directory.directory import Attempt, RunDirectory
from fl_lightning.experiments.run_directory.metrics_log import lines_until, read_metrics
from fl_lightning.files import remove_empty


@dataclass(frozen=True)
class Start:
    """Folder and checkpoint from which a fit starts.

    Attributes:
        attempt: Folder of the run; None with ``fast_dev_run``.
        round: Round of the checkpoint; 0 for a new run.
        is_new: Whether the folder was made for this fit.
        checkpoint: Path of the checkpoint; empty for a new run.
        differs: Old and new value of each changed setting that affects results, by dotted name.
            None for a new run, and for a run that resumes with the same settings.
        metrics: Lines of ``metrics.jsonl`` up to ``round``.
    """

    attempt: Attempt | None = None
    round: int = 0
    is_new: bool = True
    checkpoint: str = ""
    differs: Mapping[str, list[object]] | None = None
    metrics: bytes = b""

    def discard_untrained(self) -> None:
        """Remove the folder if this fit has made the folder, but has trained no round.

        Empty parent folders are removed, too.
        """
        if self.attempt is None or not self.is_new:
            return
        rows = read_metrics(self.attempt.metrics) if self.attempt.metrics.exists() else []
        if not any(row["round"] > self.round for row in rows):
            shutil.rmtree(self.attempt.path)
            remove_empty(self.attempt.path.parents[:2])


def find_start(
    directory: RunDirectory,
    ckpt_path: Path,
    checkpoint: Mapping[str, Any],
    differs: Mapping[str, list[object]],
    resumed: Attempt | None,
    held: ExitStack,
) -> Start:
    """Return the folder and checkpoint from which a fit starts.

    The folder is the checkpoint's folder or a new attempt. A new attempt is needed if settings or
    the seed have changed, or if the checkpoint is not the last of its run. In the old folder, the
    new rounds would overwrite old results.

    Args:
        directory: All attempts at the run.
        ckpt_path: The checkpoint file.
        checkpoint: Content of the file.
        differs: Old and new value of each setting that has changed since the checkpoint.
        resumed: The attempt that is resumed. Its last checkpoint is ``ckpt_path``. None if a new
            attempt is needed.
        held: Exit stack that holds the lock of a new attempt.

    Raises:
        ConfigurationError: Metrics of earlier rounds are missing, or a file cannot be written.
    """
    reached, source = int(checkpoint["global_step"]), resumed or directory.attempt_of(ckpt_path)
    # read the metrics before the folder is made, because missing lines raise an error
    lines = lines_until(source.metrics, reached) if source is not None else []
    if resumed is not None:
        print(f"{resumed.path} continues from round {reached}", flush=True)
        return Start(resumed, reached, False, str(ckpt_path), None, b"".join(lines))
    attempt = directory.next_attempt(held)
    print(
        f"new attempt {attempt.path} continues from round {reached} of {ckpt_path}, which stays unchanged"
        + ("" if lines else "; the new metrics.jsonl begins after this round"),
        flush=True,
    )
    return Start(attempt, reached, True, str(ckpt_path), differs, b"".join(lines))
