"""Clients with fewer samples than a batch train on all their samples as one batch."""

from copy import deepcopy

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning import ConfigurationError, FederatedModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import BNSCAFFOLD, SCAFFOLD, BatchRenormalization, FedBN, FedTAN, FixBN, HybridBN
from fl_lightning.datamodules import TensorData
from fl_lightning.models import TabularMLP
from tests.support.helpers import SGD, distance, fit, train
from tests.support.outcomes import assert_same, outcome, states
from tests.support.recorded_calls import RecordingExecutor

SIZES = {"Bergen": 30, "Bodø": 3, "Oslo": 20, "Tromsø": 6}


def hospitals(sizes=SIZES, **settings):
    draw = torch.Generator().manual_seed(0)
    count = sum(sizes.values())
    features = torch.randn(count, 3, generator=draw)
    groups = [name for name, size in sizes.items() for _ in range(size)]
    tests = {"test_features": features, "test_targets": (features.sum(1) > 0).long()}
    return TensorData(
        features, tests["test_targets"], groups=groups, **tests, **{"batch_size": 8, **settings}
    )


def network(norm="bn"):
    torch.manual_seed(0)
    return TabularMLP(num_classes=2, in_features=3, norm=norm, hidden=(8,))


METHODS = {"FedAvg": list, "FixBN": lambda: [FixBN(freeze_round=2)], "FedBN": lambda: [FedBN()]}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epochs", [True, False])
def test_executors_agree(method, epochs, caplog):
    settings = {"local_steps": None, "local_epochs": 2} if epochs else {"local_steps": 3}

    def run(executor):
        return outcome(network(), hospitals(), executor, METHODS[method](), **settings)

    reference = run(SequentialExecutor(compile=False))
    for size in (1, 2, None):
        assert distance(reference, run(VectorizedExecutor(size))) < 1e-5
    assert distance(reference, run(RecordingExecutor())) == 0
    assert "no CUDA graphs" not in caplog.text


def test_each_client_has_its_own_loss():
    sizes = {
        "Bergen": 30,
        "Bodø": 3,
        "Narvik": 4,
        "Oslo": 20,
        "Tromsø": 6,
    }  # blocks of clients 0 and 3, 1, 2, 4
    losses = []
    for executor in (SequentialExecutor(), VectorizedExecutor()):
        module = FederatedModule(network(), SGD, local_steps=1, executor=executor)
        fit(module, hospitals(sizes), 1, [])
        losses.append([module.record.clients[client][2] for client in range(5)])
    assert len({*losses[0]}) == 5
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
def test_ranks_agree_bit_for_bit(executor):
    runs = [
        states(ranks, hospitals(), network(), executor=executor(), local_steps=None, local_epochs=1)
        for ranks in (1, 2, 3)
    ]
    for run in runs[1:] if executor is SequentialExecutor else ():
        assert_same(runs[0], run)
    for run in runs[1:]:
        assert all(distance(a, b) < 1e-5 for a, b in zip(runs[0], run, strict=True))


def test_a_round_is_that_of_a_hand_computation_with_weights_by_samples():
    data, model = hospitals(), network("ln")
    module = FederatedModule(deepcopy(model), SGD, local_steps=2, weighting="samples")
    fit(module, data, 1, [])
    assert module.plan.weights(range(4), 1).tolist() == [n / 25 for n in (8, 3, 8, 6)]
    mean = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for client, weight in enumerate((8 / 25, 3 / 25, 8 / 25, 6 / 25)):
        own = deepcopy(model)
        optimizer = SGD(own.parameters())
        for step in range(2):
            inputs, targets = data.clients[client].train_batch(step)
            optimizer.zero_grad()
            cross_entropy(own(inputs), targets).backward()
            optimizer.step()
        for name, value in own.state_dict().items():
            mean[name] += weight * value
    assert distance(mean, module.model.state_dict()) < 1e-6


def test_a_run_names_small_clients_once(capsys):
    train(network(), hospitals(), 2)
    named = (
        "2 of 4 clients have fewer samples than batch_size=8, and train on all their samples as one batch: "
    )
    assert capsys.readouterr().out.count(named + "client 1 (Bodø): 3, client 3 (Tromsø): 6\n") == 1


def test_a_client_of_one_sample_trains_unless_batch_norm_needs_two():
    sizes = {**SIZES, "Narvik": 1}
    before = network("ln").state_dict()
    assert distance(before, train(network("ln"), hospitals(sizes), 1)) > 0
    with pytest.raises(ConfigurationError, match=r"one value per channel.* data.min_examples: 2") as raised:
        train(network(), hospitals(sizes), 1)
    assert "computing client 2" in "".join(raised.value.__notes__)
    data = hospitals(sizes, min_examples=2)
    train(network(), data, 1)
    assert data.client_names == [*SIZES]


@pytest.mark.parametrize("method", [BatchRenormalization, BNSCAFFOLD, HybridBN])
def test_a_method_that_normalises_with_a_batch_of_its_own_refuses_one_value_too(method):
    with pytest.raises(ConfigurationError, match=r"one value per channel.* data.min_examples: 2"):
        train(network(), hospitals({**SIZES, "Narvik": 1}), 1, [method()])


def test_a_joint_forward_pass_refuses_small_clients_in_words():
    with pytest.raises(
        ConfigurationError,
        match=r"joint forward pass of FedTAN .* a batch_size that each client's samples fill",
    ):
        train(network(), hospitals(), 1, [FedTAN()])
    train(network(), hospitals(batch_size=3), 1, [FedTAN()])


def test_scaffold_trains_with_small_clients():
    assert distance(network().state_dict(), train(network(), hospitals(), 2, [SCAFFOLD()])) > 0
