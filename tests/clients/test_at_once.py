"""Clients that compute at once equal Lightning, or their copies compute one after the other, or the run is refused by name."""

from copy import deepcopy
from functools import lru_cache

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule
from fl_lightning.callbacks import FedTAN, StaticBN, StatisticsSources
from fl_lightning.execution.choice import ExecutorChoice
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from tests.clients.test_equals_lightning import ELSEWHERE, FUNCTIONS, OPTIMIZERS, STEPS, optimized_by
from tests.clients.test_state_elsewhere import CHANGED, HIDDEN_TEACHERS, TEACHERS, Counter
from tests.support.helpers import distance
from tests.support.lightning_sites import CLASSES, FEATURES, KeepsLosses, Lit, federated
from tests.support.plain_lightning import (
    EvaluatedAtOnce,
    Small,
    check_equals_lightning,
    equal_or_refused,
    new,
    squares,
    tensors,
)

pytestmark = [
    pytest.mark.first_steps,
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # of vmap
]


EXECUTORS = [SequentialExecutor(), None]


@pytest.fixture
def at_once(monkeypatch):
    """Choose the executor that a GPU has."""
    choose = lambda module, clients: ExecutorChoice(VectorizedExecutor(where_possible=True), "as on a GPU")
    monkeypatch.setattr("fl_lightning.round.module.choose_executor", choose)


@pytest.mark.parametrize(
    "kind", [Small, *OPTIMIZERS, *ELSEWHERE, *STEPS, *TEACHERS, *HIDDEN_TEACHERS, *(x for x, _ in FUNCTIONS)]
)
def test_clients_at_once_equal_lightning(kind, at_once):
    names = {**dict(FUNCTIONS), **dict.fromkeys(HIDDEN_TEACHERS, "teacher")}
    with equal_or_refused(names.get(kind, "nothing is refused")):
        check_equals_lightning(kind, steps=3, tolerance=None)


def computed_by(kind, **settings):
    run = federated(new(kind), rounds=1, **settings)
    return type(run.executor).__name__


def test_only_what_needs_copies_computes_one_after_the_other(at_once, capsys):
    assert computed_by(Small) == "VectorizedExecutor"
    assert computed_by(optimized_by(torch.optim.AdamW, lr=0.1)) == "VectorizedExecutor"
    assert "one after the other" not in capsys.readouterr().out
    assert computed_by(OPTIMIZERS[-1]) == "SequentialExecutor"


class PenaltyOfList(Small):
    """A term of a thousandth of the loss, of parameters in a list."""

    def __init__(self):
        super().__init__()
        self.decayed = [*self.net.parameters()]

    def penalty(self, batch):
        return 1e-5 * squares(self.decayed)


class OtherOptimizer(Small):
    """A schedule from a rate of 0 hides what the optimizer does in its first step."""

    def configure_optimizers(self):
        optimizer = Decays(self.net.parameters(), lr=0.3)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: float(epoch > 0))]


class Decays(torch.optim.SGD):
    decay = 0.0

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1 - group["lr"] * self.decay)
        return super().step(closure)


class OtherOptimizerLater(OtherOptimizer):
    def configure_optimizers(self):
        (optimizer,), schedulers = super().configure_optimizers()
        optimizer.decay = 1e-3
        return [optimizer], schedulers


class Padded(Small):
    """Under vmap, torch masks the padding row of the first client alone."""

    strength = 1e-5

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, CLASSES, padding_idx=0)

    def penalty(self, batch):
        return self.strength * self.words(batch[0].mul(2).long().clamp(0, 4)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


class NeedsFloat32(Padded):
    """A step that float64 cannot compute."""

    strength = 10.0

    def penalty(self, batch):
        return super().penalty(batch) * (batch[0].float() @ self.half).mean()

    def __init__(self):
        super().__init__()
        self.half = torch.ones(FEATURES, dtype=torch.float32)

    def training_step(self, batch, batch_idx):
        assert self.net[0].weight.dtype == torch.float32
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (PenaltyOfList, "a step reads 'net.0.weight' of the server's model"),
        (OtherOptimizerLater, "as its optimizer has code or settings of its own"),
        (Padded, "the gradient of 'words.weight' in local step 1 differs"),
        (NeedsFloat32, "the gradient of 'words.weight' in local step 1 differs"),
    ],
)
def test_a_small_difference_from_a_copy_is_found(kind, words, at_once, capsys):
    assert computed_by(kind, trainer={"precision": "32-true"}) == "SequentialExecutor"
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "name"), CHANGED)
def test_numbers_that_steps_of_clients_at_once_change_are_refused_by_name(kind, name, at_once):
    words = rf"(?s)(?=.*{name})(?=.*round {kind.first_round})" if issubclass(kind, Counter) else name
    with pytest.raises(ConfigurationError, match=words):
        federated(new(kind), rounds=3)


