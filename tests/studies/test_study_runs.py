"""A study on this machine: what is finished stays so, whatever is killed."""

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from fl_lightning.cli import study, study_cell
from fl_lightning.experiments.studies.cells import CellState
from fl_lightning.experiments.studies.engines.local import LocalEngine
from fl_lightning.experiments.studies.running import Runner
from fl_lightning.round.module import FederatedModule
from tests.support.cells import (
    attempts_of,
    is_pausing,
    new_server,
    nothing_left,
    processes_of,
    reference,
    study_cells,
    wait_until,
    write_study,
)
from tests.support.command_line import rows

CELL = "fl_lightning.cli.study_cell"


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(study.__file__).parents[2]))
    new_server(monkeypatch)
    with nothing_left():
        yield


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_where_it_was_and_waits_for_the_cell_that_outlives_it():
    few = [write_study(), "--jobs", "2"]
    cells = study_cells()
    killed = multiprocessing.get_context("fork").Process(target=study.main, args=(few,))
    killed.start()
    wait_until(lambda: is_pausing(cells["pausing"]) and cells["through"].state().phase == "done")
    killed.kill()
    killed.join()
    (orphan,) = processes_of(cells["pausing"])
    finished = attempts_of(cells["through"])[0].result.stat()
    again = multiprocessing.get_context("fork").Process(target=study.main, args=(few,))
    again.start()
    again.join(5)
    assert again.is_alive()
    assert processes_of(cells["pausing"]) == [orphan]
    Path("go").touch()
    again.join()
    assert again.exitcode == 0
    assert attempts_of(cells["through"])[0].result.stat() == finished
    for cell in cells.values():
        (attempt,) = attempts_of(cell)
        assert rows(attempt) == reference(cell)


@pytest.mark.slow
def test_a_cell_that_is_killed_is_reported_and_the_same_command_finishes_it(capfd):
    few = [write_study(), "--jobs", "2"]
    cells = study_cells()
    running = multiprocessing.get_context("fork").Process(target=study.main, args=(few,))
    running.start()
    wait_until(lambda: is_pausing(cells["pausing"]))
    os.kill(*processes_of(cells["pausing"]), signal.SIGKILL)
    running.join()
    assert running.exitcode == 2
    told = capfd.readouterr()
    assert (
        "failed: cell=pausing seed=0: killed by signal 9; its output: runs/studies/few-quick/logs/"
        in told.out
    )
    assert told.err == ("error: study: 1 cell failed; fix the errors above and run the same command again\n")
    assert [cells[name].state().phase for name in ("through", "pausing")] == ["done", "stopped"]
    Path("go").touch()
    study.main(few)
    for cell in cells.values():
        (attempt,) = attempts_of(cell)
        assert rows(attempt) == reference(cell)
    log = Runner(Path("runs/studies/few-quick"), LocalEngine(CELL), 1).log(cells["pausing"]).read_text()
    assert f"--ckpt_path={attempts_of(cells['pausing'])[0].checkpoints}/last.ckpt" in log


class Recorder(LocalEngine):
    """Keeps the command lines of cells, and runs them in this process."""

    def __init__(self):
        super().__init__(CELL)
        self.jobs, self.run = [], []

    def submit(self, jobs):
        self.jobs += jobs
        for job in jobs:
            study_cell.main(job.arguments)
            self.run.append(job.name)

    def ended(self):
        names, self.run = self.run, []
        return dict.fromkeys(names, 0)


def strike(monkeypatch, number):
    """Let a run vanish in the middle of a round, as far as its folder can tell."""
    start = FederatedModule.start_round

    class Killed(BaseException):
        pass

    def struck(self):
        if self.round == number:
            raise Killed
        return start(self)

    monkeypatch.setattr(FederatedModule, "start_round", struck)
    monkeypatch.setattr(
        "fl_lightning.experiments.run_directory.start.Start.discard_untrained", lambda self: None
    )
    return pytest.raises(Killed)


