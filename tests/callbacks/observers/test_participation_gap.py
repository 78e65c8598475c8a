"""Clients that never train: their choice, and the participation gap of six clients by hand."""

from copy import deepcopy
from functools import partial
from statistics import fmean

import pytest
import torch
from torch.nn import functional as F

from fl_lightning import ConfigurationError, FederatedDataModule, FederatedModule
from fl_lightning.callbacks import ClientEvaluation, FedBN, ParticipationGap, SiloBN
from fl_lightning.client_data.held_out import clients_in_order
from fl_lightning.datamodules import Digits, Dirichlet, Shards, TensorData
from fl_lightning.methods import adapt_statistics, entropy_steps, moving_statistics
from tests.support.helpers import (
    ArrayClient,
    blobs,
    client_batch,
    distance,
    federated_run,
    fit,
    small_cnn,
    train,
)
from tests.support.lightning_sites import Lit, Site

EVALUATED = {"limit_val_batches": 1.0}
NAMES = ("a", "b", "c", "d", "e", "f")


def federation(held_out=2, seed=0, named=False):
    data = blobs(6, (24, 40, 32))
    clients = dict(zip(NAMES, data.clients, strict=True)) if named else data.clients
    return FederatedDataModule(clients, data.server, seed=seed, held_out=held_out)


def accuracy(model, data, client):
    (inputs, labels), *rest = data.own_dataloader(client, "val")
    assert not rest
    with torch.no_grad():
        return float((model.eval()(inputs).argmax(1) == labels).double().mean())


def fine_tuned(model, data, client, lr):
    """Plain training of the last layer in eval mode, for an epoch."""
    model.eval()
    optimizer = torch.optim.SGD(model[8].parameters(), lr)
    for step in range(data.steps_per_epoch(client)):
        inputs, labels = client_batch(data, client, step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("method", [None, FedBN, SiloBN])
def test_the_gap_of_six_clients_is_that_by_hand(method):
    data, methods = federation(), [method()] if method else []
    gap = ParticipationGap(tau=0.3, tent_lr=0.05)
    run = federated_run(*methods, gap, data=data, rounds=3, trainer=EVALUATED)
    server = small_cnn().double()
    server.load_state_dict({name: x.double() for name, x in run.states[-1].items()})
    expected = {source: {} for source in ("trained", "server", "adabn", "mixture", "tent", "fine_tuned")}
    for client in range(4):
        own = deepcopy(server)
        if method:
            own.load_state_dict({**own.state_dict(), **methods[0].client_model(run.module, client)})
        expected["trained"][client] = accuracy(own, data, client)
    for client in (4, 5):
        batches = [client_batch(data, client, step)[0] for step in range(data.steps_per_epoch(client))]
        expected["server"][client] = accuracy(deepcopy(server), data, client)
        for source, adapt, settings in (
            ("adabn", adapt_statistics, {}),
            ("mixture", moving_statistics, {"tau": 0.3}),
            ("tent", entropy_steps, {"lr": 0.05}),
        ):
            adapt(own := deepcopy(server).eval(), batches, **settings)
            expected[source][client] = accuracy(own, data, client)
        expected["fine_tuned"][client] = accuracy(
            fine_tuned(deepcopy(server), data, client, 0.1), data, client
        )
    found = {source: {c: x["accuracy"] for c, x in values.items()} for source, values in gap.values.items()}
    assert found == {source: pytest.approx(values, abs=1e-6) for source, values in expected.items()}
    logged = {name: float(x) for name, x in run.trainer.callback_metrics.items()}
    trained = expected["trained"].values()
    assert logged["val/trained_accuracy"] == pytest.approx(fmean(trained))
    for source in ("server", "adabn", "mixture", "tent", "fine_tuned"):
        held_out = expected[source].values()
        assert logged[f"val/held_out_accuracy_{source}"] == pytest.approx(fmean(held_out))
        assert logged[f"val/gap_accuracy_{source}"] == pytest.approx(fmean(trained) - fmean(held_out))
        assert logged[f"val/gap_accuracy_{source}_worst"] == pytest.approx(min(trained) - min(held_out))


def test_the_result_table_has_the_means_or_says_what_to_set():
    federated_run(gap := ParticipationGap(["server"]), data=federation(), rounds=2, trainer=EVALUATED)
    means = [fmean(x["accuracy"] for x in gap.values[group].values()) for group in ("trained", "server")]
    lines = {"clients that train": f"{means[0]:.4f}", "never train": f"server {means[1]:.4f}"}
    assert gap.result_lines() == lines
    federated_run(gap := ParticipationGap(), data=federation(0), rounds=2, trainer=EVALUATED)
    assert gap.result_lines() == {
        "never train": "no client; set data.held_out to a number, a fraction or names"
    }


def test_clients_that_never_train_do_not_change_training():
    data = federation()
    four = FederatedDataModule([*data.clients][:4], data.server, seed=0)
    settings = {"rounds": 3, "local_steps": 2, "participation": 2}
    assert distance(train(small_cnn(), federation(), **settings), train(small_cnn(), four, **settings)) == 0
    observed = train(small_cnn(), federation(), callbacks=[ParticipationGap()], trainer=EVALUATED, **settings)
    assert distance(observed, train(small_cnn(), four, **settings)) == 0


def test_the_table_has_every_client_by_name():
    gap = ParticipationGap(["server", "adabn"])
    federated_run(gap, data=federation(["b", "e"], named=True), rounds=2, trainer=EVALUATED)
    table = gap.tables()["held_out"]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["name"], row["trains"]) for row in rows] == [
        *((x, "yes") for x in "acdf"),
        ("b", "no"),
        ("e", "no"),
    ]
    assert [row["samples"] for row in rows] == [24, 32, 24, 32, 40, 40]
    assert [isinstance(row["accuracy_adabn"], float) for row in rows] == [False] * 4 + [True] * 2
    assert [isinstance(row["accuracy_trained"], float) for row in rows] == [True] * 4 + [False] * 2


