"""State outside of parameters and buffers: numbers that steps change are refused, observers change nothing."""

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedDataModule, callbacks
from tests.support.lightning_sites import federated
from tests.support.plain_lightning import EvaluatedAtOnce, Small, check_tensors, known_fault, new, tensors

pytestmark = pytest.mark.first_steps


def squares(parameters):
    return sum(parameter.square().sum() for parameter in parameters)


class Number:
    """A helper object that keeps a number."""

    value = 0.0


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


LATE = "attributes are compared in the first two steps only"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counter, "steps_taken"),
        (OwnGenerator, "noise"),
        known_fault((CounterFromRound2, "steps_taken"), LATE),
        known_fault((CounterInDict, "steps_taken"), LATE),
        known_fault((CounterInHelper, "steps_taken"), LATE),
        known_fault((CounterInSubmodule, "steps_taken"), LATE),
        known_fault((CounterAfterStep, "steps_taken"), LATE),
        known_fault((OwnNumpyGenerator, "noise"), LATE),
    ],
)
def test_numbers_and_generators_that_steps_change_are_refused_by_name(kind, name):
    where = rf"(?=.*round {kind.first_round})(?=.*site 0)" if getattr(kind, "first_round", 1) > 1 else ""
    with pytest.raises(ConfigurationError, match=rf"(?s)(?=.*{name}){where}"):
        federated(new(kind), rounds=3)


# what evaluations change


class Threshold(Small):
    """Trains with a level that an evaluation has set."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(5))
        self.make()

    def make(self):
        self.level = 0.0

    def read(self):
        return self.level

    def write(self, value):
        self.level = value

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.seen = self.net(batch[0]).detach().square().mean()

    def on_validation_epoch_end(self):
        self.write(float(self.seen))

    def forward(self, inputs):
        return self.net(inputs)

    def penalty(self, batch):
        return self.read() * self.net(batch[0]).square().mean()


class ThresholdInBuffer(Threshold):
    def make(self):
        self.register_buffer("level", torch.zeros(()))

    def write(self, value):
        self.level.fill_(value)


class ThresholdInPrivateAttribute(Threshold):
    _level = 0.0

    def read(self):
        return self._level

    def write(self, value):
        self._level = value


class ThresholdInSubmodule(ThresholdInPrivateAttribute):
    def read(self):
        return getattr(self.net, "level", 0.0)

    def write(self, value):
        self.net.level = value


class ThresholdInList(Threshold):
    def make(self):
        self.level = [0.0]

    def read(self):
        return self.level[0]

    def write(self, value):
        self.level[0] = value


class ThresholdAppended(ThresholdInList):
    def read(self):
        return self.level[-1]

    def write(self, value):
        self.level.append(value)


class ThresholdInDict(ThresholdInList):
    def make(self):
        self.level = {0: 0.0}


class ThresholdInHelper(Threshold):
    def make(self):
        self.level = Number()

    def read(self):
        return self.level.value

    def write(self, value):
        self.level.value = value


class ThresholdInParameter(Threshold):
    def make(self):
        self.level = nn.Parameter(torch.zeros(()), requires_grad=False)

    def write(self, value):
        self.level.data.fill_(value)


PLACES = [
    Threshold,
    ThresholdInBuffer,
    ThresholdInPrivateAttribute,
    ThresholdInSubmodule,
    ThresholdInList,
    ThresholdAppended,
    ThresholdInDict,
    ThresholdInHelper,
    ThresholdInParameter,
]
VARIANTS = "what an evaluation of a variant changes stays"


def observed(kind, observer):
    case = (kind, observer)
    return case if kind is Threshold else known_fault(case, VARIANTS)


@pytest.mark.parametrize(
    ("kind", "observer"),
    [
        *(observed(kind, callbacks.ClientEvaluation) for kind in PLACES),
        *(observed(kind, callbacks.StatisticsSources) for kind in PLACES),
        *(observed(kind, callbacks.AdaBN) for kind in PLACES),
    ],
)
def test_an_observer_does_not_change_training(kind, observer):
    data = FederatedDataModule(
        {f"site {number}": EvaluatedAtOnce(number) for number in range(2)}, server=EvaluatedAtOnce(99)
    )
    settings = {"data": data, "rounds": 3, "trainer": {"num_sanity_val_steps": 0}}
    alone = tensors(federated(new(kind, torch.float64), **settings).model)
    watched = tensors(federated(new(kind, torch.float64), observer(), **settings).model)
    unread = federated(new(kind, torch.float64), **{**settings, "trainer": {"limit_val_batches": 0}}).model
    check_tensors(watched, alone, 0.0, "server")
    assert not torch.equal(alone["net.0.weight"], unread.net[0].weight)  # the level counts
