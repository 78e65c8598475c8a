"""A client's label mix from what it sends: exact where the mixture is exact, and only from what is sent."""

from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule, VectorizedExecutor
from fl_lightning.callbacks import FBN, FedTAN, FixBN, HybridBN, LabelInference, PrivateSGD, SiloBN
from fl_lightning.callbacks.observers import label_inference
from fl_lightning.clients import Classification
from fl_lightning.datamodules import Digits, Dirichlet, TensorData
from fl_lightning.models import BNProbe, LeNet
from tests.support.helpers import ArrayClient, client_batch, federated_run
from tests.support.lightning_sites import Lit, federated, sites

METRICS = "privacy/label_error_"
COUNTS = ((6, 2, 0), (1, 3, 4))


def of_labels(counts, spread=0.0, seed=0):
    """Inputs and labels: the samples of a class are equal, apart from noise."""
    labels = torch.arange(3).repeat_interleave(torch.tensor(counts))
    noise = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.eye(3, 4, dtype=torch.float64)[labels] + spread * noise, labels


def clients(counts=COUNTS, server=(3, 3, 3), spread=0.0):
    """Clients whose only batch is all their data."""
    own = [ArrayClient(*of_labels(count, spread, seed), sum(count)) for seed, count in enumerate(counts)]
    return FederatedDataModule(own, ArrayClient(*of_labels(server, spread, 9), 8))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def errors(*callbacks, data=clients, model=network, rounds=1, samples=20, **settings):
    """The metrics of each round, by the end of their names."""
    observer = LabelInference(samples)
    run = federated_run(
        *callbacks, observer, data=data, model=model, rounds=rounds, **{"local_steps": 1, **settings}
    )
    return {
        number: {name.removeprefix(METRICS): x for name, x in row.items() if name.startswith(METRICS)}
        for number, row in run.rows.items()
    }


@pytest.mark.parametrize("executor", [None, VectorizedExecutor()])
def test_one_step_of_a_network_without_bn_gives_the_label_mix_away(executor):
    for row in errors(rounds=3, executor=executor).values():
        assert row.keys() == {"update", "guess"}
        assert row["update"] < 1e-6
        # the server has a third of each class: half of |6/8-1/3| + |2/8-1/3| + 1/3, and of |1/8-1/3| + ...
        assert row["guess"] == pytest.approx((5 / 12 + (5 / 24 + 1 / 24 + 4 / 24) / 2) / 2)


@pytest.mark.parametrize(
    "callbacks", [list, lambda: [FBN()], lambda: [FBN(wire="batch")], lambda: [FedTAN()]]
)
def test_so_do_the_means_of_a_layer_that_sees_the_inputs(callbacks):
    for row in errors(*callbacks(), model=lambda: BNProbe(3, 4), rounds=2).values():
        assert row.keys() == {"update", "statistics", "both", "guess"}
        assert row["statistics"] < 1e-6
        assert row["both"] < row["guess"]


def test_statistics_that_clients_keep_are_not_attacked():
    assert errors(SiloBN(), model=lambda: BNProbe(3, 4))[1].keys() == {"update", "guess"}
    rows = errors(FixBN(freeze_round=1), model=lambda: BNProbe(3, 4), rounds=2)
    assert [("statistics" in row, "both" in row) for row in rows.values()] == [(True, True), (False, False)]


def test_several_steps_and_samples_that_differ_leave_an_error_below_that_of_the_guess():
    row = errors(data=lambda: clients(spread=0.3), local_steps=4)[1]
    assert 1e-3 < row["update"] < row["guess"]


def test_an_update_of_another_scale_gives_the_same():
    assert errors(client_optimizer=partial(torch.optim.SGD, lr=1e-3))[1]["update"] < 1e-6


def test_clients_that_send_nothing_about_labels_are_guessed_evenly():
    assert label_inference._shares(torch.eye(3, 5).double(), torch.zeros(5).double()).tolist() == [0, 0, 0]
    row = errors(client_optimizer=partial(torch.optim.SGD, lr=0.0))[1]
    assert row["update"] == pytest.approx(row["guess"])  # the validation data are even, too


