"""Clients that compute at once equal Lightning, or their copies compute one after the other, or the run is refused by name."""

from copy import deepcopy

import pytest
import torch

from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.callbacks import FedTAN
from fl_lightning.execution.choice import Choice
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from tests.clients.test_equals_lightning import ELSEWHERE, FUNCTIONS, OPTIMIZERS, STEPS, optimized_by
from tests.clients.test_state_elsewhere import CHANGED, HIDDEN_TEACHERS, TEACHERS, Counter
from tests.support.helpers import distance
from tests.support.lightning_sites import KeepsLosses, Lit, federated
from tests.support.plain_lightning import Small, check_equals_lightning, equal_or_refused, new, squares

pytestmark = [
    pytest.mark.first_steps,
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # of vmap
]


@pytest.fixture
def at_once(monkeypatch):
    """Choose the executor that a GPU has."""
    choose = lambda module, clients: Choice(VectorizedExecutor(where_possible=True), "as on a GPU")
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


class NeedsFloat32(PenaltyOfList):
    """A step that float64 cannot compute."""

    strength = 0.1

    def penalty(self, batch):
        return self.strength * squares(self.decayed) * (batch[0].float() @ self.half).mean()

    def __init__(self):
        super().__init__()
        self.half = torch.ones(6, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (PenaltyOfList, "the loss of local step 1 differs"),
        (OtherOptimizerLater, "as its optimizer has code or settings of its own"),
        (NeedsFloat32, "the loss of local step 1 differs"),
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
        (NewAverageFromRound2, "average", 3),
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


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (ReadsServerFromRound2, "round 2, .* in local step 1"),
        (ScaledByServerInStep3, "round 1, .* in local step 3"),
    ],
)
def test_a_loss_that_reads_the_server_later_is_refused(kind, place, at_once):
    with pytest.raises(ConfigurationError, match=rf"{place} reads a tensor of the server's model"):
        federated(new(kind), rounds=3, local_steps=3)


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
    with pytest.raises(ConfigurationError, match=r"the loss of local step 1 differs .* leave out FedTAN"):
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
