"""The runs of a search for T*: each goes on from a checkpoint of stage I that another one has kept.

The rows of stage I in a branch's ``metrics.jsonl`` are copies of that run's: only ``fixbn/freeze_round`` is its T*, not the
branch's.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.cli.command_line import main as run
from fl_lightning.errors import ConfigurationError
from fl_lightning.run_directory.checkpoint_io import load_run
from fl_lightning.run_directory.checkpoints import kept_name
from fl_lightning.run_directory.directory import Attempt, directory_of


@dataclass
class Branch:
    """The run with one T*.

    Attributes:
        freeze_round: T*.
        config: Its resolved configuration.
        yaml: The file for it.
    """

    freeze_round: int
    config: dict[str, Any]
    yaml: Path

    @property
    def attempt(self) -> Attempt | None:
        """Its newest attempt."""
        return directory_of(self.config).newest_attempt()

    @property
    def result(self) -> dict[str, Any]:
        """Its ``result.json``, empty until it has been trained for all rounds."""
        if self.attempt is None or not self.attempt.result.is_file():
            return {}
        found: dict[str, Any] = json.loads(self.attempt.result.read_text())
        complete = found["rounds"] == found["planned_rounds"] and self._is_planned(found["planned_rounds"])
        return found if complete else {}

    def interrupted(self) -> Path | None:
        """The last checkpoint of an attempt that was stopped, None where there is none."""
        if self.attempt is None or self.attempt.result.is_file():
            return None
        last = self.attempt.checkpoints / "last.ckpt"
        planned = last.is_file() and load_run(last)["fl_lightning"]["total_rounds"]
        return last if planned and self._is_planned(planned) else None

    def stage_one(self, freeze_round: int) -> tuple[int, Path | None]:
        """The latest round until a T* of which this run has kept a checkpoint, and the file; 0 and None without one."""
        if self.attempt is not None:
            for round_number in range(min(freeze_round, self.freeze_round), 0, -1):
                path = self.attempt.checkpoints / kept_name(round_number)
                if path.is_file() and self._is_planned(load_run(path)["fl_lightning"]["total_rounds"]):
                    return round_number, path
        return 0, None

    def _is_planned(self, rounds: int) -> bool:
        return int(self.config["trainer"]["max_epochs"]) in (-1, rounds)


def make_branches(config: Mapping[str, Any], freeze_rounds: Sequence[int], folder: Path) -> list[Branch]:
    """A branch for each T*; those of larger T* keep checkpoints for those of smaller.

    Args:
        config: The resolved configuration of a run with FixBN, its name too.
        freeze_rounds: The values of T*.
        folder: The search's folder.
    """
    branches = []
    for freeze_round in freeze_rounds:
        own = deepcopy(dict(config))
        fixbn_settings(own).update(freeze_round=freeze_round, freeze_fraction=None)
        own["checkpoint"]["keep_rounds"] = [other for other in freeze_rounds if 0 < other < freeze_round]
        branches.append(Branch(freeze_round, own, folder / f"freeze_round_{freeze_round}.yaml"))
    return branches


def fixbn_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the one FixBN of a resolved configuration, to be read and written.

    Raises:
        ConfigurationError: There is none, or more than one.
    """
    found = [
        callback["init_args"]
        for callback in config["trainer"]["callbacks"] or []
        if callback["class_path"].rpartition(".")[2] == "FixBN"
    ]
    if len(found) != 1:
        raise ConfigurationError(f"trainer.callbacks: search-freeze needs one FixBN and found {len(found)}")
    settings: dict[str, Any] = found[0]
    return settings


def train_branches(branches: Sequence[Branch]) -> None:
    """Train every branch that is not finished, the largest T* first."""
    for branch in sorted(branches, key=lambda branch: -branch.freeze_round):
        if branch.result:
            print(f"T* = {branch.freeze_round}: finished in {branch.result['directory']}", flush=True)
            continue
        checkpoint = branch.interrupted()
        if checkpoint is None:
            kept = (other.stage_one(branch.freeze_round) for other in branches)
            _, checkpoint = max(kept, key=lambda found: found[0])
        print(f"T* = {branch.freeze_round}" + (f", from {checkpoint}" if checkpoint else ""), flush=True)
        run(["fit", f"--config={branch.yaml}", *([f"--ckpt_path={checkpoint}"] if checkpoint else [])])
