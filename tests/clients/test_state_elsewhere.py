"""Teachers, counters, generators and lists of a module: right for each client, or refused by name."""

import re
import warnings
import weakref
from collections import defaultdict
from copy import deepcopy
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedDataModule,
    FederatedModule,
    Run,
    callbacks,
)
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.testing import ClientStates
from tests.support.lightning_sites import KeepsLosses, Lit, Site, federated, sites
from tests.support.plain_lightning import (
    Number,
    Small,
    check_equals_lightning,
    check_tensors,
    equal_or_refused,
    lightning_client,
    new,
    on_ranks,
    squares,
    tensors,
    trained,
)

pytestmark = pytest.mark.first_steps


class HiddenTeacher(Small):
    """A mean teacher that the list hides from Lightning."""

    burn_in = 0

    def __init__(self):
        super().__init__()
        self.teachers = self.hidden(deepcopy(self.net).requires_grad_(False))

    def hidden(self, net):
        return [net]

    @property
    def teacher(self):
        return self.teachers[0]

    def penalty(self, batch):
        return mse_loss(self.net(batch[0]), self.teacher(batch[0]))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.current_epoch >= self.burn_in:
            self.move()

    def move(self):
        with torch.no_grad():
            for mean, value in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mean.mul_(0.5).add_(value, alpha=0.5)


class TeacherInDict(HiddenTeacher):
    def hidden(self, net):
        return {0: net}


class TeacherInHiddenAttribute(HiddenTeacher):
    def __init__(self):
        super().__init__()
        vars(self)["_teacher"] = self.teachers.pop()

    @property
    def teacher(self):
        return self._teacher


class HiddenTeacherByData(HiddenTeacher):
    def move(self):
        for mean, value in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mean.data = 0.5 * mean.data + 0.5 * value.data


class RegisteredTeacher(HiddenTeacher):
    def __init__(self):
        super().__init__()
        self.mean_net = self.teachers.pop()

    @property
    def teacher(self):
        return self.mean_net


class TeacherByData(RegisteredTeacher):
    def move(self):
        for mean, value in zip(self.mean_net.parameters(), self.net.parameters(), strict=True):
            mean.data.mul_(0.5).add_(0.5 * value.data)


class TeacherByNewData(RegisteredTeacher):
    """The moving average of MoCo and BYOL."""

    def move(self):
        for mean, value in zip(self.mean_net.parameters(), self.net.parameters(), strict=True):
            mean.data = 0.5 * mean.data + 0.5 * value.data


class TeacherByStateDict(RegisteredTeacher):
    def move(self):
        self.mean_net.load_state_dict(self.net.state_dict())


