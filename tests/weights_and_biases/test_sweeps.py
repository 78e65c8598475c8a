"""Sweeps of W&B: their agent's commands run, and a run that a scheduler ends is marked and goes on."""

import os
import signal

import pytest
import yaml

from fl_lightning import FederatedCallback
from fl_lightning.cli.command_line import main
from tests.support.command_line import run
from tests.support.pages import take_examples
from tests.support.sweeps import SWEEPS, command_line, grid
from tests.support.wandb_files import offline_runs, read_run, run_id

SHORT = ["--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "2"]


def agent(name, values, *more):
    """Runs what the agent of a sweep would start, shortened and in this process."""
    words = command_line(name, values)
    assert words[:5] == ["/usr/bin/env", "python", "-m", "fl_lightning", "fit"]
    return main([*words[4:], *SHORT, *more])


@pytest.mark.slow
@pytest.mark.parametrize(
    # test_configs has the settings of all sweeps
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if place else ()) for place, name in enumerate(SWEEPS)],
)
def test_agent_runs_what_the_sweep_says(name, offline, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    take_examples(monkeypatch)
    runs = []
    for values in (grid(name)[0], grid(name)[1]):
        cli = agent(name, values)
        given = {key.rpartition(".")[2]: value for key, value in values.items()}
        assert cli.model.seed == given.pop("seed_everything")
        ((setting, value),) = given.items()
        saved = yaml.safe_load(cli.attempt.config.read_text())
        model = saved["model"]
        places = (model["client_optimizer"], model["model"], *(saved["trainer"]["callbacks"] or ()))
        assert value in [place["init_args"].get(setting) for place in places if place]
        assert cli.attempt.path.parent.name == name.removesuffix(".yaml")
        runs.append(read_run(offline_runs(cli.attempt)[0]))
    assert runs[0].run.run_group == runs[1].run.run_group
    assert SWEEPS[name]["metric"]["name"] in runs[0].summary


class Notice(FederatedCallback):
    """Gets a signal in round 2."""

    def __init__(self, number: int):
        self.number = number

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if cohort.round == 2:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def signalled():
    """A run of four rounds that gets a signal in its second, and the exit status."""
    # where the tests run in the background these are ignored, and a run leaves it at that
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}

    def begin(number, *arguments):
        notice = {"class_path": f"{__name__}.Notice", "init_args": {"number": int(number)}}
        with pytest.raises(SystemExit) as stop:
            run("--trainer.callbacks", notice, "--ckpt_path", "auto", *arguments)
        return stop.value.code

    yield begin
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
def test_run_that_a_scheduler_ends_is_marked_and_goes_on_when_the_agent_starts_it_again(
    offline, signalled, monkeypatch, tmp_path
):
    import wandb

    monkeypatch.setenv("WANDB_RUN_ID", "a1")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    wandb.teardown()
    assert signalled(signal.SIGTERM) == 143
    (path,) = tmp_path.glob("runs/*/*/wandb/offline-run-*")
    found = read_run(path)
    assert (found.preempting, found.exit_code, len(found.history)) == (True, 1, 3)
    wandb.teardown()
    notice = {"class_path": f"{__name__}.Notice", "init_args": {"number": int(signal.SIGTERM)}}
    again = run("--trainer.callbacks", notice, "--ckpt_path", "auto", "--_wandb={'preempted': True}")
    wandb.teardown()
    (path,) = offline_runs(again.attempt)
    found = read_run(path)
    assert (found.preempting, found.exit_code, len(found.history)) == (False, 0, 5)
    assert run_id(path) == "a1"


def test_run_whose_terminal_is_closed_is_not_marked(offline, signalled, tmp_path):
    assert signalled(signal.SIGHUP) == 129
    (path,) = tmp_path.glob("runs/*/*/wandb/offline-run-*")
    found = read_run(path)
    assert (found.preempting, found.exit_code) == (False, 1)
