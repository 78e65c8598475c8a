"""What StaticBN's passes send, to clients in the cohort or not."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from fl_lightning import FederatedDataModule
from fl_lightning.callbacks import CommunicationLedger, StaticBN
from fl_lightning.callbacks.observers.network_link import NetworkLink
from tests.support.helpers import ArrayClient, blobs, federated_run

STATISTICS = 20
"""Floats of running statistics of ``small_cnn``, two layers with 4 and 6 channels."""


class Statistics(Callback):
    """The server's running statistics and the traffic after every round."""

    def __init__(self):
        self.values, self.communication = {}, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = {name: value for name, value in pl_module.state_dict().items() if "running" in name}
        self.values[pl_module.round] = torch.cat([value.flatten() for value in state.values()]).clone()
        self.communication[pl_module.round] = pl_module.communication


EVALUATED = {"limit_val_batches": 1, "check_val_every_n_epoch": 2}


def static_bn(changed=None, rounds=4, participation=1):
    """What StaticBN does with evaluations after rounds 2 and 4; one client's data may be other than usual."""
    data = blobs()
    if changed is not None:
        inputs, targets = data.clients[changed].dataset.tensors
        clients = list(data.clients)
        clients[changed] = ArrayClient(2 * inputs, targets, 8)
        data = FederatedDataModule(clients, data.server, seed=0)
    seen = Statistics()
    settings = {"local_steps": 1, "participation": participation, "trainer": EVALUATED}
    return federated_run(StaticBN(), seen, data=data, rounds=rounds, **settings).module, seen


def test_in_a_pass_every_client_in_the_cohort_or_not_sends_its_statistics():
    module, usual = static_bn()
    absent = next(
        client for client in range(3) if client not in module.plan.cohort(1) + module.plan.cohort(2)
    )
    _, other = static_bn(changed=absent)
    assert int((usual.values[2] != other.values[2]).sum()) == STATISTICS
    uploads = {client: up for client, (up, _) in usual.communication[2].sent["StaticBN"].items()}
    assert uploads == dict.fromkeys(range(3), 8 * STATISTICS)
    assert "StaticBN" not in usual.communication[1].sent
    assert torch.equal(usual.values[1], other.values[1])


def test_the_weights_of_a_pass_go_to_those_that_the_next_round_does_not_send_them():
    module, seen = static_bn()
    weights = 8 * sum(parameter.numel() for parameter in module.model.parameters())
    following = module.plan.cohort(3)
    wanted = {client: 0 if client in following else weights for client in range(3)}
    assert {client: down for client, (_, down) in seen.communication[2].sent["StaticBN"].items()} == wanted
    assert sorted(wanted.values()) == [0, weights, weights]
    # after the last round nobody gets them otherwise, and the server waits for the answer
    assert {down for _, down in seen.communication[4].sent["StaticBN"].values()} == {weights}
    assert [seen.communication[number].exchanges for number in (1, 2, 3, 4)] == [1, 1, 1, 2]


def test_with_all_clients_in_every_round_a_pass_sends_nothing_down_before_the_last_round():
    _, seen = static_bn(participation=1.0)
    assert all(pair == (8 * STATISTICS, 0) for pair in seen.communication[2].sent["StaticBN"].values())


def test_an_absent_client_waits_once_for_a_pass_and_the_ledger_books_it():
    ledger = CommunicationLedger(NetworkLink(upload_mbps=1, download_mbps=4, latency_ms=100))
    module = federated_run(ledger, StaticBN(), local_steps=1, participation=1, trainer=EVALUATED).module
    weights = sum(parameter.numel() for parameter in module.model.parameters())
    cohorts = [module.plan.cohort(number) for number in (1, 2, 3)]
    for client in range(3):
        present = [client in cohort for cohort in cohorts]
        # passes after rounds 2 and 3, the last one with an exchange of its own
        exchanges = present[0] + 1 + (2 if present[2] else 1)
        rounds, up, down, booked, seconds = ledger.clients[client]
        assert (rounds, booked) == (sum(present), exchanges)
        assert up == 8 * (rounds * weights + 2 * STATISTICS)
        assert seconds == pytest.approx(0.1 * exchanges + 8 * up / 1e6 + 8 * down / 4e6, rel=1e-12)
