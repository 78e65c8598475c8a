"""A method of a user's own that changes nothing is named when the fit ends."""

import pytest
from helpers import blobs, federated_run

from fl_lightning import FederatedCallback
from fl_lightning.callbacks import FedProx
from fl_lightning.methods import Report


class Matches(FederatedCallback):
    """Halves the gradients of the parameters whose name contains a pattern."""

    def __init__(self, pattern):
        self.pattern = pattern

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for name, gradients in cohort.grads.items():
            if self.pattern in name:
                gradients.mul_(0.5)


class Late(FederatedCallback):
    def on_round_end(self, trainer, pl_module, cohort):
        if cohort.round == 3:
            cohort.server_buffers["1.running_mean"].zero_()


class Frozen(FederatedCallback):
    def policy(self, round_number, total_rounds):
        return {"affine": "frozen"} if round_number > 1 else {}


class SetsMomentum(FederatedCallback):
    def configure_batch_norm(self, pl_module):
        pl_module.model[1].momentum = 0.5


class Corrects(FederatedCallback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass


class Watches(FederatedCallback):
    role = "observer"


class Writes(Report, FederatedCallback):
    role = "observer"


@pytest.mark.parametrize("method", [Matches("head"), type("Nothing", (FederatedCallback,), {})()])
def test_a_method_that_changes_nothing_is_named(method, capsys):
    federated_run(method, data=blobs(), rounds=2)
    name = type(method).__name__
    assert f"{name} seems to have changed nothing: its policy is FedAvg's" in capsys.readouterr().out


@pytest.mark.parametrize(
    "method",
    [Matches("weight"), Late(), Frozen(), SetsMomentum(), Corrects(), Watches(), Writes(), FedProx(0)],
    ids=lambda method: type(method).__name__,
)
def test_a_method_that_acts_or_may_act_is_not(method, capsys):
    federated_run(method, data=blobs(), rounds=3)
    assert "seems to have changed nothing" not in capsys.readouterr().out
