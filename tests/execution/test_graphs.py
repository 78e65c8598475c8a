"""Replayed local steps equal computed ones, and what cannot be replayed is computed, in one line that names the reason."""

import logging
import random
import re
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import zip_longest

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fl_lightning import (
    ClientFailures,
    FederatedCallback,
    FederatedModule,
    NetworkTask,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.callbacks import FedTAN, FixBN, MaintainedMomentum
from fl_lightning.client_data.batches import BatchStack
from fl_lightning.execution import graphs
from fl_lightning.methods.freezing import Freezing
from tests.support.contract import ADAM, EVERY_METHOD, TABLE, method_of, run
from tests.support.helpers import SGD, SaveRounds, blobs, distance, fit, small_cnn
from tests.support.outcomes import MOMENTUM, assert_same, outcome, states
from tests.support.recorded_calls import OfGPU, RecordedCalls, RecordingExecutor


def eager():
    return SequentialExecutor(compile=False)


@pytest.fixture
def must_replay(monkeypatch):
    """Fail if steps are computed in place of a replay, also in other processes."""

    def fail(where_possible):
        raise AssertionError("steps are computed, and not replayed")

    monkeypatch.setattr(graphs, "VectorizedExecutor", fail)


@EVERY_METHOD
def test_replayed_steps_equal_computed_ones_for_every_method(row, must_replay):
    replayed = run(row, executor=RecordingExecutor())
    assert distance(run(row, executor=eager()).state_dict(), replayed.state_dict()) == 0


class Spare(nn.Sequential):
    """Has a layer that no forward pass uses."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.spare = nn.Linear(4, 3)

    def forward(self, x):
        for layer in list(self)[:-1]:
            x = layer(x)
        return x


class Sometimes(Spare):
    """Uses a layer in small batches only, which are the last ones of some clients."""

    def forward(self, x):
        scores = super().forward(x)
        return scores + self.spare(x[:, 0, 0, :4]) if len(x) < 8 else scores


def with_small_batches(sizes=(40, 20, 36)):
    data = blobs(4, sizes)
    for client in data.clients:
        client.train_dataloader = lambda client=client: DataLoader(client.dataset, 8, shuffle=True)
    return data


BN = partial(small_cnn, "bn")
DECAYING = partial(torch.optim.SGD, lr=0.05, weight_decay=0.1)
SETTINGS = {
    "dropout": {"model": lambda: BN(dropout=0.5)},
    "uneven epochs": {"data": lambda: blobs(4, (16, 32, 24, 16)), "local_steps": None, "local_epochs": 1},
    "participation": {"data": lambda: blobs(4), "participation": 3},
    "other cohorts": {"data": lambda: blobs(5), "participation": 0.5, "callbacks": [lambda: FixBN(freeze_round=0.5)]},
    "one client": {"data": lambda: blobs(1)},
    "failures": {"data": lambda: blobs(5), "failures": ClientFailures(dropout=0.4, stragglers=0.5), "local_steps": 4, "rounds": 5},
    "small batches in small cohorts": {"data": lambda: with_small_batches((40, 20, 36, 36)), "failures": ClientFailures(schedule={0: [[1, 2]], 2: [[2, 2]]}), "local_steps": 2, "rounds": 5},
    "skipped rounds": {"failures": ClientFailures(schedule={1: [[2, 3]], 2: [[3, 3]]}), "min_clients": 2, "rounds": 4, "callbacks": [lambda: FixBN(freeze_round=3)]},
    "unused": {"model": lambda: Spare(*BN())},
    "used in some steps": {"model": lambda: Sometimes(*BN()), "data": with_small_batches, "local_steps": 5, "client_optimizer": DECAYING},
    "adam": {"client_optimizer": ADAM, "local_steps": 3},
    "adam of each client": {"client_optimizer": ADAM, "callbacks": [MaintainedMomentum, lambda: FixBN(freeze_round=1)]},
    "adam with an unused layer": {"client_optimizer": ADAM, "model": lambda: Spare(*BN())},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_replayed_steps_equal_computed_ones(name, must_replay, capsys):
    settings = dict(SETTINGS[name])
    model, data = settings.pop("model", small_cnn), settings.pop("data", blobs)
    callbacks = settings.pop("callbacks", [])

    def trained(executor):
        return outcome(model(), data(), executor, [make() for make in callbacks], **settings)

    assert distance(trained(eager()), trained(RecordingExecutor())) == 0
    assert ("round 3: 1 of 3 clients can be aggregated" in capsys.readouterr().out) == (
        name == "skipped rounds"
    )


class Places(FederatedCallback):
    """Where the rows of each round are in memory."""

    def __init__(self):
        self.clients, self.places = [], set()

    def on_round_start(self, trainer, pl_module, cohort):
        self.clients.append(len(cohort))
        for kind in ("params", "grads", "buffers"):
            blocks = getattr(cohort, kind).blocks.items()
            self.places |= {((kind, name), block.data_ptr()) for name, block in blocks}


@pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor, RecordingExecutor])
def test_cohorts_of_other_sizes_are_in_the_same_memory_and_use_the_same_graphs(executor):
    places, used = Places(), executor()
    away = ClientFailures(schedule={0: [[2, 2], [4, 5]], 1: [[4, 4]], 2: [[3, 3]], 3: [[5, 6]]})
    outcome(BN(), blobs(4), used, [places], rounds=7, failures=away)
    assert places.clients == [4, 3, 3, 2, 2, 3, 4]
    assert len(places.places) == len(dict(places.places))
    if executor is RecordingExecutor:
        assert used.recorded == 4


def changes_modes(row):
    return isinstance(method_of(row), Freezing | FedTAN)


CHANGES_MODES = [row for row in TABLE if changes_modes(row)]


@pytest.mark.parametrize("row", CHANGES_MODES, ids=lambda row: row.name)
def test_replayed_steps_equal_computed_ones_on_two_ranks(row, must_replay):
    computed, replayed = (
        states(
            ranks,
            model=BN(dropout=0.5),
            rounds=4,
            executor=executor,
            callbacks=[method_of(row)],
            **row.module,
        )
        for ranks, executor in ((1, eager()), (2, RecordingExecutor()))
    )
    assert_same(computed, replayed)


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_resumed_run_records_anew_and_equals_the_whole_run(last, tmp_path, must_replay):
    """The checkpoints are from rounds before T*, at T* and after T*."""

    def trained(rounds, executor, **settings):
        module = FederatedModule(BN(dropout=0.5), ADAM, local_steps=3, executor=executor)
        methods = [FixBN(freeze_round=2), MaintainedMomentum("local"), SaveRounds(tmp_path)]
        fit(module, blobs(), rounds, methods, **settings)
        return module.state_dict()

    whole = trained(5, eager())
    trained(last, RecordingExecutor())
    assert distance(whole, trained(5, RecordingExecutor(), ckpt_path=tmp_path / f"{last}.ckpt")) == 0


def test_later_steps_run_no_python_code_of_the_model():
    seen = []

    class Watched(nn.Sequential):
        def forward(self, x):
            seen.extend([None] * self.training)
            return super().forward(x)

    settings = {"rounds": 6, "local_steps": 4, "check_first_steps": False}
    outcome(Watched(*small_cnn()), blobs(3), RecordingExecutor(), **settings)
    # for each of three clients: the warm-up, the recording, and the comparison of two steps
    assert len(seen) == 3 * 4


def rates(cohort, row):
    return [group["lr"] for group in cohort.optimizer.param_groups]


def momenta(cohort, row):
    return [group["momentum"] for group in cohort.optimizer.param_groups]


def key(cohort, row):
    return [cohort.buffers["6.key"][row]]


def counts(cohort, row):
    return [state["step"] for state in cohort.optimizer.state.values()]


def batches_seen(cohort, row):
    return [block[row] for name, block in cohort.buffers.blocks.items() if name.startswith("counter")]


class Bakes(RecordingExecutor):
    """Puts a value back to what it was when the graph was recorded, before each replay."""

    def __init__(self, values, setting=None):
        super().__init__()
        self.values, self.setting, self.then = values, setting, {}

    def _record(self, module, cohort, client):
        self.then[client.key] = deepcopy(self.values(cohort, client.row))
        return super()._record(module, cohort, client)

    def _replay(self, module, cohort, client, graph):
        then = self.then[client.key]
        if self.setting:
            for group, value in zip(cohort.optimizer.param_groups, then, strict=True):
                group[self.setting] = value
        else:
            # an optimizer without state has taken 0 steps
            for place, value in zip_longest(
                self.values(cohort, client.row), then, fillvalue=torch.tensor(0.0)
            ):
                place.copy_(value)
        super()._replay(module, cohort, client, graph)


class Changing(FederatedCallback):
    """Changes the settings of the client optimizer in each local step."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        for group in cohort.optimizer.param_groups:
            group["lr"] /= 2
            if "momentum" in group:
                group["momentum"] *= 0.8


BAKED = {
    "learning rate": (rates, "lr", MOMENTUM),
    "momentum": (momenta, "momentum", MOMENTUM),
    "dropout key": (key, None, MOMENTUM),
    "steps of the optimizer": (counts, None, ADAM),
    "batches that BN has seen": (batches_seen, None, MOMENTUM),
}


@pytest.mark.parametrize("name", BAKED)
def test_mutation_a_value_that_is_part_of_a_graph_changes_the_run_or_is_found(name, caplog):
    values, setting, optimizer = BAKED[name]

    def trained(executor):
        settings = {"rounds": 3, "local_steps": 4, "client_optimizer": optimizer}
        return outcome(BN(dropout=0.5), blobs(), executor, [Changing()], **settings)

    reference = trained(eager())
    assert distance(reference, trained(RecordingExecutor())) == 0
    assert "no CUDA graphs" not in caplog.text
    assert distance(reference, trained(Bakes(values, setting))) > 0 or "no CUDA graphs" in caplog.text


class Changes(FederatedCallback):
    """Changes something that a forward pass reads, in a round or in a local step."""

    def __init__(self, change, in_steps=False):
        self.change, self.in_steps = change, in_steps

    def on_round_start(self, trainer, pl_module, cohort):
        if cohort.round == 3 and not self.in_steps:
            self.change(pl_module)

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        if cohort.round == 3 and step == 0 and self.in_steps:
            self.change(pl_module)


def bn(module):
    return next(layer for layer in module.model.modules() if isinstance(layer, nn.BatchNorm2d))


def double(layer, inputs, output):
    return 2 * output


CHANGES = {
    "momentum": lambda module: setattr(bn(module), "momentum", 0.5),
    "padding": lambda module: setattr(module.model[0], "padding", (1, 1)),
    "layer": lambda module: module.model.__setitem__(2, nn.Sigmoid()),
    "hook": lambda module: bn(module).register_forward_hook(double),
    "loss setting": lambda module: setattr(module.loss, "label_smoothing", 0.5),
    "loss": lambda module: setattr(module, "loss", nn.CrossEntropyLoss(label_smoothing=0.5)),
    "loss weights": lambda module: setattr(module.loss, "weight", torch.tensor([3.0, 1.0, 1.0]).double()),
}


def changed(executor, name, in_steps=False):
    loss = nn.CrossEntropyLoss(weight=torch.ones(3).double())
    # adaptive pooling: another padding changes the size of the features
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).double()  # fmt: skip
    return outcome(
        model, blobs(), executor, [Changes(CHANGES[name], in_steps)], rounds=4, local_steps=3, loss=loss
    )


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_pass_reads_and_a_method_changes_is_recorded_anew(name, in_steps):
    torch.manual_seed(0)
    reference = changed(eager(), name, in_steps)
    torch.manual_seed(0)
    assert distance(reference, changed(RecordingExecutor(), name, in_steps)) == 0


