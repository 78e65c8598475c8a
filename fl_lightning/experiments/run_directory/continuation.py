"""Start of a fit: new, resumed in its checkpoint's folder, or forked into a new folder."""

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.experiments.run_directory.description import deciding_settings, differences
from fl_lightning.experiments.run_directory.directory import Attempt, Config, RunDirectory
from fl_lightning.experiments.run_directory.metrics_log import lines_until, read_metrics
from fl_lightning.files import remove_empty


@dataclass(frozen=True)
class Start:
    """Folder and checkpoint from which a fit starts.

    Attributes:
        attempt: Folder of the run; None with ``fast_dev_run``.
        round: Round of the checkpoint; 0 for a new run.
        is_new: Whether the folder was made for this fit.
        checkpoint: Path of the checkpoint.
        differs: Old and new value of each changed setting that decides results, by dotted name;
            None if the run resumes unchanged.
        metrics: Lines of ``metrics.jsonl`` up to ``round``.
    """

    attempt: Attempt | None = None
    round: int = 0
    is_new: bool = True
    checkpoint: str = ""
    differs: Mapping[str, list[object]] | None = None
    metrics: bytes = b""

    def discard_untrained(self) -> None:
        """Remove a new folder without a trained round, and parents that are then empty."""
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
    made: Config,
    resumed: Attempt | None,
    held: ExitStack,
) -> Start:
    """Return the start from a checkpoint, in the run's folder or in a new attempt.

    Changed settings, another seed or an earlier checkpoint need a new attempt, so that the results
    of the other run are neither cut nor mixed.

    Args:
        directory: All attempts at the run.
        ckpt_path: The checkpoint file.
        checkpoint: Content of the file.
        made: The built objects.
        resumed: Attempt of this run whose last checkpoint is ``ckpt_path``, or None.
        held: Exit stack that holds the lock of a new attempt.

    Raises:
        ConfigurationError: Metrics of earlier rounds are missing, or a file cannot be written.
    """
    reached, source = int(checkpoint["global_step"]), resumed or directory.attempt_of(ckpt_path)
    # missing lines raise an error: read them before a folder is made
    lines = lines_until(source.metrics, reached) if source is not None else []
    differs = _differences(checkpoint, made)
    if resumed is not None:
        return Start(resumed, reached, False, str(ckpt_path), differs or None, b"".join(lines))
    attempt = directory.next_attempt(held)
    print(
        f"new attempt {attempt.path} continues from round {reached} of {ckpt_path}, which stays unchanged"
        + ("" if lines else "; the new metrics.jsonl begins after this round"),
        flush=True,
    )
    return Start(attempt, reached, True, str(ckpt_path), differs, b"".join(lines))


def _differences(checkpoint: Mapping[str, Any], made: Config) -> dict[str, list[object]]:
    """Return the old and the new value of each changed setting that decides results."""
    before = checkpoint["fl_lightning"]["record"].get("description")
    if not before:  # the checkpoint is of an earlier version
        return {"settings": ["unknown", "those of config.yaml"]}
    return differences(before, deciding_settings(made))
