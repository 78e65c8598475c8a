"""Loading of studies from their folders."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.loaded import frame_of
from fl_lightning.experiments.studies.cell_values import StudyCell, cell_rows, study_cells
from fl_lightning.experiments.studies.cells import RUNS
from fl_lightning.experiments.studies.found import Found, Group, Verdict
from fl_lightning.files import restored, user_path


@dataclass(frozen=True)
class LoadedStudy:
    """A study that ``load_study`` has read from its folder.

    Attributes:
        path: Folder of the study.
        found: All findings, the content of ``study.json``.
    """

    path: Path
    found: Found

    @property
    def rows(self) -> list[Group]:
        """The combinations of labels, each with the values of all seeds."""
        return self.found["groups"]

    @property
    def cells(self) -> list[StudyCell]:
        """The runs, one for each combination and seed."""
        return study_cells(self.found)

    @property
    def claims(self) -> list[Verdict]:
        """The verdicts on the claims."""
        return self.found["claims"]

    @property
    def metrics(self) -> dict[str, str]:
        """The columns of the table, keyed by metric. Claims are about the first metric."""
        return self.found["metrics"]

    def frame(self) -> Any:
        """Return the cells as a ``pandas.DataFrame``, with the columns of ``cells.csv``.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        return frame_of(cell_rows(self.found), "cells")


def load_study(path: str | os.PathLike[str]) -> LoadedStudy:
    """Load a study.

    ::

        study = load_study("runs/studies/methods-quick")
        for cell in study.cells:
            print(cell.labels["method"], cell.seed, cell.values.get("test/accuracy"))

    Args:
        path: Folder of the study.

    Raises:
        ConfigurationError: The folder holds no study.
    """
    folder = user_path("load_study", path)
    if not (folder / "study.json").is_file():
        raise ConfigurationError(
            f"load_study: {folder} is no study's folder (it has no study.json); give a folder such as runs/studies/NAME-quick"
        )
    return LoadedStudy(folder, read_found(folder))


def read_found(folder: Path) -> Found:
    """Read the findings of a study. If folders have moved, correct the paths of run directories.

    Args:
        folder: Folder of the study, such as ``runs/studies/NAME-quick``. The runs are then in
            ``runs/cells``.

    Raises:
        ConfigurationError: ``study.json`` cannot be read.
    """
    try:
        found: Found = restored(json.loads((folder / "study.json").read_text()))
        roots = folder.resolve().parents[1:]  # the name of a study may have slashes
        for run in (run for group in found["groups"] for run in group["runs"]):
            places = [root.joinpath(RUNS, *Path(run["directory"]).parts[-2:]) for root in roots]
            run["directory"] = str(next((place for place in places if place.is_dir()), places[0]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{folder / 'study.json'} cannot be read as the result of a study; run the study again"
        raise ConfigurationError(message) from error
    return found
