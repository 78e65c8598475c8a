"""Which executor computes a run that names none, and that the choice changes no result."""

import json

import pytest
import torch
from command_line import run
from helpers import SGD, States, blobs, fit, small_cnn

from callbacks import FixBN
from fl_lightning import FederatedModule, ProcessExecutor, SequentialExecutor, VectorizedExecutor
from fl_lightning.executors import choice as executor_choice
from fl_lightning.executors import processes
from fl_lightning.executors.choice import choose_executor
from fl_lightning.executors.processes import cores_of_a_run, usable_cores


def module(cls=FederatedModule, **settings):
    return cls(small_cnn("bn"), SGD, local_steps=5, **settings)


def on_cores(monkeypatch, count):
    monkeypatch.setattr(executor_choice, "cores_of_a_run", lambda: count)


@pytest.mark.parametrize(
    ("cores", "clients", "workers"),
    [
        (1, 10, None),
        (2, 1, None),
        (2, 2, 2),
        (2, 3, 2),
        (2, 5, 2),
        (2, 7, 2),
        (2, 10, 2),
        (16, 10, 10),
        (16, 20, 16),
        (16, 1, None),
    ],
)
def test_several_clients_on_several_cores_get_a_process_on_each(monkeypatch, cores, clients, workers):
    on_cores(monkeypatch, cores)
    executor = choose_executor(module(), clients, 20).executor
    if workers is None:
        assert type(executor) is SequentialExecutor
    else:
        assert type(executor) is ProcessExecutor
        assert executor.num_workers == workers


class OwnLoss(FederatedModule):
    def client_loss(self, batch):
        return super().client_loss(batch)


def test_what_a_worker_could_miss_is_computed_in_this_process(monkeypatch):
    on_cores(monkeypatch, 2)
    choice = choose_executor(module(OwnLoss), 10, 20)
    assert type(choice.executor) is SequentialExecutor
    assert "OwnLoss is your own" in choice.reason


class OwnLayer(torch.nn.Flatten):
    pass


class OwnCriterion(torch.nn.CrossEntropyLoss):
    pass


def own_loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"loss": own_loss}, "own_loss"),
        ({"loss": OwnCriterion()}, "OwnCriterion"),
        ({"loss": torch.nn.functional.cross_entropy}, None),
        ({"loss": torch.nn.CrossEntropyLoss(label_smoothing=0.1)}, None),
        ({"model": torch.nn.Sequential(OwnLayer(), torch.nn.Linear(72, 3))}, "OwnLayer"),
        ({"model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 3))}, None),
    ],
)
def test_code_of_ones_own_is_computed_in_one_process_unless_processes_are_asked_for(
    monkeypatch, settings, name
):
    on_cores(monkeypatch, 2)
    own = FederatedModule(**{"model": small_cnn("bn"), "client_optimizer": SGD, "local_steps": 1, **settings})
    choice = choose_executor(own, 10, 20)
    assert (type(choice.executor) is SequentialExecutor) == (name is not None)
    assert name is None or f"{name} is your own" in choice.reason
    own.client_loss = lambda batch: None
    assert type(choose_executor(own, 10, 20).executor) is SequentialExecutor


def test_callbacks_of_ones_own_are_too_and_those_of_the_project_are_not(monkeypatch):
    on_cores(monkeypatch, 2)
    for callbacks, chosen in (([States()], SequentialExecutor), ([FixBN(2)], ProcessExecutor)):
        own = module()
        fit(own, blobs(4), 1, callbacks)
        assert type(own.executor) is chosen


@pytest.mark.parametrize(("owner", "name", "value", "reason"), [
    (processes.sys, "platform", "darwin", "copied on darwin"),
    (torch.cuda, "is_available", lambda: True, "copied where it sees a GPU"),
    (executor_choice, "shared_memory_left", lambda: 1000.0, "shared memory"),
])  # fmt: skip
def test_where_processes_would_fail_there_are_none(monkeypatch, owner, name, value, reason):
    on_cores(monkeypatch, 2)
    monkeypatch.setattr(owner, name, value)
    choice = choose_executor(module(), 10, 20)
    assert type(choice.executor) is SequentialExecutor
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("told", "cores"), [("1", 1), ("3", 3), ("3,2", 3), ("9", 4), ("0", 4), ("all", 4), (None, 4)]
)
def test_omp_num_threads_is_the_number_of_cores_to_use(monkeypatch, tmp_path, told, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    monkeypatch.setattr("fl_lightning.executors.processes._QUOTA", tmp_path / "absent")
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
    monkeypatch.setattr("fl_lightning.executors.processes._QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores() == cores


class OnGPU(FederatedModule):
    device = torch.device("cuda", 0)


def test_a_gpu_computes_all_clients_at_once():
    executor = choose_executor(module(OnGPU), 10, 20).executor
    assert isinstance(executor, VectorizedExecutor)
    assert executor.block_size is None
    assert executor.where_possible


def trained(model, rounds=3):
    fit(model, blobs(4), rounds)
    return model.state_dict()


def test_the_choice_changes_no_bit_and_is_made_anew_in_each_fit(monkeypatch):
    reference = trained(module(executor=SequentialExecutor()))
    on_cores(monkeypatch, 2)
    chosen = module()
    found = trained(chosen)
    assert type(chosen.executor) is ProcessExecutor
    assert chosen.executor_choice.reason == "4 clients on 2 cores"
    assert all(torch.equal(reference[name], found[name]) for name in reference)
    on_cores(monkeypatch, 1)
    trained(chosen, 1)
    assert type(chosen.executor) is SequentialExecutor


def test_an_executor_that_is_given_stays(monkeypatch):
    on_cores(monkeypatch, 2)
    given = SequentialExecutor()
    own = module(executor=given)
    trained(own, 1)
    assert own.executor is given
    assert own.executor_choice is None


def test_a_round_that_is_shorter_than_the_start_of_processes_has_none(monkeypatch):
    on_cores(monkeypatch, 2)
    assert type(choose_executor(module(), 10, 20).executor) is ProcessExecutor
    choice = choose_executor(module(), 10, 19)
    assert type(choice.executor) is SequentialExecutor
    assert choice.reason == "19 local steps a round"


def test_a_centralised_run_has_one_client(monkeypatch):
    on_cores(monkeypatch, 2)
    own = module(centralised=True)
    trained(own, 1)
    assert type(own.executor) is SequentialExecutor


def test_the_command_line_says_what_it_chose(capsys):
    cli = run()
    lines = capsys.readouterr().out.splitlines()
    found = lines[lines.index("Executor") + 1]
    assert found == "SequentialExecutor  one core; model.executor sets another"
    assert json.loads(cli.attempt.result.read_text())["executor"] == "SequentialExecutor()"


def test_processes_is_what_asks_for_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_SHARED_MEMORY", tmp_path / "absent")
    assert processes.shared_memory_left() == float("inf")
    monkeypatch.setattr(processes, "_SHARED_MEMORY", tmp_path)
    assert 0 < processes.shared_memory_left() < float("inf")
