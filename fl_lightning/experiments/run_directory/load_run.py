"""``load_run``: read a run from its folder. The run may be finished or unfinished."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.run_directory.result import Result, metric_values, read_result
from fl_lightning.files import user_path


@dataclass(frozen=True)
class LoadedRun:
    """A run, as returned by ``load_run``. Each file is read at its first use.

    Attributes:
        path: The run directory.
    """

    path: Path

    @property
    def finished(self) -> bool:
        """Whether the run has finished. Only a finished run has the file ``result.json``."""
        return Attempt(self.path).result.is_file()

    @cached_property
    def config(self) -> Config:
        """All settings, as in ``config.yaml``.

        Raises:
            ConfigurationError: The file cannot be read.
        """
        return Attempt(self.path).read_config()

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of ``metrics.jsonl``, one for each logged round. Row 0 is the initial model.

        Raises:
            ConfigurationError: The file is missing or damaged.
        """
        return read_metrics(Attempt(self.path).metrics)

    @cached_property
    def result(self) -> Result:
        """The content of ``result.json``.

        Raises:
            ConfigurationError: The run is unfinished, or the file is damaged.
        """
        if not self.finished:
            raise ConfigurationError(
                f"load_run: {self.path} has no result.json, as the run is not finished; resume it, or use .metrics"
            )
        return read_result(Attempt(self.path).result)

    @property
    def values(self) -> dict[str, float]:
        """The final metrics by name, such as ``test/accuracy``, from ``result.json``."""
        return metric_values(self.result)

    def frame(self) -> Any:
        """Return ``metrics`` as a ``pandas.DataFrame`` with the round as index."""
        import pandas as pd

        return pd.DataFrame(self.metrics).set_index("round")


def load_run(path: str | os.PathLike[str]) -> LoadedRun:
    """Load a run from its folder.

    ::

        run = load_run("runs/digits_fedavg_bn/1f0c9a7e-s0")
        print(run.values["test/accuracy"], run.config["model"]["local_steps"], run.metrics[-1])

    Args:
        path: Run directory, such as ``Run.path``.

    Raises:
        ConfigurationError: The folder is not a run directory.
    """
    return loaded_run("load_run", path)


def loaded_run(setting: str, path: str | os.PathLike[str]) -> LoadedRun:
    """Load a run as :func:`load_run` does. Error messages name the setting."""
    folder = user_path(setting, path)
    if not Attempt(folder).config.is_file():
        runs = sorted(config.parent for config in folder.glob("*/config.yaml"))
        known = f"; it has {', '.join(map(str, runs[:3]))}" if runs else ""
        raise ConfigurationError(
            f"{setting}: {folder} is no run directory (it has no config.yaml){known}; give such as runs/NAME/HASH-s0 or runs/NAME/s0"
        )
    return LoadedRun(folder)
