"""StaticBN: HeteroFL's sBN, statistics measured by a pass over the clients' data under the server's weights."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from fl_lightning import (
    ClientFailures,
    ConfigurationError,
    FederatedCallback,
    FederatedDataModule,
    FederatedModule,
)
from fl_lightning.batch_norm.moments import moments
from fl_lightning.callbacks import FBN, FixBN, StaticBN
from fl_lightning.methods import statistics_pass
from fl_lightning.methods.statistics_pass import measured_statistics
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import (
    ArrayClient,
    Rows,
    States,
    blobs,
    client_batch,
    distance,
    fit,
    small_cnn,
    train,
)

MODES = ["pooled", "pooled_total_variance", "per_client", "per_client_total_variance"]
SIZES = (40, 80, 120)
SGD = torch.optim.SGD


def bn_first():
    """A model whose BN layer sees the data themselves, whatever the weights."""
    return nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))


def layer_one(mode, data):
    state = train(bn_first(), data, 1, [StaticBN(mode)])
    return state["0.running_mean"], state["0.running_var"]


def gap(first, second):
    return float((first - second).abs().max())


def is_statistic(name):
    return "running" in name or "num_batches" in name


class Passes(States):
    """What each pass measures after every round, by mode, and whether the pass left everything as it was."""

    def __init__(self):
        super().__init__()
        self.measured, self.untouched = [], True

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        before = deepcopy(pl_module.model.state_dict()), torch.get_rng_state()
        modes = [module.training for module in pl_module.modules()]
        measured = {mode: measured_statistics(trainer, pl_module, mode) for mode in MODES}
        self.measured.append(measured)
        self.untouched &= distance(before[0], pl_module.model.state_dict()) == 0
        self.untouched &= torch.equal(before[1], torch.get_rng_state())
        self.untouched &= modes == [module.training for module in pl_module.modules()]


def two_clients():
    """Means 0 and 10, variance 1."""
    clients = []
    for shift in (0, 10):
        x = torch.randn(400, 2, 6, 6, generator=torch.Generator().manual_seed(shift), dtype=torch.float64)
        x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True, correction=0) + shift
        clients.append(ArrayClient(x, torch.arange(400) % 3, 50))
    return FederatedDataModule(clients)


def test_the_total_variance_pass_gives_the_mean_and_variance_of_the_data_set_for_the_first_layer():
    data = blobs(sizes=SIZES)
    mean, variance = layer_one("per_client_total_variance", data)
    everything = data.server.dataset.tensors[0].transpose(0, 1).flatten(1)
    assert gap(mean, everything.mean(1)) < 1e-10
    assert gap(variance, everything.var(1, correction=0)) < 1e-10
    # averages of batch variances are not the variance of the data set
    assert gap(layer_one("per_client", data)[1], everything.var(1, correction=0)) > 1e-2


def test_two_clients_with_means_0_and_10_and_variance_1_have_variance_26_except_by_themselves():
    mean, variance = layer_one("per_client_total_variance", two_clients())
    assert gap(mean, torch.tensor(5.0)) < 1e-10
    assert gap(variance, torch.tensor(26.0)) < 1e-10
    assert gap(layer_one("pooled", two_clients())[1], torch.tensor(26.0)) < 0.1
    assert gap(layer_one("per_client", two_clients())[1], torch.tensor(1.0)) < 0.1


@pytest.mark.parametrize("mode", ["pooled", "per_client"])
def test_averaging_passes_equal_torch_update_bn_on_the_same_batches(mode):
    data, recorder = blobs(sizes=SIZES), States()
    train(small_cnn(), data, 2, [StaticBN(mode), recorder])
    steps = [data.steps_per_epoch(client) for client in range(3)]
    if mode == "pooled":
        rows = [[client_batch(data, i, k)[0] for i in range(3) if k < steps[i]] for k in range(max(steps))]
        batches = [torch.cat(row) for row in rows]
    else:
        batches = [client_batch(data, i, k)[0] for i in range(3) for k in range(steps[i])]
    reference = small_cnn().double()
    reference.load_state_dict(recorder.states[-1])
    update_bn(batches, reference)
    statistics = {n: v for n, v in reference.state_dict().items() if "running" in n}
    assert len(statistics) == 4
    assert distance(statistics, recorder.states[-1]) < 1e-10
    # with the wrong batches it would not be
    update_bn(batches[1:], reference)
    assert distance({n: reference.state_dict()[n] for n in statistics}, recorder.states[-1]) > 1e-4


def test_a_pass_changes_nothing_draws_nothing_and_is_a_function_of_the_weights():
    recorder = Passes()
    module = FederatedModule(small_cnn(dropout=0.5), SGD, local_steps=2)
    fit(module, blobs(), 2, [recorder])
    assert recorder.untouched
    for mode in MODES:
        first, second = (round_measured[mode] for round_measured in recorder.measured)
        assert any(gap(first[name], second[name]) > 1e-6 for name in first)
        again = measured_statistics(module.trainer, module, mode)
        assert again.keys() == second.keys()
        assert all(torch.equal(again[name], second[name]) for name in again)


def test_dropout_is_off_in_a_pass():
    class EarlyDropout(nn.Sequential):
        def __init__(self, p):
            super().__init__(nn.Dropout(p), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))

    found = []
    for p in (0.0, 0.9):
        state = train(EarlyDropout(p), blobs(), 1, [StaticBN()], client_optimizer=SGD)
        found.append((state["1.running_mean"], state["1.running_var"]))
    assert gap(found[0][0], found[1][0]) == gap(found[0][1], found[1][1]) == 0


@pytest.mark.parametrize(
    ("every", "validate", "changing"), [(3, 1.0, {3, 6, 7}), (1, 1.0, set(range(1, 8))), (1, 0, {7})]
)
def test_the_pass_runs_after_every_round_that_is_evaluated_and_after_the_last(every, validate, changing):
    recorder = States()
    trainer = {"check_val_every_n_epoch": every, "limit_val_batches": validate}
    train(small_cnn(), blobs(), 7, [StaticBN(), recorder], trainer)
    statistics = [{n: v for n, v in state.items() if is_statistic(n)} for state in recorder.states]
    changed = {r for r in range(1, 8) if distance(statistics[r], statistics[r - 1]) > 0}
    assert changed == changing


def test_clients_that_are_not_in_the_cohort_are_measured_too():
    data = blobs(4)
    module = FederatedModule(bn_first(), SGD, local_steps=1, participation=1)
    fit(module, data, 1, [StaticBN("per_client_total_variance")])
    everything = data.server.dataset.tensors[0].transpose(0, 1).flatten(1)
    assert gap(module.state_dict()["0.running_mean"], everything.mean(1)) < 1e-10


def test_all_clients_send_statistics_in_a_pass_and_get_its_weights_where_the_next_round_does_not_send_them():
    seen = []

    class Bytes(States):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append(
                [int(trainer.callback_metrics[f"comm/{way}_bytes"]) for way in ("upload", "download")]
            )

    trainer = {"check_val_every_n_epoch": 2, "limit_val_batches": 1.0}
    train(small_cnn(), blobs(4), 3, [StaticBN(), Bytes()], trainer, participation=2)
    parameters = 8 * sum(p.numel() for p in small_cnn().parameters())
    statistics = 8 * 2 * (4 + 6)
    plain = [2 * parameters, 2 * parameters]
    with_pass, last = ([2 * parameters + 4 * statistics, (2 + others) * parameters] for others in (4 - 2, 4))
    first, second = (set(sample_cohort(4, 2, 0, number)) for number in (1, 2))
    received = [
        len(first),
        len(second - first),
        2,
    ]  # statistics of the start in rounds 1 and 2, of the pass in 3
    expected = [plain, with_pass, last]
    assert seen == [
        [up, down + number * statistics] for (up, down), number in zip(expected, received, strict=True)
    ]


def test_one_value_per_channel_is_explained():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72), nn.Linear(72, 3))
    clients = [ArrayClient(torch.randn(9, 2, 6, 6).double(), torch.arange(9) % 3, 8) for _ in range(2)]
    for client in clients:
        client.train_dataloader = lambda client=client: torch.utils.data.DataLoader(client.dataset, 8)
    with pytest.raises(ConfigurationError, match="one value per channel"):
        train(model, FederatedDataModule(clients), 1, [StaticBN("per_client")])


def test_mistakes_are_named():
    with pytest.raises(
        ConfigurationError, match=r"StaticBN\.statistics_pass: 'all' must be one of pooled, per_client"
    ):
        StaticBN("all")
    with pytest.raises(ConfigurationError, match="StaticBN: the model Sequential has no Batch"):
        train(small_cnn("gn"), blobs(), 1, [StaticBN()])
    for other in (FixBN(freeze_round=1), FBN()):
        with pytest.raises(ConfigurationError, match="cannot be combined"):
            train(small_cnn(), blobs(), 2, [StaticBN(), other])


def test_without_the_variance_between_the_clients_the_total_variance_is_wrong(monkeypatch):
    def mutated(means, variances, weights):
        shares = weights.to(means.dtype).view(-1, 1)
        return (shares * means).sum(0), (shares * variances).sum(0)

    monkeypatch.setattr(statistics_pass, "total_variance", mutated)
    assert gap(layer_one("per_client_total_variance", two_clients())[1], torch.tensor(26.0)) > 20


@pytest.mark.parametrize("mode", ["pooled", "per_client"])
def test_with_biased_batch_variances_the_averages_are_wrong(monkeypatch, mode):
    right = layer_one(mode, blobs(sizes=SIZES))[1]

    def biased(values):
        count, mean, m2 = moments(values)
        return count, mean, m2 * (count - 1) / count

    monkeypatch.setattr(statistics_pass, "moments", biased)
    assert gap(layer_one(mode, blobs(sizes=SIZES))[1], right) > 1e-3


def test_a_run_that_ends_early_has_the_statistics_of_its_final_weights():
    class Stops(FederatedCallback):
        def on_round_end(self, trainer, pl_module, cohort):
            trainer.should_stop = cohort.round == 3

    method = StaticBN("per_client_total_variance")
    module = FederatedModule(small_cnn(), partial(SGD, lr=0.1), local_steps=1)
    settings = {"check_val_every_n_epoch": 5, "limit_val_batches": 1.0}
    trainer = fit(module, blobs(), 10, [method, Stops()], **settings)
    assert trainer.current_epoch == method.measured_round == 3
    assert gap(module.model[1].running_mean, torch.zeros(4)) > 1e-3


def test_statistics_of_an_earlier_round_are_told(capsys):
    method = StaticBN()
    module = FederatedModule(small_cnn(), partial(SGD, lr=0.1), local_steps=1)
    trainer = fit(module, blobs(), 2, [method])
    method.measured_round = 1
    trainer.test(module, datamodule=blobs(), verbose=False)
    assert "are of round 1, weights of round 2" in capsys.readouterr().out


def with_a_layer_in_eval_mode():
    """Three BN layers: the one in the middle is in eval mode, with statistics that are not those of the data."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm2d(2), nn.BatchNorm2d(2).eval(), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3)
    ).double()
    model[1].running_mean.fill_(3.0)
    model[1].running_var.fill_(25.0)
    return model


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")  # meant here
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_the_user_has_put_in_eval_mode_is_neither_measured_nor_changed(mode):
    average = train(with_a_layer_in_eval_mode(), blobs(), 3, local_steps=2)
    static = train(with_a_layer_in_eval_mode(), blobs(), 3, [StaticBN(mode)], local_steps=2)
    trained = [name for name in average if not is_statistic(name)]
    assert distance({n: average[n] for n in trained}, {n: static[n] for n in trained}) == 0
    assert static["1.running_mean"].tolist() == [3, 3]
    assert static["1.running_var"].tolist() == [25, 25]
    # the first layer has zero mean and variance 1 where it normalises with batches; the second makes (x g + b - 3) / 5 of it
    expected = static["1.weight"] * (static["0.bias"] - 3) / (25 + 1e-5) ** 0.5 + static["1.bias"]
    assert gap(static["2.running_mean"], expected) < 1e-6
    assert bool((static["2.running_var"] < 0.2).all())


