"""A method of one's own: the pages' FedProx and FedBN do what their papers say."""

from functools import partial

import pytest
import torch

from fl_lightning import FederatedCallback, FederatedDataModule
from tests.support.helpers import ArrayClient, blobs, distance, federated_run, small_cnn, train
from tests.support.readme_code import METHOD_BLOCKS, methods

STATISTICS = ("1.running_mean", "1.running_var", "4.running_mean", "4.running_var")
AFFINE = ("1.weight", "1.bias", "4.weight", "4.bias")


def run(data=None, **settings):
    """A run with the README's FedBN."""
    return federated_run(methods().FedBN(), data=data or blobs(4), **settings)


@pytest.mark.parametrize("name", ["FedProx", "FedBN"])
def test_a_method_takes_at_most_fifteen_lines(name):
    assert len([line for line in METHOD_BLOCKS[name].splitlines() if line.strip()]) <= 15


def test_fedprox_pulls_clients_to_the_server():
    plain = train(small_cnn("gn"), blobs(), 2, local_steps=3)
    proximal = train(small_cnn("gn"), blobs(), 2, [methods().FedProx(mu=5.0)], local_steps=3)
    start = small_cnn("gn").double().state_dict()
    assert distance(proximal, start) < distance(plain, start)


def test_fedprox_takes_the_gradient_of_its_penalty():
    found = []

    class Gradients(FederatedCallback):
        def on_after_local_backward(self, trainer, pl_module, cohort, step):
            found.append(
                (cohort.grads["0.weight"].clone(), cohort.params["0.weight"] - cohort.server["0.weight"])
            )

    class Again(Gradients):
        pass

    before, after = Gradients(), Again()
    train(small_cnn("gn"), blobs(), 1, [before, methods().FedProx(mu=0.3), after], local_steps=3)
    for (own, distance_to_server), (changed, _) in zip(found[::2], found[1::2], strict=True):
        penalised = distance_to_server.detach().clone().requires_grad_()
        (0.3 / 2 * penalised.square().sum()).backward()
        assert torch.allclose(changed - own, penalised.grad, rtol=0, atol=1e-12)


def test_fedprox_with_one_local_step_or_without_mu_is_fedavg():
    one_step = train(small_cnn("gn"), blobs(), 3, [methods().FedProx(mu=1.0)])
    assert distance(train(small_cnn("gn"), blobs(), 3), one_step) < 1e-12
    plain = train(small_cnn("gn"), blobs(), 2, local_steps=3)
    assert (
        distance(plain, train(small_cnn("gn"), blobs(), 2, [methods().FedProx(mu=0.0)], local_steps=3)) == 0
    )


def test_fedbn_clients_share_weights_and_keep_their_bn_state():
    rows = run().clients
    for round_number in (2, 3):
        clients = rows.start[round_number]
        for client, state in clients.items():
            for name in (*STATISTICS, *AFFINE):
                assert torch.equal(state[name], rows.end[round_number - 1][client][name])
                if client:
                    assert not torch.equal(state[name], clients[0][name])
            assert torch.equal(state["0.weight"], clients[0]["0.weight"])


def test_fedbn_clients_that_are_absent_keep_theirs_untouched_and_new_ones_start_from_the_initial_state():
    rows = run(rounds=8, participation=2).clients
    initial = small_cnn().double().state_dict()
    last, waited = {}, 0
    for round_number in range(1, 9):
        for client, state in rows.start[round_number].items():
            expected = last.get(client, (0, initial))
            waited += expected[0] not in (0, round_number - 1)
            assert all(torch.equal(state[name], expected[1][name]) for name in (*STATISTICS, *AFFINE))
            last[client] = (round_number, rows.end[round_number][client])
    assert waited > 0
    assert len(last) > 2


def test_fedbn_with_one_client_is_that_client_alone():
    federated = run(blobs(1)).module
    alone = train(small_cnn(), blobs(1), 3, local_steps=2)
    assert distance(federated.state_dict(), alone) < 1e-10


def test_fedbn_with_equal_clients_is_fedavg():
    data = blobs(1).clients[0]
    inputs, targets = data.dataset.tensors

    def twins():
        # batches of the whole data set: the order within a batch, which differs, does not matter
        clients = [ArrayClient(inputs, targets, len(targets)) for _ in range(3)]
        return FederatedDataModule(clients, data)

    federated = run(twins()).module
    assert distance(federated.state_dict(), train(small_cnn(), twins(), 3, local_steps=2)) < 1e-10


@pytest.mark.parametrize("server_optimizer", [None, partial(torch.optim.Adam, lr=0.01)])
def test_fedbn_server_evaluates_the_mean_of_the_clients_bn_state(server_optimizer):
    result = run(server_optimizer=server_optimizer)
    for name in (*STATISTICS, *AFFINE):
        mean = torch.stack([state[name] for state in result.clients.end[3].values()]).mean(0)
        assert torch.allclose(result.module.model.state_dict()[name], mean, rtol=1e-12, atol=1e-12)


def test_fedbn_sends_no_bn_state():
    module = run().module
    floats = sum(p.numel() for name, p in module.model.named_parameters() if name not in AFFINE)
    assert module.metrics["comm/upload_bytes"] == module.metrics["comm/download_bytes"] == 4 * 8 * floats


def test_fedbn_is_not_fedavg():
    assert distance(run().states[-1], federated_run(data=blobs(4)).states[-1]) > 1e-3
