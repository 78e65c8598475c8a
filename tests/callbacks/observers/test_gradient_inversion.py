"""Gradient inversion: what is attacked, what the attacker knows, and what the attack shows."""

from itertools import permutations
from math import isfinite

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from fl_lightning import ConfigurationError, FederatedDataModule, VectorizedExecutor
from fl_lightning.callbacks import (
    FBN,
    FedBN,
    FedTAN,
    FixBN,
    GradientInversion,
    PrivateSGD,
    SiloBN,
)
from fl_lightning.callbacks.observers import gradient_inversion, simulated_steps
from fl_lightning.datamodules import Digits, TensorData
from fl_lightning.models.norm import make_norm
from fl_lightning.testing import train
from tests.support.helpers import ArrayClient, SaveRounds, blobs, federated_run, small_cnn, uneven_clients
from tests.support.lightning_sites import Lit, federated, sites

SHORT = {"batch_sizes": [2], "clients": 2, "iterations": 3}


def attacked(*callbacks, norm="bn", data=blobs, rounds=1, trainer=None, **settings):
    """The observer and the metrics of each round."""
    observer = GradientInversion(**{**SHORT, **settings})
    run = federated_run(
        *callbacks, observer, model=small_cnn(norm, 0.0), data=data, rounds=rounds, trainer=trainer
    )
    return observer, run.rows


def known(observer):
    return {(row[0], row[2]) for row in observer.history}


@pytest.mark.parametrize(
    ("callbacks", "norm", "second"),
    [
        (list, "bn", {1, 2, 3}),
        (lambda: [FBN()], "bn", {1, 2, 3}),
        (lambda: [FedTAN()], "bn", {1, 2, 3}),
        (lambda: [FixBN(freeze_round=1)], "bn", {1, 2, 3}),
        (lambda: [SiloBN()], "bn", set()),
        (lambda: [FedBN()], "bn", set()),
        (list, "gn", set()),
    ],
)
def test_the_second_attack_needs_statistics_that_the_server_knows(callbacks, norm, second):
    observer, rows = attacked(*callbacks(), norm=norm, rounds=3)
    assert {number for number, name in known(observer) if name == "and BN"} == second
    for number, row in rows.items():
        assert ("privacy/psnr_batch_2_statistics" in row) == (number in second)


def test_statistics_are_the_batches_before_freezing_and_the_servers_after_it(monkeypatch):
    seen = []
    deviation = gradient_inversion._deviation
    monkeypatch.setattr(
        gradient_inversion,
        "_deviation",
        lambda step, known, places: seen.append(known) or deviation(step, known, places),
    )
    model = small_cnn("bn", 0.0)
    observer = GradientInversion(batch_sizes=[8], clients=2, iterations=1)
    states = federated_run(FixBN(freeze_round=1), observer, model=model, data=blobs(), rounds=2).states
    batch = torch.stack([blobs_batch(row)[0] for row in (0, 1)])
    first = nn.functional.conv2d(batch.flatten(0, 1), *initial_convolution()).unflatten(0, (2, 8))
    torch.testing.assert_close(seen[0]["1"][0], first.mean((1, 3, 4)))
    torch.testing.assert_close(seen[0]["1"][1], first.transpose(1, 2).flatten(2).var(2, correction=0))
    for part, name in enumerate(("running_mean", "running_var")):
        torch.testing.assert_close(seen[1]["1"][part], states[1][f"1.{name}"].expand(2, -1))


def blobs_batch(client):
    data = blobs()
    data.setup("fit")
    return data.cohort_batch([client], [0]).batches()[0]


def initial_convolution():
    layer = small_cnn("bn", 0.0)[0].double()
    return layer.weight.detach(), layer.bias.detach()