@pytest.mark.parametrize("name", CHANGES)
def test_mutation_without_conditions_a_change_is_missed(name, monkeypatch):
    monkeypatch.setattr(RecordingExecutor, "_conditions", lambda *args: None)
    torch.manual_seed(0)
    reference = changed(eager(), name)
    torch.manual_seed(0)
    assert distance(reference, changed(RecordingExecutor(), name)) > 1e-3


class Shifts(nn.Sequential):
    """Changes its input in place."""

    def forward(self, x):
        return super().forward(x.sub_(1.0))


def test_inputs_that_change_in_place_are_filled_again_in_every_step(caplog):
    found = [
        outcome(Shifts(*small_cnn()), blobs(), executor, rounds=3, check_first_steps=False)
        for executor in (eager(), RecordingExecutor())
    ]
    assert distance(*found) == 0
    assert "no CUDA graphs" not in caplog.text


class Draws(nn.Sequential):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


def test_random_numbers_of_the_device_are_those_of_the_sequential_executor():
    found = [
        outcome(Draws(*small_cnn("gn")), blobs(), executor, rounds=3)
        for executor in (eager(), RecordingExecutor())
    ]
    assert distance(*found) == 0


class Keeps(nn.Sequential):
    """Keeps tensors: an output, which a replay makes as well, and tensors that no pass changes."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.shifts = [torch.zeros(3), torch.ones(3)]

    def forward(self, x):
        self.scores = super().forward(x)
        return self.scores


def test_tensors_that_layers_keep_do_not_make_graphs_new(must_replay):
    recorded = RecordingExecutor()
    settings = {"rounds": 4, "local_steps": 3, "check_first_steps": False}
    found = [outcome(Keeps(*BN()), blobs(), executor, **settings) for executor in (eager(), recorded)]
    assert distance(*found) == 0
    assert recorded.recorded == 3


@pytest.mark.parametrize("value", [[[0.1], [0.2]], [0, (1, [2.0])], ([3],)])
def test_a_setting_within_a_list_of_lists_is_seen(value):
    layer = nn.Module()
    layer.value = deepcopy(value)
    before = [*graphs._settings(layer)]
    layer.value = deepcopy(value)
    assert [*graphs._settings(layer)] == before
    inner = layer.value
    while isinstance(inner[-1], list | tuple):
        inner = inner[-1]
    inner[-1] += 1
    assert [*graphs._settings(layer)] != before


def test_to_look_at_settings_reads_no_tensor():
    layer = Keeps(*BN())
    with OfGPU():
        assert [*graphs._settings(layer)]
        with pytest.raises(RuntimeError):
            str(layer.shifts)


class Counts(nn.Sequential):
    """Computes something else in every second forward pass."""

    passes = 0

    def forward(self, x):
        type(self).passes += 1
        return super().forward(x) * (1 + type(self).passes % 2)


class Writes(nn.Sequential):
    """Keeps a value between forward passes."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self._steps, self.means, self.longer = 0, [], ()


