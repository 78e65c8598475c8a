"""Ray and Slurm run the cells of a study, and run them again where a node or its time was lost."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from fl_lightning import ConfigurationError
from fl_lightning.cli import study
from fl_lightning.experiments.studies.engines.base import Job
from fl_lightning.experiments.studies.running import Runner
from tests.support.cells import (
    PAUSES,
    ancestors,
    attempts_of,
    is_pausing,
    nothing_left,
    processes_of,
    reference,
    study_cells,
    wait_until,
    write_study,
)
from tests.support.command_line import message_of, rows

CELL = "fl_lightning.cli.study_cell"

ROUNDED = "trap 'echo rounded; exit 143' TERM; echo up; while true; do sleep 0.05; done"


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(study.__file__).parents[2]))
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell ignores it for what it runs in the background
    with nothing_left():
        yield


class ShellJob(Job):
    """A job that is a line of the shell."""

    @property
    def command(self):
        return ["sh", "-c", *self.arguments]


def shell(name, line, **settings):
    return ShellJob(name, "", [line], Path(f"{name}.log"), **settings)


def check(engine):
    """Statuses, output, threads, folder and environment are those of the study."""
    os.environ["OF_THE_STUDY"] = "seen"
    jobs = [
        shell("good", "echo $OMP_NUM_THREADS $OF_THE_STUDY $PWD"),
        shell("bad", "echo mistake >&2; exit 3"),
        shell("killed", "kill -9 $$"),
    ]
    engine.submit(jobs)
    del os.environ["OF_THE_STUDY"]
    ended = {}
    wait_until(lambda: ended.update(engine.ended()) or len(ended) == 3)
    assert ended == {"good": 0, "bad": 3, "killed": -9}
    assert Path("good.log").read_text() == f"1 seen {Path.cwd()}\n"
    assert Path("bad.log").read_text() == "mistake\n"


def check_stop(engine):
    """Jobs that are stopped may finish their round."""
    engine.submit([shell("long", ROUNDED)])
    wait_until(lambda: Path("long.log").exists() and Path("long.log").read_text() == "up\n")
    engine.stop()
    wait_until(lambda: Path("long.log").read_text() == "up\nrounded\n", 5)


def run_and(engine, interrupt, **cells):
    """Run the study, and interrupt one of its cells in its fourth round; its numbers are as if nobody had."""
    write_study(**cells)
    cells, times = study_cells(), []

    def show(states):
        if not times and is_pausing(cells["pausing"]):
            times.append(1)
            interrupt(cells["pausing"])
            Path("go").touch()

    runner = Runner(Path("runs/studies/few"), engine, 2, show=show)
    runner.run([*cells.values()])
    assert times
    assert runner.failed == {}
    for cell in cells.values():
        (attempt,) = attempts_of(cell)
        assert rows(attempt) == reference(cell)
    log = runner.log(cells["pausing"]).read_text()
    assert f"--ckpt_path={attempts_of(cells['pausing'])[0].checkpoints}/last.ckpt" in log


@pytest.mark.slow
def test_a_cell_goes_on_at_another_node_of_ray_when_its_own_is_lost(monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    from fl_lightning.experiments.studies.engines.ray import RayEngine

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    heard = signal.getsignal(signal.SIGTERM)
    try:
        engine = RayEngine(CELL)
        assert signal.getsignal(signal.SIGTERM) is heard
        assert (engine.cores, engine.gpus) == (2, 0)
        check(engine)

        def lose_its_node(cell):
            (process,) = processes_of(cell)
            above = [*ancestors(process)]
            node = next(x for x in nodes if x.all_processes["raylet"][0].process.pid in above)
            worker = above[0]
            cluster.remove_node(node, allow_graceful=False)
            for lost in (worker, process):
                if Path(f"/proc/{lost}").exists():
                    os.kill(lost, signal.SIGKILL)

        run_and(engine, lose_its_node)
        check_stop(engine)
    finally:
        logs = cluster.head_node.get_session_dir_path()
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(logs)


@pytest.mark.slow
def test_a_cell_goes_on_when_submitit_queues_it_again():
    pytest.importorskip("submitit", reason="submitit is not installed")
    from fl_lightning.experiments.studies.engines.slurm import SlurmEngine

    engine = SlurmEngine(CELL, "local")
    check(engine)

    def preempt(cell):
        (process,) = processes_of(cell)
        for told in (next(ancestors(process)), process):  # all processes of a job are
            os.kill(told, signal.SIGUSR2)
        os.kill(process, signal.SIGTERM)  # as Slurm does when a job is queued again

    run_and(engine, preempt, pausing={"trainer.callbacks": PAUSES})
    check_stop(engine)


SBATCH = """#!/bin/sh
cp "$1" sbatch.$(ls | grep -c '^sbatch') && echo "Submitted batch job 12"
"""


def test_cells_that_are_submitted_together_are_one_array(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit", reason="submitit is not installed")
    from fl_lightning.experiments.studies.engines.slurm import SlurmEngine

    for name in ("sbatch", "srun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(SBATCH)
        program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    engine = SlurmEngine(CELL)
    engine.submit([shell("a", "true"), shell("b", "true", threads=2, gpus=1), shell("c", "true", gpus=0.0)])
    together, alone = [
        dict(re.findall(r"#SBATCH --([\w-]+)=?(.*)", Path(f"sbatch.{i}").read_text())) for i in (0, 1)
    ]
    assert together["array"] == "0-1%2"
    assert (together["cpus-per-task"], alone["cpus-per-task"]) == ("1", "2")
    assert ("gpus-per-node" in together, alone["gpus-per-node"]) == (False, "1")
    assert "array" not in alone
    assert "requeue" in together
    assert "requeue" in alone
    assert [engine._running[name][0].job_id for name in "abc"] == ["12_0", "12", "12_1"]
    again = engine._running["c"][0].submission()
    assert again._timeout_countdown > 1000
    assert isinstance(again._checkpoint_function(), submitit.helpers.DelayedSubmission)
    monkeypatch.setattr(submitit.SlurmJob, "_results_timeout_s", 0)
    for states, ended in (
        ("12_0|PREEMPTED\n12_1|SUSPENDED\n12|CONFIGURING", {}),  # as jobs that go on may be called
        ("12_0|RUNNING\n12_1|OUT_OF_MEMORY\n12|COMPLETING", {"c": "job 12_1 is OUT_OF_MEMORY"}),
        ("12_0|PENDING", {"b": "job 12 is FORGOTTEN"}),
        ("12_0|NODE_FAIL", {"a": "job 12_0 is NODE_FAIL"}),
    ):
        (tmp_path / "bin/squeue").write_text(f"#!/bin/sh\necho '{states}'\n")
        (tmp_path / "bin/squeue").chmod(stat.S_IRWXU)
        submitit.SlurmJob.watcher._last_status_check = float("-inf")
        assert engine.ended() == dict.fromkeys(ended, 1)
        for name, reason in ended.items():
            assert (
                Path(f"{name}.log").read_text().endswith(f"error: Slurm: {reason} and has left no result\n")
            )


@pytest.mark.parametrize(
    ("line", "left"), [("kill -TERM $$", b""), ("exit 143", b""), ("exit 3", b"3"), ("kill -9 $$", b"-9")]
)
def test_a_job_that_is_terminated_leaves_no_result(line, left):
    """Slurm terminates jobs that it queues again, and those that it does not."""
    pytest.importorskip("submitit", reason="submitit is not installed")
    code = "from sys import argv; from fl_lightning.experiments.studies.engines.slurm import _Command; "
    code += "print(_Command()(['sh', '-c', argv[1]], 'log', '.', {}), end='')"
    ended = subprocess.run([sys.executable, "-c", code, line], check=False, capture_output=True)
    assert (ended.returncode, ended.stdout) == (0 if left else 143, left)


def test_what_sbatch_refuses_and_what_slurm_ends_is_told(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="submitit is not installed")
    from fl_lightning.experiments.studies.engines.slurm import SlurmEngine

    for name in ("sbatch", "srun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho 'invalid partition specified: nowhere' >&2; exit 1\n")
        program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    engine = SlurmEngine(CELL)
    with pytest.raises(ConfigurationError, match=r"--engine: slurm rejects the jobs: .*invalid partition"):
        engine.submit([shell("a", "true"), shell("b", "true")])
    engine.stop()  # there is nothing to cancel

    class Ended:
        def done(self):
            return True

        def exception(self):
            return RuntimeError("Job 12 failed\nout of memory")

    engine._running["a"] = Ended(), tmp_path / "a.log"
    assert engine.ended() == {"a": 1}
    assert (tmp_path / "a.log").read_text().endswith("error: Slurm: out of memory\n")


def test_an_engine_that_is_not_there_is_told(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fl_lightning.experiments.studies.engines.ray", raising=False)
    write_study()
    message = message_of(capsys, lambda: study.main(["few.yaml", "--engine", "ray"]))
    assert message == "error: --engine: ray needs the package ray; pip install 'fl_lightning[ray]'\n"


def test_slurm_is_not_everywhere(capsys, monkeypatch):
    pytest.importorskip("submitit", reason="submitit is not installed")
    monkeypatch.setenv("PATH", "")
    write_study()
    message = message_of(capsys, lambda: study.main(["few.yaml", "--engine", "slurm"]))
    assert (
        message
        == "error: --engine: slurm needs srun, which this machine lacks; use a machine of the cluster or --engine local\n"
    )


TOO_SHORT = ("1", "2:59", "0:02:59", "0-0:02")
LONG_ENOUGH = ("3", "0:03:00", "0-0:03:00", "1-0", "0", "UNLIMITED", "")


@pytest.mark.parametrize("limit", [*TOO_SHORT, *LONG_ENOUGH])
def test_slurm_needs_time_before_it_requeues(limit, tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="submitit is not installed")
    from fl_lightning.experiments.studies.engines.slurm import SlurmEngine

    (tmp_path / "srun").touch(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SBATCH_TIMELIMIT", limit)
    with pytest.raises(ConfigurationError) if limit in TOO_SHORT else nullcontext() as error:
        SlurmEngine(CELL)
    if limit in TOO_SHORT:
        assert str(error.value) == (
            f"SBATCH_TIMELIMIT: {limit} is too short, because Slurm may requeue a job 150 seconds before its limit; set at "
            "least 3 minutes"
        )