@pytest.mark.parametrize("method", ["BN", "FixBN", "FBN", "FedTAN", "SiloBN", "GN"])
def test_samples_of_a_shallow_smooth_network_are_reconstructed_with_every_method(method):
    """A wrong derivative of a layer with respect to the batch would hide what a method gives away."""
    callbacks = {"FixBN": [FixBN(freeze_round=2)], "FBN": [FBN()], "FedTAN": [FedTAN()], "SiloBN": [SiloBN()]}
    norm = "gn" if method == "GN" else "bn"
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), make_norm(norm, 8), nn.Tanh()),
        *(nn.Conv2d(8, 8, 3), make_norm(norm, 8), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )
    observer = GradientInversion(batch_sizes=[1], clients=2, iterations=250)
    data = Digits(num_clients=2, batch_size=20)
    train(model, data, 3, [*callbacks.get(method, []), observer], {"check_val_every_n_epoch": 3})
    found = {
        label: [row[4] for row in observer.history if row[2] == label] for label in ("gradient", "mean image")
    }
    assert min(found["gradient"]) > max(found["mean image"]) + 10


class Scaled(nn.Module):
    def __init__(self, factors):
        super().__init__()
        self.factors = factors

    def forward(self, inputs):
        return inputs * self.factors


def test_the_unit_of_inputs_changes_nothing():
    found = []
    for factors in (torch.ones(4), torch.tensor([1000.0, 1.0, 0.01, 30.0])):
        torch.manual_seed(0)
        data = TensorData(torch.randn(40, 4) * factors, torch.arange(40) % 3, num_clients=2, batch_size=10)
        observer = GradientInversion(batch_sizes=[2], clients=2, iterations=100)
        model = nn.Sequential(Scaled(1 / factors), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        train(model, data, 1, [observer])
        found.append([row[4] for row in observer.history])
    assert found[0] == pytest.approx(found[1], abs=0.1)


def test_a_sample_that_is_not_finite_leaves_out_its_batch_alone():
    data = blobs()
    data.clients[1].dataset.tensors[0].fill_(float("nan"))
    observer = GradientInversion(batch_sizes=[2], clients=3, iterations=1)
    federated_run(observer, model=small_cnn("bn", 0.0), data=data, rounds=1, on_divergence="drop")
    assert {row[3] for row in observer.history} == {0, 2}
    assert all(isfinite(score) for row in observer.history for score in row[4:])


def test_a_run_without_an_attack_says_so():
    observer, _ = attacked(batch_sizes=[64])
    assert observer.result_lines() == {"inverted gradient": "no client could be attacked at batch size 64"}


def test_noise_of_differential_privacy_reaches_the_attacker():
    targets = {}
    for name, settings in {
        "exact": {"clip": 1e9, "noise": 0.0},
        "noisy": {"clip": 0.1, "noise": 10.0},
    }.items():
        torch.manual_seed(0)
        data = TensorData(
            torch.randn(60, 4), torch.arange(60) % 3, num_clients=2, batch_size=20, sampling="poisson"
        )
        observer = GradientInversion(batch_sizes=[1], clients=2, iterations=300)
        train(nn.Linear(4, 3), data, 1, [PrivateSGD(**settings), observer])
        targets[name] = [row[4] for row in observer.history if row[2] == "gradient"]
    assert min(targets["exact"]) > max(targets["noisy"]) + 5


def test_a_round_without_an_attack_logs_none():
    data = uneven_clients((8, 3, 5))
    observer = GradientInversion(batch_sizes=[4], clients=3, iterations=1)
    run = federated_run(
        observer, model=small_cnn("bn", 0.0), data=data, rounds=8, local_steps=1, participation=1
    )
    attacked = {row[0] for row in observer.history}
    assert 0 < len(attacked) < 8
    for number, row in run.rows.items():
        assert ("privacy/psnr_batch_4" in row) == (number in attacked)


def test_dropout_is_off_for_the_client_and_the_attacker():
    found = []
    for dropout in (0.0, 0.5):
        observer = GradientInversion(**SHORT)
        federated_run(observer, model=small_cnn("bn", dropout), data=blobs, rounds=1)
        found.append(observer.history)
    assert found[0] == found[1]


def test_a_client_that_sends_no_gradient_is_not_attacked():
    data = TensorData(
        torch.randn(60, 2, 3, 3), torch.arange(60) % 3, num_clients=2, batch_size=20, sampling="poisson"
    )
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 3))
    private = PrivateSGD(clip=1.0, noise=1.0, second_stage_only=True)
    observer = GradientInversion(batch_sizes=[1, 2], clients=2, iterations=2)
    train(model, data, 1, [FixBN(freeze_round=1), private, observer])
    # one sample has no batch statistics, so that the client sends the gradient 0
    assert {row[1] for row in observer.history} == {2}