def test_the_picture_has_every_clients_value_and_the_means():
    federated_run(gap := ParticipationGap(["server"]), data=federation(), rounds=2, trainer=EVALUATED)
    axes = gap.figures([])["held_out"](["title"]).axes[0]
    for points, mean, group in zip(axes.lines, axes.collections, ("trained", "server"), strict=True):
        values = sorted(x["accuracy"] for x in gap.values[group].values())
        assert list(points.get_ydata()) == values
        assert mean.get_segments()[0][0][1] == pytest.approx(fmean(values))
        assert points.get_label() == group


def test_a_number_a_fraction_or_names_choose_the_clients():
    assert federation(2).held_out == federation(2 / 6).held_out == range(4, 6)
    assert federation(["c"], named=True).client_names == ["a", "b", "d", "e", "f", "c"]
    orders = [federation(2, seed, named=True).client_names for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1]
    assert len({*map(tuple, orders)}) == 3


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (
            6,
            "held_out=6 of 6 clients is no client or leaves none to train; use a number from 1 to 5, a fraction below 1, or",
        ),
        (1.0, "held_out=1.0 of 6 clients is no client or leaves none to train"),
        (0.05, "held_out=0.05 of 6 clients is no client"),
        (float("nan"), "held_out=nan of 6"),
        (-1, "held_out=-1 of 6"),
        (["g"], "held_out: there is no client 'g'.*names are a, b, c, d, e, f"),
        ([*NAMES], "held_out names all 6 clients; leave some to train"),
    ],
)
def test_an_impossible_choice_is_refused(held_out, message):
    with pytest.raises(ConfigurationError, match=message):
        federation(held_out, named=True)


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.45])
def test_a_fraction_is_rounded_to_clients(fraction):
    data = Digits(8, partition=Dirichlet(0.5), held_out=fraction)
    data.setup("fit")
    assert len(data.held_out) == round(8 * fraction)
    assert len(federation(fraction).held_out) == round(6 * fraction)


def test_partitioned_data_hold_out_whole_clients_of_the_same_partition():
    everyone, some = (Digits(8, partition=Dirichlet(0.5), held_out=h) for h in (0, 3))
    for data in (everyone, some):
        data.prepare_data()
        data.setup("fit")
    parts = {tuple(part.tolist()) for part in everyone.distribution.clients}
    assert {tuple(part.tolist()) for part in some.distribution.clients} == parts
    assert (some.num_clients, some.held_out) == (5, range(5, 8))
    assert some.describe_partition().endswith("5 clients, and 3 that never train")
    record = some.partition_record()
    assert (record["held_out"], len(record["sizes"]), len(record["class_histogram"])) == (3, 8, 8)


