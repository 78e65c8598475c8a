"""Cells as forks of one server: each as a process of its own would be, whatever is killed."""

import json
import multiprocessing
import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from benchmarks.process_tree import is_running
from fl_lightning import cores
from fl_lightning.experiments.run.interruption import Stopped
from fl_lightning.experiments.run_directory.checkpoint_io import load_checkpoint
from fl_lightning.experiments.studies.engines import local
from fl_lightning.experiments.studies.engines.base import Job
from fl_lightning.experiments.studies.engines.local import LocalEngine
from fl_lightning.experiments.studies.running import Runner
from tests.support.cells import (
    PAUSES,
    attempts_of,
    new_server,
    nothing_left,
    study_cells,
    wait_until,
    write_study,
)
from tests.support.command_line import rows
from tests.support.outcomes import same

CELL = "fl_lightning.cli.study_cell"
TOOL = """
import json, os, signal, sys, time
from multiprocessing import forkserver
from pathlib import Path

def main(arguments):
    exec(arguments[0], globals())

if __name__ == "__main__":
    main(sys.argv[1:])
"""
ABOUT = """
import own
about = {
    "folder": os.getcwd(), "path": sys.path, "environment": dict(os.environ), "input": sys.stdin.read(),
    "leads a group": os.getpgrp() == os.getpid(), "session": os.getsid(0), "own": own.VALUE,
    "threads": len(os.listdir("/proc/self/task")), "signals": [str(signal.getsignal(x)) for x in sorted(signal.valid_signals())],
    "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
}
print(json.dumps(about))
print("seen", file=sys.stderr)
"""
LONG = "Path('up').write_text(str(os.getppid()))\nwhile not Path('go').exists(): time.sleep(0.01)\nPath('end').touch(); sys.exit(5)"
STARTED = """
import sys, time, types

CELL = "fl_lightning.cli.study_cell"
SOURCE = "fl_lightning.experiments.run_directory.source"
for name in ("torch", "matplotlib.backends.backend_agg", SOURCE):
    sys.modules[name] = types.ModuleType(name)  # processes of a test import nothing that is slow
sys.modules[SOURCE].provenance = lambda config: time.sleep({seconds})
import method
if "-c" in sys.orig_argv:  # in the server, so that its forks need not
    import fl_lightning.experiments.studies.engines.local
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def prepare(folder, patch):
    """Let the server of a test import little, and return the server."""
    (folder / "method.py").write_text("VALUE = 1\n")
    (folder / "sitecustomize.py").write_text(STARTED.format(seconds=0))
    patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{Path(local.__file__).parents[4]}")
    patch.delitem(os.environ, "OMP_NUM_THREADS", raising=False)
    return new_server(patch)


def end(server):
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine with a server of its own, which imports little."""
    Path("tool.py").write_text(TOOL)
    server = prepare(tmp_path, monkeypatch)
    made = LocalEngine("tool")
    yield made
    made.stop()
    end(server)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of several tests, which leave it as it is."""
    with pytest.MonkeyPatch.context() as patch:
        server = prepare(tmp_path_factory.mktemp("server"), patch)
        server.set_forkserver_preload(["tool", local._SERVER])
        server.ensure_running()
    yield server
    end(server)


@pytest.fixture
def forks(server, monkeypatch):
    """An engine on the server of several tests."""
    for name in forkserver.__all__:
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    Path("tool.py").write_text(TOOL)
    made = LocalEngine("tool")
    yield made
    made.stop()


def job(name, code, **settings):
    """A job that runs code in the module ``tool``."""
    return Job(name, "tool", [code], Path(f"{name}.log"), **settings)


def finish(engine, *jobs):
    """Run jobs and return their statuses."""
    ended = {}
    engine.submit(jobs)
    wait_until(lambda: ended.update(engine.ended()) or len(ended) == len(jobs), 60)
    return ended


def server_of_long():
    """Wait for the job ``LONG`` to begin, and return the process id of its server."""
    wait_until(lambda: Path("up").exists() and Path("up").read_text())
    return int(Path("up").read_text())


def test_a_fork_is_what_a_process_of_its_own_would_be(engine, monkeypatch):
    found = []
    for number, one in enumerate((engine, engine, LocalEngine("tool", forks=False))):
        Path("own.py").write_text(f"VALUE = {'x' * number!r}\n")  # the user's module is fresh
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"3,{number}")
        assert finish(one, job("about", ABOUT, threads=2)) == {"about": 0}
        *_, about, seen = Path("about.log").read_text().splitlines()
        assert seen == "seen"
        found.append(json.loads(about))
        assert found[-1].pop("own") == "x" * number
        assert found[-1]["environment"].pop("CUDA_VISIBLE_DEVICES") == f"3,{number}"
    assert found[0] == found[1] == found[2]
    assert found[0]["leads a group"]
    assert found[0]["environment"]["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_fork_ends_as_a_process_of_its_own_would(forks):
    codes = [
        "", "sys.exit(3)", "sys.exit('words')", "raise ValueError('wrong')", "raise KeyboardInterrupt",
        "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGTERM)", "print('x', flush=True); os._exit(7)",
        "import atexit; atexit.register(print, 'last')",
    ]  # fmt: skip
    jobs = [job(str(number), code) for number, code in enumerate(codes)]
    ended = finish(forks, *jobs)
    assert [ended[one.name] for one in jobs] == [0, 3, 1, 1, 1, -9, -15, 7, 0]
    texts = [one.log.read_text().splitlines()[-1:] for one in jobs]
    assert texts == [
        [],
        [],
        ["words"],
        ["ValueError: wrong"],
        ["KeyboardInterrupt"],
        [],
        [],
        ["x"],
        ["last"],
    ]


def test_a_fork_outlives_its_server_and_the_next_job_has_another(engine):
    engine.submit([job("long", LONG)])
    os.kill(server_of_long(), signal.SIGKILL)
    ended = {}
    wait_until(lambda: ended.update(engine.ended()) or ended, 20)
    assert ended == {"long": 255}  # which nobody knows
    assert finish(engine, job("next", "sys.exit(4)")) == {"next": 4}
    Path("go").touch()
    wait_until(Path("end").exists, 20)


def test_a_stop_reaches_the_forks(forks):
    forks.submit([job("long", LONG)])
    server_of_long()
    forks.stop()
    assert forks.ended() == {"long": -signal.SIGTERM}


def test_a_signal_to_the_group_of_the_study_reaches_neither_server_nor_fork(engine):
    def study():
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        engine.submit([job("long", LONG)])
        time.sleep(60)

    killed = multiprocessing.get_context("fork").Process(target=study)
    killed.start()
    server = server_of_long()
    os.killpg(killed.pid, signal.SIGTERM)
    killed.join()
    assert killed.exitcode == -signal.SIGTERM
    assert is_running(server)
    Path("go").touch()
    wait_until(Path("end").exists, 20)
    wait_until(lambda: not is_running(server), 20)  # it ends with its last fork


def test_a_study_that_is_stopped_while_its_server_starts_leaves_nothing(engine):
    Path("sitecustomize.py").write_text(STARTED.format(seconds=30))

    def stop(number, frame):
        raise Stopped(signal.SIGINT)

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Stopped):
            engine.submit([job("never", "Path('ran').touch()")])
    finally:
        signal.signal(signal.SIGALRM, previous)
    engine.stop()
    assert engine.ended() == {}
    assert not Path("ran").exists()


def test_a_job_that_the_study_does_not_know_ends_without_having_begun(forks, monkeypatch):
    class Interrupted(dict):
        def __setitem__(self, name, process):
            processes.append(process)
            raise Stopped(signal.SIGINT)

    processes = []
    monkeypatch.setattr(forks, "_running", Interrupted())
    with pytest.raises(Stopped):
        forks.submit([job("never", "Path('ran').touch()")])
    processes[0].join()
    assert processes[0].exitcode == 128 + signal.SIGTERM
    assert not Path("ran").exists()


def test_a_job_never_runs_code_that_has_changed_since_its_server_imported_it(engine):
    codes = []
    for value in (1, 1, 22, 22):
        Path("method.py").write_text(f"VALUE = {value}\n")
        if not codes:
            time.sleep(0.02)
        codes += finish(engine, job("value", "import method; sys.exit(method.VALUE)")).values()
    assert codes == [1, 1, 22, 22]


def test_gpus_are_filled_evenly(forks, monkeypatch):
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 3)
    forks = LocalEngine("tool")
    assert forks.gpus == 3

    def start(number):
        code = f"print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\nwhile not Path('go{number}').exists(): time.sleep(0.02)\nsys.exit({number})"
        one = job(str(number), code, gpus=0.5)
        forks.submit([one])
        wait_until(lambda: one.log.is_file() and one.log.read_text())
        return one.log.read_text()

    assert [start(number) for number in range(7)] == [f"{gpu}\n" for gpu in (0, 1, 2, 0, 1, 2, 0)]
    Path("go5").touch()
    ended = {}
    wait_until(lambda: ended.update(forks.ended()) or ended)
    assert ended == {"5": 5}
    assert start(7) == "2\n"
    forks.stop()
    assert set(forks.ended().values()) == {-signal.SIGTERM}


@pytest.mark.slow
def test_a_forked_cell_has_the_bits_of_a_cell_of_its_own_and_one_thread(monkeypatch):
    threads = 2
    monkeypatch.setenv("PYTHONPATH", str(Path(local.__file__).parents[4]))
    write_study(own={"threads": threads, "trainer.callbacks": PAUSES})
    Path("go").touch()
    found = []
    with nothing_left():
        for one in (LocalEngine(CELL), LocalEngine(CELL, forks=False)):
            (cell,) = study_cells().values()
            runner = Runner(Path("study"), one, 1)
            runner.run([cell])
            assert runner.failed == {}
            (attempt,) = attempts_of(cell)
            weights = load_checkpoint(attempt.checkpoints / "last.ckpt")["state_dict"]
            found.append((rows(attempt), weights))
            one.stop()
            Path("runs").rename(f"runs{len(found)}")
    # the threads of libraries, such as OpenBLAS's, have ended before the fork
    Path("tool.py").write_text(TOOL)
    threads = job("threads", "sys.exit(len(os.listdir('/proc/self/task')))")
    assert finish(LocalEngine("tool"), threads) == {"threads": 1}
    (forked_rows, forked), (own_rows, own) = found
    assert forked_rows == own_rows
    assert same(forked, own)


def test_the_quota_of_a_container_limits_the_cells_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text("100000 100000")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    assert LocalEngine(CELL).cores == 1