@pytest.mark.parametrize("every", [1, 2])
def test_it_attacks_rounds_with_an_evaluation_and_the_last(every):
    observer, _ = attacked(rounds=3, trainer={"check_val_every_n_epoch": every})
    assert {row[0] for row in observer.history} == ({1, 2, 3} if every == 1 else {2, 3})


def test_the_metric_is_the_mean_over_clients_of_the_best_order():
    observer, rows = attacked(rounds=1)
    for label, name in {"gradient": "", "and BN": "_statistics", "mean image": "_mean_image"}.items():
        for place, score in enumerate(("psnr", "correlation"), 4):
            values = [row[place] for row in observer.history if row[2] == label]
            assert len(values) == 2
            assert rows[1][f"privacy/{score}_batch_2{name}"] == pytest.approx(sum(values) / 2)
    true, guess = torch.rand(3, 2, 4, 4), torch.rand(3, 2, 4, 4)
    best = min((guess[[*order]] - true).square().mean() for order in permutations(range(3)))
    matched = gradient_inversion._matched(guess, true)
    assert (matched - true).square().mean() == best
    psnr = gradient_inversion._psnr(matched, true, 2.0)
    assert psnr == pytest.approx(float(10 * torch.log10(4 / best)), abs=1e-4)


def test_the_mean_image_and_the_range_are_those_of_whole_first_batches_without_the_victims():
    observer, _ = attacked(rounds=1, clients=1)
    batches = torch.stack([blobs_batch(client)[0] for client in range(3)])
    # standardised by channel
    batches = (batches - batches.mean((0, 1, 3, 4), keepdim=True)) / batches.std(
        (0, 1, 3, 4), correction=0, keepdim=True
    )
    error = (batches[0, :2] - batches[1:].flatten(0, 1).mean(0)).square().mean()
    span = batches.max() - batches.min()
    (value,) = [row[4] for row in observer.history if row[2] == "mean image"]
    assert value == pytest.approx(float(10 * torch.log10(span**2 / error)), abs=1e-3)


def test_without_other_clients_there_is_no_mean_image():
    observer, rows = attacked(rounds=1, data=lambda: blobs(num_clients=1))
    assert {row[2] for row in observer.history} == {"gradient", "and BN"}
    assert "privacy/psnr_batch_2_mean_image" not in rows[1]


def test_the_correlation_does_not_depend_on_contrast():
    true = torch.rand(3, 2, 4, 4)
    assert gradient_inversion._correlation(0.1 * true + 5, true) == pytest.approx(1, abs=1e-4)
    assert gradient_inversion._correlation(-true, true) == pytest.approx(-1)
    assert gradient_inversion._correlation(torch.ones_like(true), true) == 0
    expected = torch.stack(
        [
            torch.corrcoef(torch.stack(pair))[0, 1]
            for pair in zip(true.flatten(1), true.flip(0).flatten(1), strict=True)
        ]
    )
    assert gradient_inversion._correlation(true.flip(0), true) == pytest.approx(
        float(expected.mean()), abs=1e-5
    )


def test_statistics_deviate_by_their_mean_squared_relative_errors():
    step = simulated_steps.Step({}, {"bn": torch.tensor([[1.0, 2.0]])}, {"bn": torch.tensor([[3.0, 4.0]])})
    known = {"bn": (torch.tensor([[1.5, 4.0]]), torch.tensor([[2.0, 1.0]]))}
    # errors of the means 0.25 + 4 over variances 2 + 1, and of the variances 1 + 9 over 4 + 1
    assert gradient_inversion._deviation(step, known, [0]).tolist() == pytest.approx([4.25 / 3 + 10 / 5])


