"""FedBN: clients keep their BN layers, found by type; only the rest is averaged, sent and counted."""

import json
from copy import deepcopy
from functools import partial

import lightning as L
import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedDataModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FedBN, FixBN
from fl_lightning.datamodules import Digits, Shards
from fl_lightning.methods.local_state import LocalState
from fl_lightning.methods.own_data import weighed_accuracy
from fl_lightning.models import LeNet
from tests.support.command_line import run as command
from tests.support.command_line import write_config
from tests.support.helpers import (
    SGD,
    ArrayClient,
    SaveRounds,
    blobs,
    client_batch,
    distance,
    federated_run,
    plain_step,
    small_cnn,
    train,
)
from tests.support.readme_code import methods

BN_STATE = [
    f"{layer}.{name}"
    for layer in (1, 4)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
]
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
EVALUATED = {"limit_val_batches": None}


run = partial(federated_run, data=partial(blobs, 4))


def fedbn_by_hand(model, data, rounds, steps, bn_state=BN_STATE):
    """Separate models whose weights are averaged with equal shares, each with BN layers of its own."""
    clients = [deepcopy(model).double().train() for _ in range(data.num_clients)]
    for round_number in range(rounds):
        for client, local in enumerate(clients):
            stepper = SGD(local.parameters())
            for step in range(round_number * steps, (round_number + 1) * steps):
                plain_step(local, stepper, client_batch(data, client, step))
        for name in clients[0].state_dict():
            held = [local.state_dict()[name] for local in clients]
            if name not in bn_state:
                mean = sum(held) / len(held)
                for value in held:
                    value.copy_(mean)
    return clients


def kept(callback, module, client):
    """What a client keeps, by name."""
    return {name: value.clone() for name, value in callback.variants(None, module)[str(client)].items()}


def accuracy(model, loader):
    """Share of a loader's samples that a model gets right."""
    model = deepcopy(model).eval()
    with torch.no_grad():
        pairs = [(model(inputs).argmax(1) == targets) for inputs, targets in loader]
    return torch.cat(pairs).double().mean().item()


@EXECUTORS
def test_fedbn_equals_separate_models_whose_weights_are_averaged(executor):
    callback, data = FedBN(), blobs(3)
    module = run(callback, data=data, executor=executor()).module
    for client, model in enumerate(fedbn_by_hand(small_cnn(), blobs(3), 3, 2)):
        personal = {**module.state_dict(), **kept(callback, module, client)}
        assert distance(personal, model.state_dict()) < 1e-10


class AffineAveraged(FedBN):
    """A mutation: gamma and beta go to the server."""

    kinds = ("mean", "var", "counter")


class ByRow(FedBN):
    """A mutation: memory belongs to a place in the cohort instead of a client."""

    def _swapped(self, cohort, use):
        clients, cohort.client_ids = cohort.client_ids, list(range(len(cohort)))
        use(self.memory)
        cohort.client_ids = clients

    def on_round_start(self, trainer, pl_module, cohort):
        self._swapped(cohort, cohort.recall)

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self._swapped(cohort, cohort.remember)


class Forgetful(FedBN):
    """A mutation: memory is not saved."""

    def state_dict(self):
        return {}


def test_averaged_gamma_and_beta_would_be_seen():
    callback, data = AffineAveraged(), blobs(3)
    module = run(callback, data=data).module
    clients = fedbn_by_hand(small_cnn(), blobs(3), 3, 2)
    personal = {**module.state_dict(), **kept(callback, module, 0)}
    assert distance(personal, clients[0].state_dict()) > 1e-3


