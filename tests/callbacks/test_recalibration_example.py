"""The example of a server that measures BN statistics itself, and what ``verify`` says of other declarations."""

import pytest
import torch
from torch.nn.functional import batch_norm

from examples.own_method.recalibration import ServerRecalibration
from fl_lightning.callbacks import SiloBN
from fl_lightning.verification.differences import Violated
from fl_lightning.verification.rules import REMEDIES, RULES
from fl_lightning.verification.trials import Trials
from tests.support.helpers import Received, blobs, federated_run, small_cnn

EVALUATED = {"limit_val_batches": 1.0}


class Undeclared(ServerRecalibration):
    def policy(self, round_number, total_rounds):
        return {}


class Pooled(ServerRecalibration):
    def policy(self, round_number, total_rounds):
        return dict.fromkeys(("mean", "var", "counter"), "pooled")


def test_the_statistics_are_those_of_the_servers_inputs_under_its_weights():
    run = federated_run(ServerRecalibration(), trainer=EVALUATED)
    model = small_cnn().double()
    model.load_state_dict(run.module.model.state_dict())
    moments = []
    with torch.no_grad():
        for inputs, _ in blobs().val_dataloader():
            first = model[0](inputs)
            gamma, beta = model[1].weight, model[1].bias
            second = model[3](batch_norm(first, None, None, gamma, beta, training=True).relu())
            moments.append([(x.mean((0, 2, 3)), x.var((0, 2, 3))) for x in (first, second)])
    for layer, of_batches in zip((model[1], model[4]), zip(*moments, strict=True), strict=True):
        mean, variance = (torch.stack(x).mean(0) for x in zip(*of_batches, strict=True))
        assert torch.allclose(layer.running_mean, mean)
        assert torch.allclose(layer.running_var, variance)
    plain = federated_run(trainer=EVALUATED).module.model
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), model.parameters(), strict=True))


def test_clients_receive_the_statistics_and_send_none():
    received = {method: Received() for method in (ServerRecalibration, SiloBN)}
    for method, books in received.items():
        federated_run(method(), books, trainer=EVALUATED)
    added = [
        (up - its_up, down - its_down)
        for (up, down), (its_up, its_down) in zip(
            *(books.received for books in received.values()), strict=True
        )
    ]
    assert added == [(0, 3 * 8 * 20)] * 3


@pytest.mark.slow
def test_it_obeys_all_rules(tmp_path):
    trials = Trials(ServerRecalibration, tmp_path)
    for name in (
        "server state",
        "server optimizer",
        "traffic",
        "clients own state",
        "one broadcast",
        "between rounds",
    ):
        RULES[name](trials)


@pytest.mark.parametrize("method", [Undeclared, Pooled])
@pytest.mark.parametrize("rule", ["server state", "server optimizer"])
def test_the_remedies_for_other_declarations_name_the_one_that_fits(method, rule, tmp_path):
    with pytest.raises(Violated) as violated:
        RULES[rule](Trials(method, tmp_path))
    assert '"discarded"' in REMEDIES[rule]
    assert "pseudo_gradient" not in str(violated.value)