@pytest.mark.parametrize("callbacks", [list, lambda: [FedTAN()]])
def test_attacked_clients_are_evenly_spaced_in_the_cohort(callbacks):
    observer, _ = attacked(*callbacks(), data=lambda: blobs(num_clients=5), clients=3, iterations=1)
    assert {row[3] for row in observer.history} == {0, 1, 3}
    assert {row[2] for row in observer.history} == {"gradient", "and BN", "mean image"}


def test_small_gradients_have_a_direction_too():
    gradient = [1e-9 * torch.randn(2, 3, 4), 1e-9 * torch.randn(2, 5)]
    distance = gradient_inversion._distance(gradient, [1e-3 * value for value in gradient])
    assert distance.tolist() == pytest.approx([0, 0], abs=1e-5)


def test_clients_with_too_few_samples_are_left_out():
    observer, rows = attacked(data=uneven_clients((8, 3, 5)), batch_sizes=[4, 9], clients=3)
    assert {(row[1], row[3]) for row in observer.history} == {(4, 0), (4, 2)}
    assert not any("batch_9" in name for name in rows[1])


def test_its_results_do_not_depend_on_the_executor():
    first, second = (
        federated_run(
            observer := GradientInversion(**SHORT),
            model=small_cnn("bn", 0.0),
            data=blobs(),
            rounds=2,
            **settings,
        )
        and observer.history
        for settings in ({}, {"executor": VectorizedExecutor()})
    )
    assert [row[:4] for row in first] == [row[:4] for row in second]
    assert [row[4] for row in first] == pytest.approx([row[4] for row in second], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("callbacks", [list, lambda: [FedTAN()]])
def test_nor_on_the_number_of_ranks(callbacks):
    one, two = (
        attacked(*callbacks(), rounds=2, trainer={"devices": ranks, "strategy": "cohort"})[0].history
        for ranks in (1, 2)
    )
    assert len(one) == 12
    assert one == two


def test_a_figure_and_a_table_show_the_attack():
    observer = GradientInversion(**SHORT)
    model = small_cnn("bn", 0.0, channels=1)
    federated_run(observer, model=model, data=blobs(shape=(1, 6, 6)), rounds=1)
    assert observer.tables()["inversion"].columns == (
        "round",
        "batch size",
        "known",
        "client",
        "psnr",
        "correlation",
    )
    ((heading, images),) = observer.images.items()
    assert heading == "batch of 2"
    labels = ("true", "gradient", "and BN", "mean image")
    assert {name: each.shape for name, each in images.items()} == dict.fromkeys(labels, (4, 1, 6, 6))
    figure = observer.figures([])["inversion"](["title"])
    assert sum(len(axes.images) for axes in figure.axes) == 16


def test_inputs_that_are_no_images_have_no_figure():
    observer, _ = attacked(rounds=1)  # two channels
    assert observer.history
    assert not observer.figures([])


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"clients": 0}, "clients"),
        ({"iterations": 0}, "iterations"),
        ({"batch_sizes": [1, 0]}, "batch_sizes"),
        ({"batch_sizes": [[1]]}, "batch_sizes"),
        ({"batch_sizes": [1, 1]}, "batch_sizes"),
    ],
)
def test_wrong_settings_are_named(settings, place):
    with pytest.raises(ConfigurationError, match=f"GradientInversion.{place}"):
        GradientInversion(**settings)


