"""Where a run trains: in a folder of its own, or resumed in that of its checkpoint, or forked from it into a new one."""

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
    """Where a fit begins.

    Attributes:
        attempt: The folder that it trains in, None where nothing is written (``fast_dev_run``).
        round: The round that it goes on from; 0 for a run from the start.
        is_new: Whether the folder was made for it.
        checkpoint: Path of the checkpoint.
        differs: The old and the new value of each setting that decides results, by dotted name; None where the run goes on
            as it was.
        metrics: The lines of ``metrics.jsonl`` up to that round.
    """

    attempt: Attempt | None = None
    round: int = 0
    is_new: bool = True
    checkpoint: str = ""
    differs: Mapping[str, list[object]] | None = None
    metrics: bytes = b""

    def discard_untrained(self) -> None:
        """Remove a folder that was made for a fit without a finished round, and ``runs/<name>`` and ``runs`` where they are empty then."""
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
    """Find the folder in which a run goes on, that of its checkpoint only where it goes on at its end.

    A run of other settings or another seed, and one that goes back to an earlier checkpoint than the last, gets a new
    attempt, so that what another run has computed is never cut or mixed with what it did not compute.

    Args:
        directory: All attempts of the run.
        ckpt_path: The checkpoint that it goes on from.
        checkpoint: What it holds.
        made: What was built.
        resumed: The run's own attempt whose last checkpoint it is, None for any other checkpoint.
        held: Keeps the lock of a new attempt.

    Raises:
        ConfigurationError: Metrics of the rounds before are missing, or a file cannot be written.
    """
    reached, source = int(checkpoint["global_step"]), resumed or directory.attempt_of(ckpt_path)
    # read before there is a folder: lines that are missing leave nothing behind
    lines = lines_until(source.metrics, reached) if source is not None else []
    differs = _differences(checkpoint, made)
    if resumed is not None:
        return Start(resumed, reached, False, str(ckpt_path), differs or None, b"".join(lines))
    attempt = directory.next_attempt(held)
    print(
        f"new attempt {attempt.path} goes on from round {reached} of {ckpt_path}, which stays as it is"
        + ("" if lines else "; its metrics.jsonl begins there"),
        flush=True,
    )
    return Start(attempt, reached, True, str(ckpt_path), differs, b"".join(lines))


def _differences(checkpoint: Mapping[str, Any], made: Config) -> dict[str, list[object]]:
    """Return the old and the new value of each setting that decides results."""
    before = checkpoint["fl_lightning"]["record"].get("description")
    if not before:  # of an earlier version
        return {"settings": ["unknown", "those of config.yaml"]}
    return differences(before, deciding_settings(made))
