"""A study of two cells: one trains through, one waits in its fourth round until there is a file."""

import multiprocessing
import os
import signal
import time
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path

import yaml

from fl_lightning.cli.study import cells_of
from fl_lightning.experiments.studies.reading import read_study
from tests.support.command_line import rows, run, write_config

PAUSE = """
import time
from pathlib import Path
import lightning as L

class Pause(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        while trainer.current_epoch == 3 and not Path("go").exists():
            time.sleep(0.02)
"""
PAUSES = [{"class_path": "pausing.Pause"}]


def write_study(**cells):
    """Write a study with these cells, those of the module's first line unless others are given, and what they need."""
    Path("pausing.py").write_text(PAUSE)
    changes = {"trainer.callbacks": None, "trainer.max_epochs": 6, "checkpoint": {"every_n_seconds": 0}}
    write_config(changes)
    axis = cells or {"through": {}, "pausing": {"trainer.callbacks": PAUSES}}
    content = {"title": "few", "axes": {"cell": axis}, "scales": {"quick": {"base": "tiny.yaml"}}}
    Path("few.yaml").write_text(yaml.safe_dump(content))
    return "few.yaml"


def study_cells():
    """The cells of the study, by label."""
    study = cells_of(read_study(Path("few.yaml"), "quick"), [])
    return {cell.labels["cell"]: cell for cell in study.table([])}


def new_server(monkeypatch):
    """Let this test start a fork server of its own, and return it."""
    server = forkserver.ForkServer()
    for name in forkserver.__all__:
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    return server


def attempts_of(cell):
    return cell.directory.attempts()


def wait_until(condition, seconds=300):
    """Wait for something that happens in another process."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_pausing(cell):
    """Whether it waits for the file: three rounds are trained, and the last one's checkpoint is there."""
    state = cell.state()
    return (state.phase, state.round) == ("running", 3) and bool(cell.checkpoint())


def processes_of(cell=None):
    """The ids of the processes that train a cell, or any, of the study in the working directory.

    Their output goes to the cell's log.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            log = Path(os.readlink(entry / "fd/1"))
            if log.is_relative_to(Path.cwd()) and log.name == f"{cell.job if cell else log.stem}.log":
                found.append(int(entry.name))
    return found


@contextmanager
def nothing_left():
    """End what a test has started, also where it failed."""
    try:
        yield
    finally:
        for study in multiprocessing.active_children():
            study.kill()
        for process in processes_of():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def ancestors(process):
    """The ids of the processes above one."""
    while process > 1:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        yield process


def reference(cell):
    """The rows of the same run in this process."""
    Path("go").touch()
    Path("reference.yaml").write_text(yaml.safe_dump({**cell.config, "name": "reference"}))
    return rows(run(config="reference.yaml").attempt)