def test_shares_are_a_least_squares_solution_without_negative_shares():
    signs = torch.randn(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert label_inference._shares(signs, 2 * signs[0] + signs[2]).tolist() == pytest.approx([2, 0, 1])
    assert label_inference._shares(signs, -signs[0])[0] == 0


def test_shares_of_both_do_not_depend_on_the_scale_of_what_is_sent():
    mix = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    parts = []
    for scale in (2.0, 0.01):
        signatures = torch.randn(
            3, 50, generator=torch.Generator().manual_seed(int(scale)), dtype=torch.float64
        )
        sent = scale * mix @ signatures
        parts.append((signatures, sent[None], label_inference._shares(signatures, sent).sum()))
    observer = LabelInference()
    assert observer._of_both(parts, 0).tolist() == pytest.approx(mix.tolist())


def test_the_true_mix_is_that_of_the_first_batch():
    data = Digits(num_clients=3, batch_size=20, partition=Dirichlet(0.3), val_fraction=0.2)
    observer = LabelInference()
    federated_run(observer, data=data, model=LeNet(in_channels=1, image_size=8, norm="none"), rounds=1)
    for client, mix in enumerate(observer._mixes):
        assert mix.tolist() == client_batch(data, client, 0)[1].bincount(minlength=10).tolist()


def test_noise_of_differential_privacy_hides_the_mix():
    found = {}
    for noise in (0.0, 50.0):
        data = Digits(
            num_clients=3, batch_size=100, partition=Dirichlet(0.1), val_fraction=0.2, sampling="poisson"
        )
        model = LeNet(in_channels=1, image_size=8, norm="none")
        row = errors(PrivateSGD(clip=1.0, noise=noise), data=data, model=model)[1]
        found[noise] = row["update"] / row["guess"]
    assert found[0.0] < 0.5 < found[50.0]


def test_rounds_without_an_evaluation_are_not_attacked():
    run = federated_run(
        LabelInference(), data=clients, model=network, rounds=5, trainer={"check_val_every_n_epoch": 2}
    )
    assert [number for number, row in run.rows.items() if METRICS + "update" in row] == [2, 4, 5]


def test_a_class_without_validation_samples_gets_no_share():
    row = errors(data=lambda: clients(counts=((4, 0, 4), (0, 8, 0)), server=(3, 0, 3)))[1]
    # the update of the second client resembles neither of the other classes: three even shares
    assert row["update"] == pytest.approx((0 + 2 / 3) / 2, abs=1e-6)
    assert row["guess"] == pytest.approx((0 + 1) / 2)


@pytest.mark.parametrize(
    ("label", "settings"),
    [
        (-100, {}),
        (255, {"task": Classification(ignored=255)}),
        (255, {"loss": nn.CrossEntropyLoss(ignore_index=255)}),
        (
            -7,
            {
                "loss": lambda outputs, labels: nn.functional.cross_entropy(
                    outputs, labels.where(labels >= 0, -100)
                )
            },
        ),
    ],
)
def test_labels_that_do_not_count_are_left_out(label, settings):
    def marked():
        data = clients()
        for client in (*data.clients, data.server):
            inputs, labels = client.dataset.tensors
            inputs = torch.cat([inputs, inputs[:1]])
            labels = torch.cat([labels, torch.tensor([label])])
            client.dataset.tensors = inputs, labels
            client.batch_size += 1
        return data

    assert errors(data=marked, **settings)[1]["update"] < 1e-6


def test_class_weights_of_the_loss_are_taken_into_account():
    weights = torch.tensor([1.0, 5.0, 2.0]).double()
    assert errors(loss=nn.CrossEntropyLoss(weight=weights))[1]["update"] < 1e-6


def test_labels_may_be_large():
    """Memory grows with the number of different labels, not with the largest."""
    data = clients()
    for client in (*data.clients, data.server):
        inputs, labels = client.dataset.tensors
        client.dataset.tensors = inputs, labels * 10**12

    class Divided(nn.Module):
        def forward(self, outputs, targets):
            return nn.functional.cross_entropy(outputs, targets // 10**12)

    assert errors(data=data, loss=Divided())[1]["update"] < 1e-6


def test_clients_without_samples_or_with_updates_that_are_not_finite_are_left_out():
    data = TensorData(
        torch.randn(40, 4),
        torch.arange(40) % 3,
        num_clients=4,
        batch_size=1,
        sampling="poisson",
        val_fraction=0.3,
    )
    rows = errors(PrivateSGD(clip=1e9, noise=0.0), data=data, model=lambda: nn.Linear(4, 3), rounds=6)
    assert all(0 <= row.get("update", 0) <= 1 for row in rows.values())

    class Broken(FederatedCallback):
        def on_local_step_end(self, trainer, pl_module, cohort, step):
            cohort.params.blocks[next(iter(cohort.params.blocks))][0] = float("nan")

    for policy in ("record", "drop"):
        assert errors(Broken(), on_divergence=policy)[1]["update"] < 1e-6


def test_statistics_that_a_method_sends_elsewhere_are_not_attacked():
    assert errors(HybridBN(), model=lambda: BNProbe(3, 4))[1].keys() == {"update", "guess"}


def test_a_part_that_tells_nothing_does_not_count_in_both():
    frozen = partial(torch.optim.SGD, lr=0.0)
    row = errors(model=lambda: BNProbe(3, 4), client_optimizer=frozen)[1]
    assert row["both"] == pytest.approx(row["statistics"], abs=1e-12)


def test_data_without_labels_are_refused():
    class Regression(ArrayClient):
        def __init__(self, inputs, targets, batch_size):
            super().__init__(inputs, targets.double()[:, None], batch_size)

    own = [Regression(*of_labels(count), 8) for count in COUNTS]
    data = FederatedDataModule(own, Regression(*of_labels((3, 3, 3)), 8))
    with pytest.raises(ConfigurationError, match=r"the server's targets are \[9, 1\] \(torch.float64\)"):
        errors(data=data, model=nn.Linear(4, 1).double(), loss=nn.MSELoss())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda labels: nn.functional.one_hot(labels, 3), r"targets are \[8, 3\] \(torch.int64\)"),
        (lambda labels: labels > 0, r"targets are \[8\] \(torch.bool\)"),
    ],
)
@pytest.mark.parametrize("whose", ["clients'", "server's"])
def test_targets_that_are_no_labels_are_named(whose, changed, message):
    data = clients(server=(2, 3, 3))
    for client in data.clients if whose == "clients'" else [data.server]:
        inputs, labels = client.dataset.tensors
        client.dataset.tensors = inputs, changed(labels)

    class Cross(nn.Module):
        def forward(self, outputs, targets):
            return nn.functional.cross_entropy(
                outputs, targets.double() if targets.dim() == 2 else targets.long()
            )

    with pytest.raises(ConfigurationError, match=f"LabelInference: the {whose} {message}"):
        errors(data=data, loss=Cross())