def test_a_table_is_standardised_by_clients_that_train_alone():
    groups = torch.arange(40) % 4
    features = torch.randn(40, 2) + 100.0 * (groups == 3).unsqueeze(1)
    seed = next(seed for seed in range(99) if clients_in_order(1, [], 4, seed)[0][-1] == 3)
    settings = {"batch_size": 4, "held_out": 1, "test_fraction": 0.1, "seed": seed}
    data = TensorData(features, torch.arange(40) % 2, groups=groups, standardize=True, **settings)
    data.setup("fit")
    inputs = data.samples.inputs[torch.cat(data.distribution.clients[:3])]
    assert float(inputs.mean().abs()) < 1e-6
    assert float(data.samples.inputs[data.distribution.clients[3]].mean()) > 50


def test_images_are_scaled_without_the_images_of_clients_that_never_train():
    data = Digits(10, partition=Shards(0.1), held_out=3)  # a class for each client
    data.setup("fit")
    images = data.load().train_images[data.trained()] / 16
    assert torch.allclose(data.normalize.mean.flatten(), images.mean(), atol=1e-6)
    assert torch.allclose(data.normalize.std.flatten(), images.std(correction=0), atol=1e-4)
    everyone = data.load().train_images / 16
    assert abs(float(data.normalize.mean) - float(everyone.mean())) > 1e-4
    held_out = torch.cat(data.distribution.clients[7:])
    assert not torch.isin(data.trained(), held_out).any()


def test_a_method_with_models_of_the_clients_must_come_first():
    with pytest.raises(ConfigurationError, match="put FedBN before ParticipationGap"):
        federated_run(ParticipationGap(), FedBN(), data=federation())


def test_a_client_whose_statistics_cannot_be_computed_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    sites = {f"s{i}": ArrayClient(torch.randn(n, 3), torch.arange(n) % 2, n) for i, n in enumerate((4, 4, 1))}
    data = FederatedDataModule(sites, ArrayClient(torch.randn(4, 3), torch.arange(4) % 2, 4), held_out=["s2"])
    with pytest.raises(ConfigurationError, match="one value per channel") as raised:
        federated_run(ParticipationGap(["adabn"]), data=data, model=model, rounds=1, trainer=EVALUATED)
    assert "adabn of client 2 (s2)" in raised.value.__notes__


def test_a_source_that_the_model_does_not_allow_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"ParticipationGap.sources: adabn needs Batch Normalization"
    ):
        federated_run(
            ParticipationGap(["server", "adabn"]), data=federation(), model=partial(small_cnn, "gn")
        )
    gap = ParticipationGap()
    federated_run(gap, data=federation(), model=partial(small_cnn, "gn"), rounds=2, trainer=EVALUATED)
    assert [*gap.values] == ["trained", "server", "fine_tuned"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": 2}, "ParticipationGap.tau: 2 must be at least 0"),
        ({"sources": ["me"]}, "ParticipationGap.sources: 'me' must be one of"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        ParticipationGap(**settings)


class Scored(Lit):
    def evaluated(self, batch, split):
        super().evaluated(batch, split)
        self.log(f"{split}/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())


def test_clients_of_a_lightning_module_are_drawn_by_its_first_metric():
    data = FederatedDataModule({name: Site(i) for i, name in enumerate(NAMES)}, Site(9))
    fit(FederatedModule(Scored(), local_steps=2), data, 2, [clients := ClientEvaluation()], **EVALUATED)
    drawn = clients.figures([])["clients"]
    assert drawn.args[2] in clients.values[0]


def test_metrics_of_a_lightning_module_keep_their_place():
    data = FederatedDataModule({name: Site(i) for i, name in enumerate(NAMES)}, Site(9), held_out=["b"])
    module, gap = FederatedModule(Scored(), local_steps=2), ParticipationGap(["server", "adabn"])
    metrics = fit(module, data, 2, [gap], **EVALUATED).callback_metrics
    trained, server = (
        fmean(x["val/acc"] for x in gap.values[group].values()) for group in ("trained", "server")
    )
    assert float(metrics["val/gap_acc_server"]) == pytest.approx(trained - server, abs=1e-6)
    assert float(metrics["val/held_out_acc_server"]) == pytest.approx(server)
    assert gap.result_lines()["clients that train"] == f"{trained:.4f}"
    with pytest.raises(ConfigurationError, match="tent a classifier"):
        fit(FederatedModule(Scored(), local_steps=2), data, 2, [ParticipationGap(["tent"])])