class TeacherAfterTwoSteps(TeacherByData):
    """Moves in round 1, but not in its first two steps."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx >= 2:
            self.move()


class HiddenTeacherAfterBurnIn(HiddenTeacher):
    burn_in = 1


class RegisteredTeacherAfterBurnIn(TeacherByData):
    burn_in = 1


HIDDEN_TEACHERS = [
    HiddenTeacher,
    TeacherInDict,
    TeacherInHiddenAttribute,
    HiddenTeacherByData,
    HiddenTeacherAfterBurnIn,
]
TEACHERS = [RegisteredTeacher, TeacherByData, TeacherByNewData, TeacherByStateDict, TeacherAfterTwoSteps]


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_network_that_steps_move_is_averaged_like_a_buffer(kind):
    check_equals_lightning(kind, steps=3)


@pytest.mark.parametrize("kind", HIDDEN_TEACHERS)
def test_a_hidden_teacher_equals_lightning_or_is_refused(kind):
    with equal_or_refused("teacher"):
        check_equals_lightning(kind, steps=3)


def test_a_teacher_that_moves_only_from_round_2_on_is_refused_by_name_and_round():
    with pytest.raises(ConfigurationError, match=r"(?s)(?=.*mean_net)(?=.*round 2)"):
        federated(new(RegisteredTeacherAfterBurnIn), rounds=3)


def test_a_run_says_in_its_table_of_state_that_a_moving_network_is_averaged(tmp_path, capsys):
    module = FederatedModule(new(TeacherByData), local_steps=2)
    Run(module, sites(), run_root=tmp_path, max_epochs=1, accelerator="cpu").fit()
    table = capsys.readouterr().out.partition("State of the model")[2]
    assert re.search(r"^.*mean_net.*  averaged", table, re.MULTILINE)


class Counter(Small):
    """Warms up by a counter of its own."""

    first_round = 1

    def __init__(self):
        super().__init__()
        self.steps_taken = 0

    def penalty(self, batch):
        if self.current_epoch + 1 >= self.first_round:
            self.count()
        return 0.1 * self.steps() * squares(self.net.parameters())

    def count(self):
        self.steps_taken += 1

    def steps(self):
        return self.steps_taken


class CounterFromRound2(Counter):
    first_round = 2


class CounterInDict(Counter):
    first_round = 2

    def __init__(self):
        super().__init__()
        self.steps_taken = {"steps": 0}

    def count(self):
        self.steps_taken["steps"] += 1

    def steps(self):
        return self.steps_taken["steps"]


class CounterInHelper(Counter):
    first_round = 2

    def __init__(self):
        super().__init__()
        self.steps_taken = Number()

    def count(self):
        self.steps_taken.value += 1

    def steps(self):
        return self.steps_taken.value


class CounterInSubmodule(Counter):
    first_round = 2

    def count(self):
        self.net.steps_taken = self.steps() + 1

    def steps(self):
        return getattr(self.net, "steps_taken", 0)


class CounterAfterStep(CounterFromRound2):
    """Counts in the hook after the step, and not in the step."""

    def penalty(self, batch):
        return 0.1 * self.steps_taken * squares(self.net.parameters())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps_taken += self.current_epoch


class OwnGenerator(Small):
    def __init__(self):
        super().__init__()
        self.noise = torch.Generator().manual_seed(1)

    def penalty(self, batch):
        return 0.1 * torch.rand((), generator=self.noise) * squares(self.net.parameters())


class OwnNumpyGenerator(OwnGenerator):
    first_round = 2

    def __init__(self):
        super().__init__()
        self.noise = np.random.default_rng(1)

    def penalty(self, batch):
        if self.current_epoch == 0:
            return 0.0
        return 0.1 * self.noise.random() * squares(self.net.parameters())


class CounterInArray(Counter):
    """An array that grows has another size than the server's."""

    def __init__(self):
        super().__init__()
        self.steps_taken = np.zeros(0)

    def count(self):
        self.steps_taken = np.append(self.steps_taken, 1.0)

    def steps(self):
        return len(self.steps_taken)


class CounterInClosure(Counter):
    def __init__(self):
        super().__init__()
        steps_taken = 0

        def count():
            nonlocal steps_taken
            steps_taken += 1
            return steps_taken

        self.count = count

    def penalty(self, batch):
        return 0.1 * self.count() * squares(self.net.parameters())


class CounterInHyperparameters(Counter):
    def __init__(self, steps_taken=0):
        super().__init__()
        self.save_hyperparameters()

    def count(self):
        self.hparams.steps_taken += 1


class LateBuffer(Counter):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", None)

    def count(self):
        self.center = torch.ones(())


class BufferToNone(LateBuffer):
    def __init__(self):
        super().__init__()
        self.center = torch.ones(())

    def count(self):
        self.center = None


class Generates(Counter):
    def __init__(self):
        super().__init__()
        self.numbers = (number for number in range(100))

    def count(self):
        self.steps_taken = next(self.numbers)


class Script(Counter):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.net = torch.jit.script(self.net)


class WeakLayer(Counter):
    """Its copies reach the server's layer by a reference that pickle cannot copy."""

    def __init__(self):
        super().__init__()
        self.layers = weakref.WeakValueDictionary({0: self.net[0]})

    def penalty(self, batch):
        return 0.1 * squares(self.layers[0].parameters())


class SlotInModule(Counter):
    __slots__ = ("taken",)

    def __init__(self):
        super().__init__()
        self.taken = 0

    def count(self):
        self.taken += 1

    def steps(self):
        return self.taken


class LayerFromStep(Counter):
    """No optimizer trains it, and each round would draw another one."""

    def count(self):
        self.late = nn.Linear(2, 2)


class ParameterFromStep(Counter):
    def count(self):
        self.late = nn.Parameter(torch.ones(2))


