"""SiloBN: clients keep their running statistics; everything that is trained is FedAvg's, bit for bit."""

from copy import deepcopy
from functools import partial

import pytest
import torch

from fl_lightning import SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FedBN, SiloBN
from tests.support.helpers import (
    SGD,
    SaveRounds,
    blobs,
    client_batch,
    distance,
    federated_run,
    plain_step,
    small_cnn,
)

STATISTICS = [
    f"{layer}.{name}" for layer in (1, 4) for name in ("running_mean", "running_var", "num_batches_tracked")
]
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
ROUNDS = 4


run = partial(federated_run, data=partial(blobs, 4, (24, 40, 32)), rounds=ROUNDS)


def statistics_by_hand(data, steps, participants):
    """The running statistics of every client that took part: those of its own batches."""
    server = small_cnn().double().train()
    kept = [{name: server.state_dict()[name].clone() for name in STATISTICS} for _ in range(data.num_clients)]
    for round_number, members in enumerate(participants):
        ended = []
        for client in members:
            local = deepcopy(server)
            local.load_state_dict({**local.state_dict(), **kept[client]})
            stepper = SGD(local.parameters())
            for step in range(round_number * steps, (round_number + 1) * steps):
                plain_step(local, stepper, client_batch(data, client, step))
            ended.append(local.state_dict())
            kept[client] = {name: ended[-1][name].clone() for name in STATISTICS}
        sizes = [data.num_examples(client) for client in members]
        for name, value in server.named_parameters():
            parts = [size * state[name] for size, state in zip(sizes, ended, strict=True)]
            value.data.copy_(sum(parts) / sum(sizes))
    return {client: kept[client] for client in sorted({c for members in participants for c in members})}


@EXECUTORS
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("participation", [1.0, 2])
def test_everything_trained_is_that_of_fedavg_bit_for_bit(executor, steps, participation):
    settings = {"local_steps": steps, "executor": executor(), "participation": participation}
    states = run(SiloBN(), **settings).states
    fedavg = run(**settings).states
    for own, other in zip(states, fedavg, strict=True):
        trained = {name: value for name, value in own.items() if name not in STATISTICS}
        assert distance(trained, other) == 0
    fedbn = run(FedBN(), **settings).states
    assert distance({n: v for n, v in states[-1].items() if n not in STATISTICS}, fedbn[-1]) > 1e-3


@EXECUTORS
@pytest.mark.parametrize("participation", [1.0, 2])
def test_every_clients_statistics_are_those_of_its_own_batches(executor, participation):
    callback, data = SiloBN(), blobs(4, (24, 40, 32))
    result = run(callback, data=data, executor=executor(), participation=participation)
    participants = [list(result.clients.start[round_number]) for round_number in range(1, ROUNDS + 1)]
    kept = statistics_by_hand(data, 2, participants)
    for client, state in callback.variants(None, result.module).items():
        expected = kept.get(int(client), {})
        assert state.keys() == expected.keys()
        assert not expected or distance(expected, state) < 1e-10
    first, second, *_ = kept.values()
    assert distance(first, second) > 0.1


class Averaged(SiloBN):
    """A mutation: the server's statistics take the place of what a client kept."""

    def on_round_start(self, trainer, pl_module, cohort):
        pass


class ByRow(SiloBN):
    """A mutation: memory belongs to a place in the cohort instead of a client."""

    def on_round_start(self, trainer, pl_module, cohort):
        clients, cohort.client_ids = cohort.client_ids, list(range(len(cohort)))
        cohort.recall(self.memory)
        cohort.client_ids = clients

    def on_before_aggregate(self, trainer, pl_module, cohort):
        clients, cohort.client_ids = cohort.client_ids, list(range(len(cohort)))
        cohort.remember(self.memory)
        cohort.client_ids = clients


@pytest.mark.parametrize("mutation", [Averaged, ByRow])
def test_statistics_of_others_would_be_seen(mutation):
    callback, data = mutation(), blobs(4, (24, 40, 32))
    result = run(callback, data=data, participation=2)
    participants = [list(result.clients.start[round_number]) for round_number in range(1, ROUNDS + 1)]
    kept = statistics_by_hand(data, 2, participants)
    found = callback.variants(None, result.module)
    gaps = [distance(state, found[str(client)]) for client, state in kept.items() if found[str(client)]]
    assert max(gaps) > 1e-2


def test_memory_that_is_not_saved_would_be_seen_after_a_resume(tmp_path):
    class Forgetful(SiloBN):
        def state_dict(self):
            return {}

    for method, same in ((SiloBN, True), (Forgetful, False)):
        whole = run(method(), SaveRounds(tmp_path), participation=2).module
        resumed = run(method(), participation=2, ckpt_path=tmp_path / "2.ckpt").module
        assert (distance(whole.state_dict(), resumed.state_dict()) == 0) is same


def test_the_servers_statistics_are_the_mean_over_the_rounds_clients():
    result = run(SiloBN(), participation=2, weighting="uniform")
    ended = result.clients.end[ROUNDS].values()
    for name in (name for name in STATISTICS if "running" in name):
        mean = torch.stack([state[name] for state in ended]).mean(0)
        assert torch.allclose(result.module.state_dict()[name], mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_client_that_has_not_taken_part_is_evaluated_with_the_servers_statistics(rounds):
    callback, data = SiloBN(), blobs(4)
    result = run(callback, data=data, rounds=rounds, participation=1, trainer={"limit_val_batches": None})
    seen = {client for clients in result.clients.start.values() for client in clients}
    assert len(seen) < 4
    own = []
    for client in range(4):
        model = deepcopy(result.module.model).eval()
        if client in seen:
            model.load_state_dict(
                {**model.state_dict(), **callback.variants(None, result.module)[str(client)]}
            )
        inputs, targets = data.clients[client].dataset.tensors
        own.append((model(inputs).argmax(1) == targets).double().mean().item())
    assert result.module.metrics["val/own_accuracy"] == pytest.approx(sum(own) / 4, abs=1e-6)


def test_personal_accuracy_comes_from_the_statistics_alone():
    callback, data = SiloBN(), blobs(3)
    module = run(callback, data=data, trainer={"limit_val_batches": None}).module
    personal = []
    for client in range(3):
        model = deepcopy(module.model).eval()
        model.load_state_dict({**model.state_dict(), **callback.variants(None, module)[str(client)]})
        with torch.no_grad():
            right = [model(inputs).argmax(1) == targets for inputs, targets in data.val_dataloader()]
        personal.append(torch.cat(right).double().mean().item())
    assert module.metrics["val/personal_accuracy"] == pytest.approx(sum(personal) / 3, abs=1e-6)
    assert len(set(personal)) > 1