def test_evaluation_data_of_different_shapes_are_named():
    data = clients()
    data.val_dataloader = lambda: [(torch.zeros(2, size).double(), torch.zeros(2).long()) for size in (4, 5)]
    with pytest.raises(ConfigurationError, match=r"the server's inputs have the shapes \[4\] and \[5\]"):
        errors(data=data)


def test_evaluation_samples_that_are_not_finite_end_the_attack_but_not_the_run():
    data = clients()
    data.server.dataset.tensors[0][0] = float("nan")
    observer = LabelInference()
    run = federated_run(observer, data=data, model=network(), rounds=1, on_divergence="record")
    assert not any(name.startswith(METRICS) for name in run.rows[1])
    assert observer.result_lines() == {"inferred label mix": "no client could be attacked"}


def test_a_server_that_has_diverged_is_no_attacker():
    def broken():
        model = network()
        nn.init.constant_(model[0].weight, float("nan"))
        return model

    assert not errors(model=broken, on_divergence="record")[1]


def test_one_sample_of_each_class_is_too_few_for_bn():
    with pytest.raises(
        ConfigurationError, match=r"samples: 1: .* one value .*; use more samples, or leave LabelInf"
    ):
        errors(model=lambda: BNProbe(3, 4), samples=1)


def test_wrong_settings_and_a_lightning_module_are_refused():
    with pytest.raises(ConfigurationError, match=r"LabelInference\.samples must be at least 1"):
        LabelInference(0)
    with pytest.raises(ConfigurationError, match="LabelInference: the server cannot simulate"):
        federated(Lit(), LabelInference(), data=sites())