@pytest.mark.slow
def test_a_cell_that_goes_on_from_another_one_prefers_its_own_checkpoint_once_it_has_one(monkeypatch, capsys):
    fixbn = {"class_path": "FixBN", "init_args": {"freeze_round": 3}}
    write_study(bn={}, fixbn={"trainer.callbacks": [fixbn]})
    cells, engine = study_cells(), Recorder()
    Runner(Path("study"), engine, 1).run([*cells.values()])
    (parent,), (first,) = attempts_of(cells["bn"]), attempts_of(cells["fixbn"])
    assert f"--ckpt_path={(parent.checkpoints / 'round_3.ckpt').resolve()}" in capsys.readouterr().out
    shutil.rmtree(first.path)
    command = engine.jobs[1].arguments
    with monkeypatch.context() as patch, strike(patch, 6):
        study_cell.main(command)
    assert "round_3.ckpt" in capsys.readouterr().out
    study_cell.main(command)
    assert f"--ckpt_path={first.checkpoints}/last.ckpt" in capsys.readouterr().out
    assert attempts_of(cells["fixbn"]) == [first]
    assert [row.get("fixbn/freeze_round") for row in rows(first)] == [None] * 4 + [3.0] * 3
    assert rows(first)[1:] == reference(cells["fixbn"])[1:]
    finished = first.result.stat()
    study_cell.main(command)
    assert first.result.stat() == finished


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "now"),
    [
        ("fl_lightning.experiments.studies.cells.provenance", lambda config: {"torch": "another"}),
        (
            "fl_lightning.datamodules.in_memory.InMemoryDataModule.fingerprint",
            lambda data: {"training": "another"},
        ),
    ],
)
def test_a_cell_does_not_go_on_from_other_code_or_data(target, now, monkeypatch):
    write_study(through={})
    (cell,), engine = study_cells().values(), Recorder()
    with monkeypatch.context() as patch, strike(patch, 5):
        Runner(Path("study"), engine, 1).run([cell])
    (old,) = attempts_of(cell)
    kept = old.metrics.read_bytes()
    monkeypatch.setattr(target, now)
    study_cell.main(engine.jobs[0].arguments)
    assert [row["round"] for row in rows(attempts_of(cell)[0])] == [*range(7)]
    assert attempts_of(cell)[1:] == [old]
    assert old.metrics.read_bytes() == kept


def test_a_study_that_looks_at_a_cell_does_not_keep_it_from_training():
    write_study(through={})
    (cell,) = study_cells().values()
    cell.directory.new_attempt()
    attempt = attempts_of(cell)[0]
    held, let_go = multiprocessing.Event(), multiprocessing.Event()

    def look():
        with attempt.lock():
            held.set()
            let_go.wait(0.05)

    looking = multiprocessing.get_context("fork").Process(target=look)
    looking.start()
    held.wait()
    with attempt.lock():
        assert attempt.is_locked()
    assert not attempt.is_locked()
    looking.join()


@pytest.mark.parametrize(("jobs", "share"), [(1, 1), (3, 1), (6, 0.5), (7, 1 / 3)])
def test_more_jobs_than_gpus_share_them(jobs, share):
    write_study(through={"trainer.accelerator": "auto"}, on_cpu={})
    cells, engine = study_cells(), Recorder()
    engine.gpus = 3
    found = [Runner(Path("study"), engine, jobs)._job(cells[name]).gpus for name in ("through", "on_cpu")]
    assert found == [share, 0]
    engine.gpus = 0
    assert Runner(Path("study"), engine, jobs)._job(cells["through"]).gpus == 0


def test_a_failed_cell_is_told_by_what_its_last_try_said(tmp_path):
    write_study(through={})
    (cell,) = study_cells().values()
    runner = Runner(tmp_path, LocalEngine(CELL), 1)
    log = runner.log(cell)
    log.parent.mkdir()
    log.write_text("python -m fl_lightning fit\nerror: data: gone\n")
    assert runner._error(cell, 2, cell.state()) == f"data: gone; its output: {log}"
    with log.open("a") as again:
        again.write("python -m fl_lightning fit\n")
    assert runner._error(cell, -9, cell.state()) == f"killed by signal 9; its output: {log}"
    older = CellState("stale", why="torch 1, now 2")  # what it left before, not what ended it now
    assert runner._error(cell, -9, older) == f"killed by signal 9; its output: {log}"