@pytest.mark.parametrize("mode", MODES)
def test_a_round_that_is_skipped_is_evaluated_with_the_statistics_of_its_weights(mode):
    class Dropped(FederatedCallback):
        """Round 4 is skipped since no update is finite, rounds 2 and 7 by plan."""

        def on_before_aggregate(self, trainer, pl_module, cohort):
            if cohort.round == 4:
                cohort.params["0.weight"].fill_(torch.nan)

    recorder, rows, away = Passes(), Rows(), {client: [[2, 2], [7, 7]] for client in range(3)}
    trainer = {"check_val_every_n_epoch": 2, "limit_val_batches": 1.0}
    method, failures = StaticBN(mode), ClientFailures(schedule=away)
    train(
        small_cnn(), blobs(), 7, [method, Dropped(), recorder, rows], trainer,
        failures=failures, on_divergence="drop", local_steps=2,
    )  # fmt: skip
    assert [rows.rows[r]["clients/skipped"] for r in range(1, 8)] == [0, 1, 0, 1, 0, 0, 1]
    for number in (2, 4, 6, 7):
        for name, measured in recorder.measured[number - 1][mode].items():
            assert gap(recorder.states[number][name], measured) < 1e-10
    # rounds 2 and 4 measure the weights of rounds 1 and 3, and round 7 has nothing new to measure
    statistics, weights = 8 * 2 * (4 + 6), 8 * sum(p.numel() for p in small_cnn().parameters())
    costs = [
        [rows.rows[r][f"comm/{what}"] for what in ("upload_bytes", "download_bytes", "exchanges")]
        for r in range(1, 8)
    ]
    passed = [3 * statistics, 0, 0]
    usual = [3 * weights, 3 * weights, 1]
    assert costs[:2] == [[usual[0], usual[1] + 3 * statistics, 1], passed]
    assert costs[3] == passed
    assert costs[5][:1] == [usual[0] + passed[0]]
    assert costs[6] == [0, 0, 0]


def test_a_last_round_that_is_skipped_has_the_statistics_of_its_weights():
    recorder, rows = Passes(), Rows()
    failures = ClientFailures(schedule={client: [[4, 5]] for client in range(3)})
    module = FederatedModule(small_cnn(), partial(SGD, lr=0.1), local_steps=1, failures=failures)
    trainer = fit(
        module, blobs(), 5, [StaticBN(), recorder, rows], check_val_every_n_epoch=5, limit_val_batches=1.0
    )
    held = module.state_dict()
    for name, measured in recorder.measured[-1]["pooled"].items():
        assert gap(held[name], measured) < 1e-10
    assert rows.rows[5]["comm/exchanges"] == 1
    assert module.record.upload_bytes == sum(row["comm/upload_bytes"] for row in rows.rows.values())
    # the metrics of the last row are those of the weights and statistics that the run ends with
    found = trainer.validate(module, datamodule=blobs(), verbose=False)[0]
    assert found["val/loss"] == pytest.approx(rows.rows[5]["val/loss"], rel=1e-6)