@pytest.mark.parametrize("settings", [{}, {"participation": 2, "local_steps": 1}, {"weighting": "uniform"}])
def test_the_shipped_fedbn_trains_as_the_one_in_the_readme_bit_for_bit(settings):
    data = partial(blobs, 4, (24, 40, 32))
    shipped = run(FedBN(), data=data, rounds=5, trainer=EVALUATED, **settings)
    readme = run(methods().FedBN(), data=data, rounds=5, **settings)
    assert [distance(*pair) for pair in zip(shipped.states, readme.states, strict=True)] == [0.0] * 6
    for round_number, ended in shipped.clients.end.items():
        for client, state in ended.items():
            assert distance(state, readme.clients.end[round_number][client]) == 0


@EXECUTORS
def test_one_client_is_centralised_training(executor):
    module = run(FedBN(), data=blobs(1), executor=executor()).module
    (alone,) = fedbn_by_hand(small_cnn(), blobs(1), 3, 2)
    assert distance(module.state_dict(), alone.state_dict()) < 1e-10


@EXECUTORS
def test_clients_with_the_same_data_are_fedavg_with_bn(executor):
    one = blobs(1).clients[0]
    inputs, targets = one.dataset.tensors

    def twins():
        # batches of the whole data set: the order within a batch, which differs, does not matter
        return FederatedDataModule([ArrayClient(inputs, targets, len(targets)) for _ in range(3)], one)

    module = run(FedBN(), data=twins(), executor=executor()).module
    fedavg = train(small_cnn(), twins(), 3, local_steps=2, executor=executor())
    assert distance(module.state_dict(), fedavg) < 1e-10


def test_clients_share_weights_after_a_round_while_their_bn_state_differs():
    clients = run(FedBN()).clients
    first, *others = clients.start[3].values()
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]) == (name not in BN_STATE or "num_batches" in name)


def waits(clients, initial):
    """How long each returning client was absent, and how far its BN state is from what it left with."""
    last, found = {}, []
    for round_number, started in sorted(clients.start.items()):
        for client, state in started.items():
            since, left = last.get(client, (0, initial))
            gap = distance({name: left[name] for name in BN_STATE}, state)
            found.append((round_number - since - 1 if since else 0, gap))
            last[client] = (round_number, clients.end[round_number][client])
    return found


def test_a_client_that_is_absent_keeps_its_bn_state_bit_for_bit():
    initial = small_cnn().double().state_dict()
    clients = run(FedBN(), rounds=10, participation=2).clients
    found = waits(clients, initial)
    assert max(absent for absent, _ in found) >= 2
    assert all(gap == 0 for _, gap in found)
    clients = run(ByRow(), rounds=10, participation=2).clients
    assert max(gap for _, gap in waits(clients, initial)) > 1e-3


def test_memory_that_is_not_saved_would_be_seen_after_a_resume(tmp_path):
    for method, same in ((FedBN, True), (Forgetful, False)):
        whole = run(method(), SaveRounds(tmp_path), rounds=4, participation=2).module
        resumed = run(method(), rounds=4, participation=2, ckpt_path=tmp_path / "2.ckpt").module
        assert (distance(whole.state_dict(), resumed.state_dict()) == 0) is same