class Attention(nn.Module):
    """Tokens are the rows of an image."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(36, 3)

    def forward(self, images):
        tokens = images[:, 0]
        return self.head(self.layer(tokens).flatten(1))


class Attend(nn.Module):
    def forward(self, tokens):
        return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)


def test_networks_with_attention_are_attacked():
    observer = GradientInversion(**SHORT)
    federated_run(observer, model=Attention(Attend()).double(), data=blobs, rounds=1)
    assert len(observer.history) == 4


def test_a_model_that_has_diverged_ends_no_run():
    model = small_cnn("gn", 0.0)
    nn.init.constant_(model[8].weight, float("nan"))
    observer = GradientInversion(**SHORT)
    federated_run(observer, model=model, data=blobs, rounds=1, on_divergence="record")
    assert all(0 < row[4] < 60 for row in observer.history)


def test_a_resumed_run_keeps_earlier_attacks(tmp_path):
    whole, _ = attacked(rounds=2)
    observer, saves = GradientInversion(**SHORT), SaveRounds(tmp_path)
    federated_run(observer, saves, model=small_cnn("bn", 0.0), data=blobs, rounds=1)
    resumed = GradientInversion(**SHORT)
    federated_run(resumed, model=small_cnn("bn", 0.0), data=blobs, rounds=2, ckpt_path=tmp_path / "1.ckpt")
    assert resumed.history == whole.history
    assert resumed.result() == whole.result()


def test_a_lightning_module_is_refused():
    with pytest.raises(
        ConfigurationError, match="GradientInversion: the attack cannot simulate a LightningModule"
    ):
        federated(Lit(), GradientInversion(), data=sites())


LATE = {"check_val_every_n_epoch": 9}
"""No evaluation before the last round: what cannot be attacked must be refused in round 1."""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: nn.Sequential(Drawing(), nn.Flatten(), nn.Linear(72, 3)),
            "needs torch.func.vmap: .*; leave GradientInversion out",
        ),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72), nn.Linear(72, 3)),
            "batch_sizes: 1: .* one value per channel.*; use more samples, or leave Gr",
        ),
    ],
)
def test_models_that_cannot_be_attacked_are_refused_in_round_1(model, message):
    rounds = []
    with pytest.raises(ConfigurationError, match=f"GradientInversion.*{message}"):
        federated_run(
            GradientInversion(batch_sizes=[1], iterations=1),
            Rounds(rounds),
            model=model().double(),
            data=blobs,
            rounds=3,
            trainer=LATE,
        )
    assert not rounds


class Drawing(nn.Module):
    def forward(self, images):
        return images + torch.randn_like(images)


class Rounds(Callback):
    def __init__(self, rounds):
        self.rounds = rounds

    def on_train_epoch_end(self, trainer, pl_module):
        self.rounds.append(pl_module.round)


def test_batches_that_are_no_pairs_of_numbers_and_targets_are_refused():
    clients = [ArrayClient(torch.arange(16).view(8, 2), torch.arange(8) % 3, 4) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(20, 3), nn.Flatten(), nn.Linear(6, 3)).double()
    with pytest.raises(
        ConfigurationError, match="the clients' batches must be pairs of floating-point inputs"
    ):
        federated_run(
            GradientInversion(), data=FederatedDataModule(clients), model=model, rounds=3, trainer=LATE
        )


def test_inputs_of_different_shapes_are_named():
    clients = [ArrayClient(torch.randn(8, size).double(), torch.arange(8) % 3, 4) for size in (4, 6)]
    model = nn.Sequential(
        nn.Unflatten(1, (1, -1)), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(2, 3)
    ).double()
    with pytest.raises(ConfigurationError, match=r"inputs have the shapes \[4\] and \[6\]"):
        federated_run(GradientInversion(), data=FederatedDataModule(clients), model=model, rounds=1)


def test_targets_of_different_shapes_are_named():
    clients = [ArrayClient(torch.randn(8, 4).double(), torch.zeros(8, size).double(), 4) for size in (1, 2)]

    class Loss(nn.Module):
        def forward(self, outputs, targets):
            return (outputs - targets).square().mean()

    with pytest.raises(ConfigurationError, match=r"targets have the shapes \[1\] and \[2\]"):
        federated_run(
            GradientInversion(),
            data=FederatedDataModule(clients),
            model=nn.Linear(4, 1).double(),
            rounds=1,
            loss=Loss(),
        )


def test_a_layer_without_momentum_is_attacked():
    model = small_cnn("bn", 0.0)
    model[1].momentum = None
    observer = GradientInversion(**SHORT)
    federated_run(observer, model=model, data=blobs, rounds=2)
    assert model[1].momentum is None
    assert len(observer.history) == 12