class CountsPrivately(Writes):
    def forward(self, x):
        self._steps += 1
        return super().forward(x) * (2.0 if self._steps > 100 else 1.0)


class Appends(Writes):
    def forward(self, x):
        self.means.append(x.mean())
        return super().forward(x)


class Lengthens(Writes):
    def forward(self, x):
        self.longer = torch.stack([*self.longer, x.mean()])
        return super().forward(x)


class CountsInTheLoss(NetworkTask):
    steps = 0

    def client_loss(self, batch):
        self.steps += 1
        return super().client_loss(batch) * (2.0 if self.steps > 100 else 1.0)


def model_of(change):
    """A class of models that change their inputs."""

    class Model(nn.Sequential):
        def forward(self, x):
            return super().forward(change(x))

    return Model


def printed(x):
    print(x)
    return x


NOT_PERMITTED = "Model: .*: operation not permitted when stream is capturing"
WRITES = "local steps: the forward pass writes the attribute {}"
DIFFER = "of a replayed local step of {} differ"
REFUSED = {
    "item": (model_of(lambda x: x * (1.0 if x.mean().item() > -100 else 2.0)), NOT_PERMITTED),
    "if": (model_of(lambda x: x if x.mean() > -100 else 2 * x), NOT_PERMITTED),
    "tolist": (model_of(lambda x: x * max(x.flatten().tolist())), NOT_PERMITTED),
    "copy to the CPU": (model_of(lambda x: x + x.mean().cpu().to(x.device)), NOT_PERMITTED),
    "numpy": (model_of(lambda x: x * float(np.clip(x.numpy().mean(), 1, 1))), NOT_PERMITTED),
    "print": (model_of(printed), NOT_PERMITTED),
    "text": (model_of(lambda x: x * len(f"{x.mean()}")), NOT_PERMITTED),
    "mask": (model_of(lambda x: x[x.flatten(1).sum(1) > -1e9]), NOT_PERMITTED),
    "nonzero": (model_of(lambda x: x[(x.flatten(1).sum(1) > -1e9).nonzero()[:, 0]]), NOT_PERMITTED),
    "masked select": (model_of(lambda x: x + x.masked_select(x > 0).mean()), NOT_PERMITTED),
    "unique": (model_of(lambda x: x + len(x.detach().unique())), NOT_PERMITTED),
    "repeats": (model_of(lambda x: x.repeat_interleave((x[:, 0, 0, 0] > -1e9).long(), 0)), NOT_PERMITTED),
    "a copy from the CPU": (model_of(lambda x: x * torch.tensor([1.0, 2.0]).view(2, 1, 1).to(x)), NOT_PERMITTED),
    "a tensor of the CPU": (model_of(lambda x: x + torch.zeros(6)), "Model: .*: Expected all tensors to be on the same device"),
    "a random number of the CPU": (model_of(lambda x: x * (1 + torch.rand(1)).to(x)), NOT_PERMITTED),
    "a random number of Python": (model_of(lambda x: x * (1 + random.random())), DIFFER.format("Model")),
    "a random number of NumPy": (model_of(lambda x: x * (1 + np.random.random())), DIFFER.format("Model")),
    "a cumulative average": (lambda *layers: nn.Sequential(nn.BatchNorm2d(2, momentum=None), *layers), "Sequential: .*: operation not permitted"),
    "a count": (Counts, DIFFER.format("Counts")),
    "a private count": (CountsPrivately, WRITES.format("'_steps' of CountsPrivately")),
    "a list that grows": (Appends, WRITES.format("'means' of Appends")),
    "a tensor that grows": (Lengthens, WRITES.format("'longer' of Lengthens")),
    "a count in the loss": (CountsInTheLoss, WRITES.format("'steps' of CountsInTheLoss")),
}  # fmt: skip