class Misnamed(nn.Module):
    """A BN layer called as ResNets call theirs in a shortcut, and something called ``bn`` that is none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bn = nn.Conv2d(2, 4, 3)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.classifier = nn.Linear(64, 3)

    def forward(self, inputs):
        return self.classifier(self.downsample(self.bn(inputs)).flatten(1))


def test_bn_layers_are_found_by_type_and_not_by_name():
    callback = FedBN()
    result = run(callback, model=Misnamed())
    assert {name.rpartition(".")[0] for name in kept(callback, result.module, 0)} == {"downsample.1"}
    first, second = result.clients.start[3][0], result.clients.start[3][1]
    assert torch.equal(first["bn.weight"], second["bn.weight"])
    assert not torch.equal(first["downsample.1.weight"], second["downsample.1.weight"])


@pytest.mark.parametrize(
    ("kinds", "line"),
    [
        (
            ("affine", "mean"),
            r"the model Sequential has no .*\(affine, mean\), but weight: it needs Batch Norm",
        ),
        (("buffer",), r"the model Sequential has no .*\(buffer\), but weight$"),
        (("fc",), "'fc' is no kind of state .* and no name in the model Sequential; names are 0, 1, 3, 4, 8"),
    ],
)
def test_kinds_that_a_model_does_not_have_are_refused(kinds, line):
    method = type("Own", (LocalState,), {"kinds": kinds})()
    with pytest.raises(ConfigurationError, match=rf"^Own(: |\.){line}"):
        run(method, model=small_cnn("gn"))


def test_fedbn_and_frozen_statistics_are_refused_together():
    with pytest.raises(ConfigurationError, match="callbacks FedBN and FixBN cannot be combined"):
        run(FedBN(), FixBN(freeze_round=1))


@pytest.mark.parametrize("kinds", [FedBN.kinds, ("weight",)])
def test_groups_of_parameters_with_settings_of_their_own_are_kept_as_well(kinds):
    class Keeping(LocalState):
        pass

    Keeping.kinds = kinds
    callback, groups = Keeping(), {"batch_norm": {"lr": 0.02}, "bias": {"lr": 0.3}}
    result = run(callback, parameter_groups=groups)
    for client in range(4):
        state = kept(callback, result.module, client)
        assert ("8.bias" in state) is (kinds == ("weight",))
        assert distance(state, result.clients.end[3][client]) == 0


def personal_models(callback, module):
    """Each client's model, made by hand."""
    for client in range(module.data.num_clients):
        model = deepcopy(module.model)
        model.load_state_dict({**model.state_dict(), **kept(callback, module, client)})
        yield model


@pytest.mark.parametrize("participation", [1.0, 2])
def test_personal_accuracy_is_the_mean_of_every_clients_model_on_the_servers_data(participation):
    callback, data = FedBN(), blobs(4)
    module = run(callback, data=data, rounds=1, trainer=EVALUATED, participation=participation).module
    own = [accuracy(model, data.val_dataloader()) for model in personal_models(callback, module)]
    assert len(set(own)) > 1
    assert module.metrics["val/personal_accuracy"] == pytest.approx(sum(own) / 4, abs=1e-6)
    assert module.metrics["val/accuracy"] == pytest.approx(
        accuracy(module.model, data.val_dataloader()), abs=1e-6
    )


def test_own_accuracy_is_that_on_the_clients_own_loaders_where_they_have_some():
    callback, data = FedBN(), blobs(4)
    module = run(callback, data=data, trainer=EVALUATED).module
    loaders = [client.val_dataloader() for client in data.clients]
    own = [
        accuracy(model, loader)
        for model, loader in zip(personal_models(callback, module), loaders, strict=True)
    ]
    assert module.metrics["val/own_accuracy"] == pytest.approx(sum(own) / 4, abs=1e-6)


def digits(**settings):
    return Digits(num_clients=4, batch_size=10, partition=Shards(0.3), max_examples=300, **settings)


def test_own_accuracy_weighs_classes_as_the_client_has_them_where_there_are_no_loaders():
    callback, data = FedBN(), digits(val_fraction=0.2)
    model = LeNet(in_channels=1, image_size=8)
    module = run(callback, data=data, model=model, trainer={**EVALUATED, "precision": "32-true"}).module
    expected = []
    for client, personal in enumerate(personal_models(callback, module)):
        labels = data.samples.labels[data.clients[client].indices]
        by_class = [
            accuracy(personal, [(x[y == label], y[y == label]) for x, y in data.val_dataloader()])
            for label in labels.tolist()
        ]
        expected.append(sum(by_class) / len(by_class))
    assert module.metrics["val/own_accuracy"] == pytest.approx(sum(expected) / 4, abs=1e-6)
    assert module.metrics["val/own_accuracy"] != pytest.approx(
        module.metrics["val/personal_accuracy"], abs=1e-3
    )