CHANGED = [
    (LayerFromStep, "late"),
    (ParameterFromStep, "late"),
    (SlotInModule, "taken"),
    (CounterInArray, "steps_taken"),
    (CounterInClosure, "steps_taken"),
    (CounterInHyperparameters, "steps_taken"),
    (LateBuffer, "center"),
    (BufferToNone, "center"),
    (Counter, "steps_taken"),
    (OwnGenerator, "noise"),
    (CounterFromRound2, "steps_taken"),
    (CounterInDict, "steps_taken"),
    (CounterInHelper, "steps_taken"),
    (CounterInSubmodule, "steps_taken"),
    (CounterAfterStep, "steps_taken"),
    (OwnNumpyGenerator, "noise"),
]


class Timer(Counter):
    """Measures its steps, which no number of the run depends on."""

    fresh_each_round = ("steps_taken",)

    def penalty(self, batch):
        self.count()
        return 0.0


def test_an_attribute_that_the_class_names_starts_anew_in_each_round():
    run = federated(new(Timer), rounds=3)
    assert run.model.steps_taken == 0
    with pytest.raises(ConfigurationError, match="'steps_taken', which all clients share under Vectorized"):
        federated(new(Timer), rounds=3, executor=VectorizedExecutor())  # does not start it anew


class SetsModes(Small):
    def penalty(self, batch):
        self.net[1].eval()
        return 0.0


def test_a_step_that_sets_modes_is_refused_with_a_remedy():
    words = r"attribute 'net.1.training', .*; call train\(\) and eval\(\) in __init__, or freeze .* by FixBN"
    with pytest.raises(ConfigurationError, match=words):
        federated(new(SetsModes), rounds=1)


def test_a_sparse_buffer_is_refused_by_name():
    module = Small()
    module.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(ConfigurationError, match="the buffer 'graph' is sparse"):
        FederatedModule(module, local_steps=1)


@pytest.mark.parametrize(("kind", "name"), CHANGED)
def test_numbers_and_generators_that_steps_change_are_refused_by_name(kind, name):
    where = rf"(?=.*round {kind.first_round})(?=.*site 0)" if getattr(kind, "first_round", 1) > 1 else ""
    with pytest.raises(ConfigurationError, match=rf"(?s)(?=.*{name}){where}"):
        federated(new(kind), rounds=3)


@pytest.mark.parametrize(
    ("kind", "name"), [(Generates, "generator"), (Script, "torch.jit"), (WeakLayer, "net.0.weight")]
)
def test_what_copies_cannot_have_of_their_own_is_refused_by_name(kind, name):
    with pytest.raises(ConfigurationError, match=re.escape(name)):
        federated(new(kind), rounds=1)


def test_a_list_that_steps_append_to_has_the_clients_of_all_ranks():
    one, two = (trained(KeepsLosses, rounds=2, trainer=on_ranks(ranks)) for ranks in (1, 2))
    assert one["mean_of_losses"] == two["mean_of_losses"]
    assert one["last_loss"] == two["last_loss"]


class KeepsLossesInDict(KeepsLosses):
    def __init__(self):
        super().__init__()
        self.kept = {"train": vars(self).pop("losses")}

    @property
    def losses(self):
        return self.kept["train"]

    @losses.setter
    def losses(self, value):
        vars(self)["losses"] = value


class KeepsLossesInNewKey(KeepsLossesInDict):
    def __init__(self):
        super().__init__()
        self.kept = defaultdict(list)


class KeepsLossesInHelper(KeepsLossesInDict):
    def __init__(self):
        super().__init__()
        self.kept = Number()
        self.kept.lists = [[]]

    @property
    def losses(self):
        return self.kept.lists[0]

    @losses.setter
    def losses(self, value):
        vars(self)["losses"] = value


@pytest.mark.parametrize("kind", [KeepsLossesInDict, KeepsLossesInNewKey, KeepsLossesInHelper])
def test_lists_inside_of_other_objects_have_the_clients_of_all_ranks(kind):
    expected = trained(KeepsLosses, rounds=2)["mean_of_losses"]
    for ranks in (1, 2):
        assert trained(kind, rounds=2, trainer=on_ranks(ranks))["mean_of_losses"] == expected