class ListFromRound2(KeepsLosses):
    def training_step(self, batch, batch_idx):
        if self.current_epoch:
            return super().training_step(batch, batch_idx)
        return super(KeepsLosses, self).training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.losses.clear()


class KeepsFeaturesFromRound2(Small):
    features = None

    def penalty(self, batch):
        if self.current_epoch:
            self.features = self.net(batch[0])
        return 0.0


class AverageFromRound2(Small):
    """A number in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.average = torch.zeros(())

    def penalty(self, batch):
        self.average = self.average + self.current_epoch
        return 0.01 * self.average * squares(self.net.parameters())


class AverageInPlaceFromRound2(AverageFromRound2):
    def penalty(self, batch):
        self.average += self.current_epoch
        return 0.01 * self.average * squares(self.net.parameters())


class NewAverageFromRound2(AverageFromRound2):
    """The first value looks like a cache."""

    def __init__(self):
        super().__init__()
        self.average = None

    def penalty(self, batch):
        if self.current_epoch:
            self.average = torch.zeros(()) if self.average is None else self.average + 1
        return 0.0 if self.average is None else 0.01 * self.average * squares(self.net.parameters())


@pytest.mark.parametrize(
    ("kind", "name", "number"),
    [
        (ListFromRound2, "losses", 2),
        (KeepsFeaturesFromRound2, "features", 2),
        (AverageFromRound2, "average", 2),
        (AverageInPlaceFromRound2, "average", 2),
        (NewAverageFromRound2, "average", 2),
    ],
)
def test_what_only_later_steps_at_once_keep_is_refused(kind, name, number, at_once):
    words = (
        rf"(?s)round {number}: a step of {kind.__name__} .*'{name}', which all clients share under Vectori"
    )
    with pytest.raises(ConfigurationError, match=words):
        federated(new(kind), rounds=4)


class ReadsServerFromRound2(PenaltyOfList):
    def penalty(self, batch):
        return super().penalty(batch) if self.current_epoch else 0.0


class ScaledByServerInStep3(PenaltyOfList):
    """The gradients are scaled, too."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * squares(self.decayed).detach() if batch_idx == 2 else loss

    def penalty(self, batch):
        return 0.0


class MasksByList(PenaltyOfList):
    """A comparison with NaN is False."""

    def penalty(self, batch):
        if not self.current_epoch:
            return 0.0
        return ((self.decayed[0].detach().abs() < 0.1) * self.net[0].weight.square()).sum()


class AveragesList(PenaltyOfList):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(5, FEATURES))

    def penalty(self, batch):
        if self.current_epoch:
            self.average = 0.9 * self.average + 0.1 * self.decayed[0].detach()
        return 0.0