def test_own_accuracy_is_left_out_where_nothing_is_known_of_the_clients():
    class TrainingOnly(L.LightningDataModule):
        def __init__(self, whole):
            super().__init__()
            self.whole = whole

        def train_dataloader(self):
            return self.whole.train_dataloader()

    whole = blobs(3)
    data = FederatedDataModule([TrainingOnly(client) for client in whole.clients], whole.server)
    module = run(FedBN(), data=data, trainer=EVALUATED).module
    assert "val/personal_accuracy" in module.metrics
    assert "val/own_accuracy" not in module.metrics


def test_accuracy_under_other_proportions_leaves_out_classes_without_samples():
    assert weighed_accuracy([1.0, 0.5, None], [1, 3, 100]) == 0.625
    assert weighed_accuracy([None, 0.5], [3, 0]) is None
    assert weighed_accuracy([], [1, 2]) is None


def test_as_many_clients_are_evaluated_as_asked_evenly_spaced():
    seen = []

    class Counting(FedBN):
        def variants(self, trainer, pl_module):
            found = super().variants(trainer, pl_module)
            seen.append(list(found))
            return found

    for count, expected in ((None, "0123456"), (3, "024"), (1, "0"), (100, "0123456")):
        run(Counting(count), data=blobs(7), rounds=1, trainer=EVALUATED)
        assert seen[-1] == list(expected)
    with pytest.raises(ConfigurationError, match=r"FedBN.evaluate_clients: 0 must be at least 1"):
        FedBN(evaluate_clients=0)


def test_a_centralised_run_has_no_clients_to_evaluate():
    module = run(FedBN(), trainer=EVALUATED, centralised=True).module
    assert "val/accuracy" in module.metrics
    assert {name for name in module.metrics if name.startswith("val/")} == {"val/accuracy", "val/loss"}


def test_personalised_evaluation_leaves_no_trace_in_the_training():
    without = run(FedBN(), rounds=4).states
    states = run(FedBN(), rounds=4, trainer={**EVALUATED, "num_sanity_val_steps": -1}).states
    assert [distance(own, other) for own, other in zip(states, without, strict=True)] == [0.0] * 5


def test_the_table_of_a_run_and_its_later_evaluation_show_the_personalised_models():
    write_config({"trainer.callbacks": [{"class_path": "FedBN"}]})
    result = json.loads(command().attempt.result.read_text())
    names = [name for name in result if "/" in name]
    measures = ("own_accuracy", "personal_accuracy", "loss", "accuracy")  # what the method is for comes first
    assert names == [f"{split}/{name}" for split in ("val", "test") for name in measures]
    assert result["test/personal_accuracy"] != result["test/accuracy"]
    for stage, split in (("validate", "val"), ("test", "test")):
        again = command("--ckpt_path", "last", command=stage).trainer.callback_metrics
        for name in measures:
            assert float(again[f"{split}/{name}"]) == pytest.approx(result[f"{split}/{name}"], abs=1e-6)


def test_the_clients_own_test_data_are_set_up_when_only_testing(tmp_path):
    stages = []

    class Careful(ArrayClient):
        def setup(self, stage):
            stages.append(stage)

    whole = blobs(3)
    data = FederatedDataModule([Careful(*c.dataset.tensors, 8) for c in whole.clients], whole.server)
    module = run(FedBN(), SaveRounds(tmp_path), data=whole).module
    trainer = L.Trainer(
        callbacks=[FedBN()], accelerator="cpu", precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (metrics,) = trainer.test(module, data, ckpt_path=tmp_path / "3.ckpt", verbose=False)
    assert stages == ["test"] * 3
    trainer.test(module, data, ckpt_path=tmp_path / "3.ckpt", verbose=False)
    assert stages == ["test"] * 3
    assert metrics["test/own_accuracy"] != metrics["test/personal_accuracy"]