class HoldsItself(Small):
    """Copies that only Python's collection of garbage frees."""

    alive: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.function = lambda: self

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.alive.append(self.net[0].weight)


def test_copies_of_an_earlier_round_hold_no_client():
    run = federated(new(HoldsItself), rounds=3)
    sizes = [weight.numel() for weight in HoldsItself.alive]
    HoldsItself.alive.clear()
    assert sum(size > 0 for size in sizes) <= 2 * 2  # clients and steps of the last round
    assert run.model.net[0].weight.numel() == 5 * 6


class CountsSteps(Lit):
    """Counts by a list which training steps append to."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def training_step(self, batch, batch_idx):
        self.steps.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("steps", float(len(self.steps)))
        self.steps.clear()


@pytest.mark.parametrize(
    "method",
    [
        partial(callbacks.HybridBN, mix=0.5),
        callbacks.StaticBN,
        callbacks.BatchNormDiagnostics,
        callbacks.FedExFixBN,
        callbacks.FedBABU,  # it fine-tunes clients' models
    ],
)
def test_passes_of_methods_are_no_steps_of_a_client(method):
    settings = {"rounds": 2, "trainer": {"limit_val_batches": 2}}
    assert trained(CountsSteps, None, method(), **settings)["steps"] == 2 * 2  # two clients, two steps


class KnowsItsMemory(Small):
    """A trained head on frozen features, as of a foundation model."""

    def __init__(self):
        super().__init__()
        self.features = torch.nn.Linear(6, 6).requires_grad_(False)
        self.places = []

    def training_step(self, batch, batch_idx):
        self.places.append((self.features.weight.data_ptr(), self.net[0].weight.data_ptr()))
        return super().training_step((self.features(batch[0]), batch[1]), batch_idx)

    def on_train_epoch_end(self):
        frozen, trained = (len(set(column)) for column in zip(*self.places, strict=True))
        self.log_dict({"frozen": float(frozen), "trained": float(trained)})
        self.places.clear()


def test_all_clients_share_the_memory_of_frozen_weights():
    found = trained(KnowsItsMemory)
    assert (found["frozen"], found["trained"]) == (1, 2)  # of two clients


class CountsPasses(FederatedCallback):
    """Counts the passes of a layer in all local steps, by a hook with a dictionary in its closure."""

    role = "observer"

    def __init__(self):
        self.passes = []

    def on_round_start(self, trainer, pl_module, cohort):
        seen = {"passes": 0}

        def look(layer, inputs):
            seen["passes"] += 1

        self.seen, self.handle = seen, next(pl_module.model.net.children()).register_forward_pre_hook(look)

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.passes.append(self.seen["passes"])
        self.handle.remove()


def test_a_hook_of_a_method_sees_the_passes_of_all_clients():
    method = CountsPasses()
    trained(Small, None, method, rounds=2)
    assert method.passes == [2 * 2, 2 * 2]  # two clients, two steps


HELD = {}


class ReadsServer(Small):
    """Scales its loss by weights of the server's module, which a global variable holds."""

    def __init__(self):
        super().__init__()
        HELD["net"] = self.net

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            scale = HELD["net"][0].weight.square().mean()
        return scale * super().training_step(batch, batch_idx)


def test_a_loss_that_reads_the_server_without_a_gradient_is_refused():
    with pytest.raises(
        ConfigurationError, match="reads a tensor of the server's model and not of the client's"
    ):
        federated(new(ReadsServer), rounds=1)


class LateLayer(Small):
    """A scale is trained from the second step on; dampening makes the first step of an optimizer another one."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + (self.scale * self.net(batch[0])).square().mean() if batch_idx else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


def test_a_client_that_ends_early_does_not_start_the_optimizers_of_others():
    long, short = Site(1, train=24), Site(2, train=8)
    seen = ClientStates()
    data = FederatedDataModule({"long": long, "short": short}, server=Site(99))
    federated(new(LateLayer), seen, data=data, rounds=1, local_epochs=1, trainer={"precision": "32-true"})
    for client, site in enumerate((long, short)):
        expected = tensors(lightning_client(new(LateLayer), site).lightning_module)
        check_tensors(seen.end[1][client], expected, 0.0, f"client {client}")
