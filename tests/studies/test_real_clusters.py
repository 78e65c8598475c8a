"""Studies on the Slurm of this machine and on a Ray cluster of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fl_lightning.cli import study
from fl_lightning.experiments.studies.running import Runner
from tests.support.cells import (
    PAUSES,
    attempts_of,
    is_pausing,
    nothing_left,
    reference,
    study_cells,
    wait_until,
    write_study,
)
from tests.support.command_line import rows
from tests.support.slurm_cluster import needs_slurm, slurm, state, wait_until_queued_again

CELL = "fl_lightning.cli.study_cell"

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{Path(study.__file__).parents[2]}{os.pathsep}{tmp_path}")
    with nothing_left():
        yield


@pytest.fixture
def cluster():
    needs_slurm()
    pytest.importorskip("submitit", reason="submitit is not installed")
    yield
    slurm("scancel", "--me")


def start(engine):
    """The command of a user, in a process of its own."""
    command = [sys.executable, "-m", "fl_lightning", "study", "few.yaml", "--engine", engine, "--jobs", "2"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def assert_like_one_process(cells):
    for cell in cells:
        (attempt,) = attempts_of(cell)
        assert rows(attempt) == reference(cell)


def test_jobs_that_slurm_requeues_and_ends_at_their_limit_go_on(cluster):
    from fl_lightning.experiments.studies.engines.slurm import SlurmEngine

    pauses = {"trainer.callbacks": PAUSES}
    write_study(through={}, requeued=pauses, limited={**pauses, "model.local_steps": 3})
    engine, cells = SlurmEngine(CELL), study_cells()
    held = [cells["requeued"], cells["limited"]]

    def interrupt(states):
        if not Path("go").exists() and all(map(is_pausing, held)):
            requeued, limited = [engine._running[cell.job][0].job_id for cell in held]
            slurm("scontrol", "update", f"JobId={limited}", "TimeLimit=1")
            slurm("scontrol", "requeue", requeued)
            wait_until(lambda: "RUNNING" not in (state(requeued), state(limited)), 100)
            Path("go").touch()
            wait_until_queued_again(requeued)
            wait_until_queued_again(limited)

    runner = Runner(Path("runs/studies/few"), engine, 3, show=interrupt)
    runner.run([*cells.values()])
    assert runner.failed == {}
    assert_like_one_process(cells.values())
    for cell in held:
        assert f"--ckpt_path={attempts_of(cell)[0].checkpoints}/last.ckpt" in runner.log(cell).read_text()


def test_a_cancelled_job_is_told_and_a_killed_study_goes_on(cluster):
    write_study()
    cells = study_cells()
    first = start("slurm")
    wait_until(lambda: is_pausing(cells["pausing"]))
    slurm("scancel", "--me", "--state=RUNNING")
    Path("go").touch()
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 2
    told = r"failed: cell=pausing.*: Slurm: job \d+_\d is CANCELLED and has left no result; its output: .*\.log\n"
    assert len(re.findall(told, output)) == 1
    assert cells["through"].state().phase == "done"
    second = start("slurm")
    wait_until(lambda: slurm("squeue", "--me", "-h", "-t", "RUNNING"))
    second.send_signal(signal.SIGKILL)
    second.communicate()
    third = start("slurm")
    output, _ = third.communicate(timeout=300)
    assert third.returncode == 0, output
    assert_like_one_process(cells.values())


def test_a_study_on_a_ray_of_its_own_equals_one_process():
    pytest.importorskip("ray", reason="ray is not installed")
    write_study(through={}, other={"model.local_steps": 3})
    Path("go").touch()
    study = start("ray")
    output, _ = study.communicate(timeout=300)
    assert study.returncode == 0, output
    assert_like_one_process(study_cells().values())
