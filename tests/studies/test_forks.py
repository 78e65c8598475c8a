"""Cells that are forks of one process: as a process of their own, whatever is killed."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from cells import PAUSES, attempts_of, nothing_left, study_cells, wait_until, write_study
from command_line import rows

from fl_lightning.experiments.run.interruption import Stopped
from fl_lightning.experiments.run_directory.checkpoint_io import load_run
from fl_lightning.experiments.studies.engines import forks
from fl_lightning.experiments.studies.engines.base import Job
from fl_lightning.experiments.studies.engines.local import LocalEngine
from fl_lightning.experiments.studies.running import Runner

TOOL = """
import os, signal, sys, time
from pathlib import Path

def preload():
    with open("preloads", "a") as file:
        print(os.getpid(), file=file)

if __name__ == "__main__":
    exec(sys.argv[1])
"""
ABOUT = """
import json, own
files = os.listdir("/proc/self/fd")
about = {
    "argv": sys.argv, "folder": os.getcwd(), "path": sys.path, "main": sys.modules["__main__"].__file__,
    "environment": dict(os.environ), "input": sys.stdin.read(), "files": len(files), "parent": os.getppid(),
    "leads a group": os.getpgrp() == os.getpid(), "session": os.getsid(0), "own": own.VALUE,
    "line": Path("/proc/self/cmdline").read_text().strip("\\0"), "threads": len(os.listdir("/proc/self/task")),
    "signals": [str(signal.getsignal(x)) for x in sorted(signal.valid_signals())],
    "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())], "buffered": sys.stdout.line_buffering,
}
print(json.dumps(about))
print("seen", file=sys.stderr)
"""
LONG = "Path('up').touch()\nwhile not Path('go').exists(): time.sleep(0.01)\nsys.exit(5)"


@pytest.fixture(autouse=True)
def tool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{Path(forks.__file__).parents[4]}")
    Path("tool.py").write_text(TOOL)


@pytest.fixture
def engine():
    made = LocalEngine()
    yield made
    made.stop()


def job(name, code, **settings):
    """A job that runs code in the module ``tool``."""
    return Job(name, [sys.executable, "-m", "tool", code], Path(f"{name}.log"), **settings)


def finish(engine, *jobs):
    """Run jobs and return their statuses."""
    ended = {}
    engine.submit(jobs)
    wait_until(lambda: ended.update(engine.ended()) or len(ended) == len(jobs), 60)
    return ended


def servers():
    """Process ids of the servers of the working directory, the oldest first."""
    return [int(line) for line in Path("preloads").read_text().split()] if Path("preloads").exists() else []


def is_running(process):
    """Return whether a process has not ended."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_fork_is_what_a_process_of_its_own_would_be(engine, monkeypatch):
    found = []
    for number, one in enumerate((engine, engine, LocalEngine(forks=False))):
        Path("own.py").write_text(f"VALUE = {'x' * number!r}\n")  # the user's module is fresh
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
        assert finish(one, job("about", ABOUT, threads=2)) == {"about": 0}
        *_, about, seen = Path("about.log").read_text().splitlines()
        assert seen == "seen"
        found.append(json.loads(about))
        assert found[-1].pop("own") == "x" * number
    assert found[0] == found[1] == found[2]
    assert found[0]["parent"] == os.getpid()
    assert found[0]["environment"]["OMP_NUM_THREADS"] == "2"
    assert found[0]["environment"]["CUDA_VISIBLE_DEVICES"] == "3,4"
    assert len(servers()) == 1


def test_a_fork_ends_as_a_process_of_its_own_would(engine):
    codes = [
        "", "sys.exit(3)", "sys.exit('words')", "raise ValueError('wrong')", "raise KeyboardInterrupt",
        "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGTERM)", "print('x'); os._exit(7)",
        "import atexit; atexit.register(print, 'last')",
    ]  # fmt: skip
    jobs = [job(str(number), code) for number, code in enumerate(codes)]
    ended = finish(engine, *jobs)
    texts = [one.log.read_text() for one in jobs]
    for one in jobs:
        one.log.unlink()
    assert ended == finish(LocalEngine(forks=False), *jobs)
    assert [ended[one.name] for one in jobs] == [0, 3, 1, 1, -2, -9, -15, 7, 0]
    assert [text.splitlines()[-1:] for text in texts] == [
        one.log.read_text().splitlines()[-1:] for one in jobs
    ]
    assert 'File "<string>", line 1, in <module>\nValueError: wrong' in texts[3]
    assert len(servers()) == 1