class IgnoresNames(NetworkTask):
    def client_loss(self, batch):
        return super().client_loss(batch[:2])


def test_batches_with_other_parts_than_tensors_are_computed(caplog, monkeypatch):
    data = blobs()
    drawn = data.cohort_batch
    named = lambda *args: BatchStack(batches=[(*batch, "name") for batch in drawn(*args).batches()])
    monkeypatch.setattr(data, "cohort_batch", named)
    module = FederatedModule(
        IgnoresNames(small_cnn()), SGD, local_steps=2, executor=RecordingExecutor(), check_first_steps=False
    )
    fit(module, data, 2)
    assert "local steps: the clients' batches have a str beside tensors" in caplog.text


def refused(kind, executor):
    layers, settings = small_cnn("gn"), {"local_steps": 2, "check_first_steps": False, "executor": executor}
    if kind is CountsInTheLoss:
        return FederatedModule(kind(layers), MOMENTUM, **settings)
    return FederatedModule(kind(*layers), MOMENTUM, **settings)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_computed_and_named_in_one_line(name, caplog):
    kind, words = REFUSED[name]
    Counts.passes = 0

    def trained(executor):
        module = refused(kind, executor)
        fit(module, blobs(), 3)
        return module.state_dict()

    with caplog.at_level(logging.WARNING, "fl_lightning"):
        found = trained(RecordingExecutor())
    lines = [x.getMessage() for x in caplog.records if "no CUDA graphs" in x.getMessage()]
    assert len(lines) == 1
    assert re.search(words, lines[0]), lines
    if "differ" not in words:  # found in a later step
        assert distance(found, trained(VectorizedExecutor(where_possible=True))) == 0