class CountsInList(Small):
    """An integer cannot be NaN."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.counts = [self.count]

    def penalty(self, batch):
        if self.current_epoch:
            self.counts[0] += 1
        return 0.0


class PenaltyOfTrained(Small):
    """Under vmap, parameters would say that they need no gradient."""

    def penalty(self, batch):
        return 0.01 * self.current_epoch * squares(p for p in self.net.parameters() if p.requires_grad)


class ReadsOptimizersState(Small):
    def penalty(self, batch):
        state = self.optimizers().state.get(self.net[0].weight, {})
        return 0.1 * (state["exp_avg"] * self.net[0].weight).sum() if "exp_avg" in state else 0.0

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class SumsInPlace(Small):
    def penalty(self, batch):
        total = torch.zeros(())
        for parameter in self.net.parameters():
            total += parameter.square().sum()
        return 0.01 * total


class Recurrent(Small):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(FEATURES, 4, batch_first=True)

    def penalty(self, batch):
        return self.cells(batch[0][:, None].expand(-1, 3, -1))[0].square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


class KeepsBeforeItem(Small):
    """What vmap cannot do comes after a tensor is kept, from round 2 on."""

    features = None

    def penalty(self, batch):
        if not self.current_epoch:
            return 0.0
        self.features = self.net[0](batch[0])
        self.log("mean", self.features.mean().item())
        return 0.1 * self.features.square().mean()


class GradientPenalty(Small):
    def penalty(self, batch):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        return 0.01 * squares(torch.autograd.grad(loss, [*self.net.parameters()], create_graph=True))


class GradientPenaltyFromRound2(GradientPenalty):
    def penalty(self, batch):
        return super().penalty(batch) if self.current_epoch else 0.0


class HookOfFeatures(Small):
    def penalty(self, batch):
        features = self.net[0](batch[0])
        features.register_hook(lambda gradient: 2 * gradient)
        return features.square().mean()


class CopiesNetwork(Small):
    def penalty(self, batch):
        return deepcopy(self.net)(batch[0]).detach().square().mean() * self.net(batch[0]).mean()


@lru_cache
def table(size):
    return torch.linspace(0, 1, size)


class GlobalCache(Small):
    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0] * table(batch[0].shape[1]).to(batch[0])), batch[1])


HARD = [
    ReadsServerFromRound2,
    ScaledByServerInStep3,
    MasksByList,
    AveragesList,
    CountsInList,
    PenaltyOfTrained,
    ReadsOptimizersState,
    SumsInPlace,
    Recurrent,
    KeepsBeforeItem,
    GradientPenalty,
    GradientPenaltyFromRound2,
    HookOfFeatures,
    CopiesNetwork,
    GlobalCache,
]


@pytest.mark.parametrize("kind", HARD)
def test_what_the_first_steps_do_not_show_equals_copies(kind, at_once):
    runs = [federated(new(kind, torch.float64), rounds=3, local_steps=3, executor=x) for x in EXECUTORS]
    assert distance(*(run.model.state_dict() for run in runs)) < 1e-9
    for name, value in runs[0].metrics.items():
        if not name.startswith("time/"):
            assert runs[1].metrics[name] == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("kind", [MasksByList, ReadsOptimizersState])
def test_what_only_copies_can_compute_is_refused_under_vmap(kind):
    with pytest.raises(ConfigurationError, match=r"a step reads .*; use SequentialExecutor"):
        federated(new(kind), rounds=3, local_steps=3, executor=VectorizedExecutor())


class LogsRate(Small):
    def penalty(self, batch):
        group = self.optimizers().param_groups[0]
        self.log("rate", group["lr"])
        self.log("beta", group["betas"][0])
        return 0.0

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_settings_of_the_optimizer_may_be_read_at_once(at_once):
    run = federated(new(LogsRate), rounds=1)
    assert type(run.executor) is VectorizedExecutor
    assert (run.metrics["rate"], run.metrics["beta"]) == pytest.approx((0.01, 0.9))


class GrowsInEachStep(Small):
    def __init__(self):
        super().__init__()
        self.grown = torch.zeros(0)

    def penalty(self, batch):
        self.grown = torch.cat([self.grown, torch.ones(1)])
        return 0.01 * self.grown.sum() * squares(self.net.parameters())


class CountsSinceRound2(Small):
    """Counts anew in each round, so that it looks like a cache."""

    count = None

    def on_train_epoch_start(self):
        self.count = None

    def penalty(self, batch):
        if not self.current_epoch:
            return 0.0
        self.count = torch.ones(()) if self.count is None else self.count + 1
        return 0.05 * self.count * squares(self.net.parameters())


class DecaysTeacherFromRound2(Small):
    def __init__(self):
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)

    def penalty(self, batch):
        if self.current_epoch:
            with torch.no_grad():
                for weight in self.teacher.parameters():
                    weight.data.mul_(0.9)
        return (self.teacher(batch[0]) - self.net(batch[0])).square().mean()


@pytest.mark.parametrize(
    ("kind", "name"), [(CountsSinceRound2, "count"), (DecaysTeacherFromRound2, "teacher.0.weight")]
)
def test_what_looks_like_a_cache_is_refused_when_it_changes(kind, name):
    with pytest.raises(ConfigurationError, match=f"round 2: .* changes (the attribute )?'{name}'"):
        federated(new(kind), rounds=3, executor=VectorizedExecutor(block_size=1))


def test_what_grows_in_each_step_trains_by_copies(at_once):
    assert computed_by(GrowsInEachStep) == "SequentialExecutor"


class OtherAfterThreeSteps(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                steps = self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
                if steps > 3:
                    parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


def test_an_optimizer_that_is_another_later_trains_by_copies(at_once):
    assert computed_by(optimized_by(OtherAfterThreeSteps, lr=0.1)) == "SequentialExecutor"


class Caches(Small):
    """Keeps a table for each number of samples."""

    table = None

    def penalty(self, batch):
        if self.table is None or len(self.table) != len(batch[0]):
            self.table = torch.linspace(0, 1, len(batch[0]))
        return (self.table * self.net(batch[0]).square().sum(1)).mean()


def test_a_cache_may_be_kept_at_once(at_once):
    check_equals_lightning(Caches, tolerance=None)
    assert computed_by(Caches) == "VectorizedExecutor"


class PenaltyAndNorm(Lit):
    def __init__(self):
        super().__init__()
        self.decayed = [*self.net.parameters()]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 1e-5 * squares(self.decayed)


def test_a_joint_pass_is_compared_with_copies():
    with pytest.raises(
        ConfigurationError, match=r"a step reads 'net.0.weight' of the server's .* leave out FedTAN"
    ):
        federated(new(PenaltyAndNorm), FedTAN(), rounds=1)
    with pytest.raises(
        ConfigurationError, match=r"round 1: a step of KeepsLosses appends to 'losses'.*FedTAN"
    ):
        federated(new(KeepsLosses), FedTAN(), rounds=1)


def test_the_comparison_leaves_the_module_as_it_was(at_once):
    found = []
    for check in (True, False):
        run = federated(new(Caches), rounds=1, check_first_steps=check)
        found.append({**dict(run.model.state_dict()), "table": run.model.table})
    torch.testing.assert_close(*found, rtol=0, atol=0)


class SetsLayers(FederatedCallback):
    """Changes attributes of layers at the start of a round, after backward passes, and after local steps."""

    def on_round_start(self, trainer, pl_module, cohort):
        pl_module.model.net[1].eps = 0.1 * cohort.round

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        pl_module.model.net[1].seen = step

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        pl_module.model.net[1].eps += 0.1


def test_what_methods_change_in_a_round_at_once_is_no_trace(at_once):
    first = new(Lit)
    runs = [federated(deepcopy(first), SetsLayers(), executor=x) for x in (None, SequentialExecutor())]
    assert type(runs[0].executor) is VectorizedExecutor
    assert distance(*(run.model.state_dict() for run in runs)) < 1e-9


class AveragesFeatures(Lit):
    """A buffer of the module's own, which each local step replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(5))

    def training_step(self, batch, batch_idx):
        self.move(self.net[0](batch[0]).detach().mean(0))
        return super().training_step(batch, batch_idx)

    def move(self, features):
        self.average = 0.5 * self.average + features


class AveragesInPlace(AveragesFeatures):
    def move(self, features):
        self.average.mul_(0.5).add_(features)


@pytest.mark.parametrize("method", [StaticBN, StatisticsSources])
def test_passes_that_measure_statistics_are_no_steps(method, at_once):
    clients = {f"site {number}": EvaluatedAtOnce(number, train=24) for number in range(2)}
    data = {"data": FederatedDataModule(clients, server=EvaluatedAtOnce(99)), "local_steps": 3}
    states = []
    for kind in (AveragesFeatures, AveragesInPlace):
        for executor in EXECUTORS:
            run = federated(new(kind, torch.float64), method(), executor=executor, **data)
            states.append(tensors(run.model)["average"])
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=0, atol=1e-12)