def test_a_fork_outlives_its_server_and_the_next_job_has_another(engine):
    engine.submit([job("long", LONG)])
    wait_until(Path("up").exists)
    os.kill(*servers(), signal.SIGKILL)
    wait_until(lambda: not is_running(servers()[0]))
    assert finish(engine, job("alone", "sys.exit(2)")) == {"alone": 2}
    assert finish(engine, job("next", "sys.exit(4)")) == {"next": 4}
    assert len(servers()) == 2
    assert engine.ended() == {}
    Path("go").touch()
    ended = {}
    wait_until(lambda: ended.update(engine.ended()) or ended, 20)
    assert ended == {"long": 5}


def test_a_stop_reaches_the_forks_and_leaves_no_server(engine):
    engine.submit([job("long", LONG)])
    wait_until(Path("up").exists)
    (server,) = servers()
    engine.stop()
    assert engine.ended() == {"long": -signal.SIGTERM}
    assert not is_running(server)


def test_a_server_ends_with_its_study_and_the_fork_does_not():
    def study():
        LocalEngine().submit([job("long", LONG.replace("sys.exit(5)", "Path('end').touch()"))])
        time.sleep(60)

    killed = multiprocessing.get_context("fork").Process(target=study)
    killed.start()
    wait_until(Path("up").exists)
    killed.kill()
    killed.join()
    wait_until(lambda: not is_running(servers()[0]), 20)
    Path("go").touch()
    wait_until(Path("end").exists, 20)


def test_a_study_that_is_stopped_while_its_server_starts_leaves_nothing(engine):
    Path("tool.py").write_text(TOOL.replace("def preload():", "def preload():\n    time.sleep(30)"))

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


def test_a_fork_that_the_study_does_not_know_ends_without_having_begun():
    assert forks.adopt_orphans()
    with open("log", "ab") as log:
        server = forks.ForkServer("tool", os.environ, log)
        with pytest.raises(Stopped), server.start(["Path('ran').touch()"], log, {}) as process:
            raise Stopped(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGTERM
    assert not Path("ran").exists()
    server.close()


def test_forks_never_run_code_that_has_changed_since_it_was_imported(engine):
    Path("method.py").write_text("VALUE = 1\n")
    Path("tool.py").write_text(TOOL.replace("import os,", "import method, os,"))
    codes = []
    for value in (1, 1, 22, 22):
        Path("method.py").write_text(f"VALUE = {value}\n")
        if not codes:
            time.sleep(0.02)
        codes += finish(engine, job("value", "sys.exit(method.VALUE)")).values()
    assert codes == [1, 1, 22, 22]


def test_a_module_that_starts_threads_is_not_forked(engine):
    thread = "import threading\nthreading.Thread(target=lambda: time.sleep(60), daemon=True).start()"
    Path("tool.py").write_text(
        TOOL.replace("def preload():", f"def preload():\n    {thread.replace(chr(10), chr(10) + '    ')}")
    )
    itself = "sys.exit(sys.orig_argv[1:3] == ['-m', 'tool'])"
    for name in ("first", "second"):
        assert finish(engine, job(name, itself)) == {name: 1}
    assert len(servers()) == 1


@pytest.mark.slow
def test_a_forked_cell_has_the_bits_of_a_cell_of_its_own(tmp_path, monkeypatch):
    threads = 2
    monkeypatch.syspath_prepend(tmp_path)
    write_study(bn={"threads": threads}, own={"threads": threads, "trainer.callbacks": PAUSES})
    Path("go").touch()
    found = []
    with nothing_left():
        for one in (LocalEngine(), LocalEngine(forks=False)):
            cells = study_cells()
            runner = Runner(Path("study"), one, 1)
            runner.run([*cells.values()])
            assert runner.failed == {}
            tried = [attempts_of(cell)[0] for cell in cells.values()]
            weights = [load_run(x.checkpoints / "last.ckpt")["state_dict"] for x in tried]
            found.append(([rows(attempt) for attempt in tried], weights))
            if one._servers:
                (server,) = one._servers.values()
                process = server.close.peek()[2][1]
                # beside the threads of OpenBLAS, which numpy and scipy have each
                assert len(os.listdir(f"/proc/{process.pid}/task")) in (1, 2 * threads - 1)
            one.stop()
            Path("runs").rename(f"runs{len(found)}")
    assert found[0][0] == found[1][0]
    for forked, own in zip(found[0][1], found[1][1], strict=True):
        assert forked.keys() == own.keys()
        assert all(torch.equal(forked[name], own[name]) for name in forked)