def test_a_graph_that_computes_something_else_is_found(monkeypatch, caplog):
    record = RecordedCalls.record
    monkeypatch.setattr(RecordedCalls, "record", lambda *args: record(*args) and (lambda: None))
    reference = outcome(small_cnn(), blobs(), VectorizedExecutor())
    found = outcome(small_cnn(), blobs(), RecordingExecutor())
    assert distance(reference, found) == 0
    assert "of a replayed local step of Sequential differ" in caplog.text


def test_without_memory_for_graphs_the_vectorized_executor_computes_the_run(monkeypatch, caplog):
    record = RecordedCalls.record

    def full(self, passes, lane):
        if self.recorded == 2:  # before any client of the step has changed
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand advice")
        return record(self, passes, lane)

    monkeypatch.setattr(RecordedCalls, "record", full)
    reference = outcome(small_cnn(), blobs(), VectorizedExecutor())
    assert distance(reference, outcome(small_cnn(), blobs(), RecordingExecutor())) == 0
    assert caplog.text.count("local steps: CUDA out of memory. Tried to allocate 2 GiB\n") == 1


def test_clients_have_passes_of_their_own_unless_another_executor_computes_the_run():
    executor = RecordingExecutor()
    assert executor.clients_together(3) is None
    executor._instead = VectorizedExecutor(block_size=2)
    assert executor.clients_together(3) == 2


def test_mutation_a_failure_after_a_client_has_stepped_changes_the_run(monkeypatch):
    monkeypatch.setattr(graphs, "_unchanged", lambda cohort, client: nullcontext())
    monkeypatch.setattr(RecordedCalls, "record", lambda *args: lambda: None)
    reference = outcome(small_cnn(), blobs(), VectorizedExecutor(), check_first_steps=False)
    found = outcome(small_cnn(), blobs(), RecordingExecutor(), check_first_steps=False)
    assert distance(reference, found) > 1e-6
