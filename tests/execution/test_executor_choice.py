"""How many ranks and which executor compute a run that names none, and that the choice changes no result."""

import json

import pytest
import torch
from torch import nn

from fl_lightning import FederatedModule, GraphExecutor, NetworkTask, SequentialExecutor, VectorizedExecutor
from fl_lightning import cores as cores_module
from fl_lightning.cores import cores_of_a_run, usable_cores
from fl_lightning.execution import fork
from fl_lightning.execution.choice import choose_executor
from fl_lightning.experiments.run import number_of_ranks
from fl_lightning.experiments.run.number_of_ranks import cpu_ranks, useful_ranks
from tests.support.command_line import rows, run
from tests.support.helpers import SGD, blobs, fit, small_cnn


def module(cls=FederatedModule, **settings):
    return cls(small_cnn("bn"), SGD, local_steps=5, **settings)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(fork.sys, "platform", "darwin"), (torch.cuda, "is_initialized", lambda: True)],
)
def test_where_processes_would_fail_there_is_one(monkeypatch, owner, name, value):
    monkeypatch.setattr(number_of_ranks, "cores_of_a_run", lambda: 4)
    monkeypatch.setattr(owner, name, value)
    assert cpu_ranks() == 1


@pytest.mark.parametrize(
    ("told", "cores"), [("1", 1), ("3", 3), ("3,2", 3), ("9", 4), ("0", 4), ("all", 4), (None, 4)]
)
def test_omp_num_threads_is_the_number_of_cores_to_use(monkeypatch, tmp_path, told, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    monkeypatch.setattr(cores_module, "_QUOTA", tmp_path / "absent")
    if told is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert cores_of_a_run() == cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 4), ("200000 100000", 2), ("150000 100000", 2), ("9000 100000", 1), ("900000 100000", 4)],
)
def test_a_containers_quota_of_processor_time_counts(monkeypatch, tmp_path, quota, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    monkeypatch.setattr(cores_module, "_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores() == cores


class OnGPU(FederatedModule):
    device = torch.device("cuda", 0)


def test_a_gpu_replays_graphs_of_known_layers():
    assert isinstance(choose_executor(module(OnGPU).client, 10).executor, GraphExecutor)


class OwnLayer(nn.Sequential):
    pass


class OwnLoss(NetworkTask):
    def client_loss(self, batch):
        return super().client_loss(batch)


def hooked():
    model = small_cnn("bn")
    model[0].register_forward_hook(lambda *args: None)
    return model


OWN_CODE = {
    "the custom layer OwnLayer": lambda: OnGPU(OwnLayer(*small_cnn("bn")), SGD, local_steps=5),
    "a custom hook of a layer Conv2d": lambda: OnGPU(hooked(), SGD, local_steps=5),
    "a custom loss": lambda: module(
        lambda model, *settings, **named: OnGPU(OwnLoss(model), *settings, **named)
    ),
    "a custom loss, given": lambda: module(OnGPU, loss=lambda outputs, targets: outputs.mean()),
}


@pytest.mark.parametrize("words", OWN_CODE)
def test_a_gpu_computes_all_clients_at_once_if_code_is_the_users_own(words):
    found = choose_executor(OWN_CODE[words]().client, 10)
    assert found.reason.endswith(f"no CUDA graphs of {words.removesuffix(', given')}")
    assert isinstance(found.executor, VectorizedExecutor)
    assert found.executor.block_size is None
    assert found.executor.where_possible


def test_an_executor_that_is_given_stays():
    given = SequentialExecutor()
    own = module(executor=given)
    fit(own, blobs(4), 1)
    assert own.executor is given
    assert own.executor_choice is None


LONG = ("--model.local_steps", 7)
"""21 local steps of three clients in a round."""


@pytest.mark.parametrize(
    ("cores", "settings", "ranks"),
    [
        (2, LONG, 2),
        (9, LONG, 3),
        (2, ("--model.local_steps", 6), 1),
        (2, (*LONG, "--threads", 2), 1),
        (2, (*LONG, "--trainer.devices", 1), 1),
        (9, ("--model.local_steps", 1, "--trainer.devices", 2), 2),
        (2, ("--model.local_steps", 30, "--model.participation", 1), 1),
        (2, (*LONG, "--model.participation", 1.0), 2),
        (2, ("--model.local_steps", 30, "--model.centralised", "true"), 1),
    ],
)
def test_a_run_has_a_rank_for_each_core_where_that_helps(monkeypatch, cores, settings, ranks):
    monkeypatch.setattr(number_of_ranks, "cores_of_a_run", lambda: cores)
    assert run("--trainer.max_epochs", 1, *settings).trainer.num_devices == ranks
    torch.set_num_threads(1)


@pytest.mark.slow
def test_the_number_of_ranks_is_said_and_changes_no_number(capsys, monkeypatch):
    one = run(*LONG)
    monkeypatch.setattr(number_of_ranks, "cores_of_a_run", lambda: 2)
    several = run(*LONG)
    lines = capsys.readouterr().out.splitlines()
    found = [lines[place + 1] for place, line in enumerate(lines) if line == "Executor"]
    assert found == ["SequentialExecutor  2 ranks, 1 thread each; model.executor sets another"]
    assert rows(one.attempt) == rows(several.attempt)
    assert json.loads(one.attempt.result.read_text())["executor"] == "SequentialExecutor()"


def test_who_sets_up_data_for_ranks_to_come_asks_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("a GPU is asked"))
    assert useful_ranks(FederatedModule(small_cnn(), SGD, local_steps=10), blobs()) == 3
