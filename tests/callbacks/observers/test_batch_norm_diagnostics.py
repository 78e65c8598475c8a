"""BatchNormDiagnostics: it changes nothing, and its numbers are what can be computed by hand."""

from copy import deepcopy
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedCallback, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FBN, BatchNormDiagnostics, FedTAN, FixBN, StaticBN
from fl_lightning.callbacks.observers import batch_norm_diagnostics
from fl_lightning.callbacks.observers.batch_norm_diagnostics import MAX_ROUNDS
from fl_lightning.callbacks.observers.measurements import mean_variance, statistics_bias
from fl_lightning.methods.statistics_pass import measured_statistics
from fl_lightning.methods.variant_evaluation import mixed_batches
from tests.support.helpers import SaveRounds, blobs, client_batch, federated_run, small_cnn, uneven_clients

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
ALL = ["statistics", "gradients", "gap", "bias"]
EVALUATED = {"limit_val_batches": 1.0, "check_val_every_n_epoch": 2}
BN = (1, 4)


run = partial(federated_run, data=uneven_clients, rounds=4, local_steps=1)


def diagnostics(**settings):
    return BatchNormDiagnostics(**{"every_n_rounds": 1, "measure": ALL, **settings})


def statistics(state):
    """Running means and variances of both BN layers, ``[2, channels]``."""
    return torch.stack([torch.cat([state[f"{i}.running_{n}"] for i in BN]) for n in ("mean", "var")])


def batch_statistics(state, batch, training=True):
    """Mean and unbiased variance of what each BN layer is given, ``[2, channels]``, by plain PyTorch."""
    model = small_cnn().double()
    model.load_state_dict(state)
    model.train(training)
    found = []
    with torch.no_grad():
        for layer in BN:
            values = deepcopy(model)[:layer](batch[0]).transpose(0, 1).flatten(1)
            found.append(torch.stack([values.mean(1), values.var(1)]))
    return torch.cat(found, 1)


def without_times(row):
    return {name: value for name, value in row.items() if not name.startswith("time/")}


class Draws(FederatedCallback):
    """Draws from the global generator and moves the clients by it."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for gradient in cohort.grads.values():
            gradient.add_(0.01 * torch.randn_like(gradient))

    def on_round_end(self, trainer, pl_module, cohort):
        self.last = torch.rand(3)


class Noise(nn.Module):
    """A layer that draws for itself."""

    def forward(self, inputs):
        return inputs + 0.1 * torch.randn_like(inputs)


@EXECUTORS
@pytest.mark.parametrize("local_steps", [1, 2])
def test_training_is_the_same_bit_for_bit_whatever_draws_random_numbers(local_steps, executor):
    found = []
    for watched in ([], [diagnostics()]):
        model, draws = small_cnn(dropout=0.3), Draws()
        if executor is SequentialExecutor:
            model.insert(7, Noise())
        settings = {"executor": executor(), "local_steps": local_steps, "participation": 2, "data": blobs()}
        module, _, states, *_ = run(*watched, draws, model=model, trainer=EVALUATED, **settings)
        found.append((states, draws.last, module.metrics["val/loss"]))
    (without, drawn, loss), (watched, drawn_too, loss_too) = found
    assert all(
        torch.equal(one[name], two[name]) for one, two in zip(without, watched, strict=True) for name in one
    )
    assert torch.equal(drawn, drawn_too)
    assert loss == loss_too


@pytest.mark.parametrize(
    "method", [list, lambda: [FBN()], lambda: [FedTAN()], lambda: [FixBN(freeze_round=1)]]
)
def test_the_model_and_the_cohort_are_left_as_they_were(method):
    class Watch(FederatedCallback):
        def __init__(self):
            self.seen = []

        def on_after_local_backward(self, trainer, pl_module, cohort, step):
            modes = [layer.training for layer in pl_module.model.modules()]
            hooks = [len(layer._forward_hooks) for layer in pl_module.model.modules()]
            names = [name for name, _ in pl_module.model.named_buffers()]
            blocks = [
                b.clone() for r in (cohort.params, cohort.grads, cohort.buffers) for b in r.blocks.values()
            ]
            self.seen.append((modes, hooks, names, id(pl_module.client.slots), torch.get_rng_state(), blocks))

    before, after = Watch(), type("After", (Watch,), {})()
    run(before, diagnostics(), after, *method(), model=small_cnn(dropout=0.2))
    for one, two in zip(before.seen, after.seen, strict=True):
        assert one[:4] == two[:4]
        assert all(torch.equal(*pair) for pair in zip(one[5], two[5], strict=True))


@EXECUTORS
def test_every_row_of_a_resumed_run_is_equal_bit_for_bit(executor, tmp_path):
    settings = {"participation": 2, "executor": executor(), "rounds": 7}
    settings["trainer"] = {**EVALUATED, "check_val_every_n_epoch": 3}
    whole = run(diagnostics(every_n_rounds=2, window=2), SaveRounds(tmp_path), **settings).rows
    for start in (1, 2, 5):
        watched = diagnostics(every_n_rounds=2, window=2)
        resumed = run(watched, ckpt_path=tmp_path / f"{start}.ckpt", **settings).rows
        assert set(resumed) >= set(range(start + 1, 8))
        for number, row in resumed.items():
            assert without_times(row) == without_times(whole[number])
        assert any("bn/window_variance" in row for row in resumed.values())


@EXECUTORS
def test_change_and_deviation_of_statistics_are_those_of_plain_pytorch(executor):
    data = uneven_clients()
    _, rows, states, *_ = run(diagnostics(), executor=executor(), data=data)
    weights = torch.tensor([24, 60, 40]).double() / 124
    for number, row in rows.items():
        start, end = statistics(states[number - 1]), statistics(states[number])
        own = [batch_statistics(states[number - 1], client_batch(data, i, number - 1)) for i in range(3)]
        apart = [(clients - start).abs().sum() for clients in own]
        by_hand = float(sum(w * a for w, a in zip(weights, apart, strict=True)))
        assert row["bn/local_deviation"] == pytest.approx(by_hand, rel=1e-10)
        assert row["bn/local_deviation_per_float"] == pytest.approx(by_hand / 20, rel=1e-10)
        assert row["bn/global_change"] == pytest.approx(float((end - start).abs().sum()), rel=1e-10)
        assert abs(float(sum(apart) / 3) - by_hand) > 1e-3 * by_hand  # equal weights would be noticed


@EXECUTORS
def test_under_frozen_statistics_the_clients_own_are_measured_all_the_same(executor):
    data = uneven_clients()
    _, rows, states, *_ = run(diagnostics(), FixBN(freeze_round=2), executor=executor(), data=data)
    weights = torch.tensor([24, 60, 40]).double() / 124
    for number in (3, 4):
        start = statistics(states[number - 1])
        own = [
            batch_statistics(states[number - 1], client_batch(data, i, number - 1), False) for i in range(3)
        ]
        by_hand = sum(w * (clients - start).abs().sum() for w, clients in zip(weights, own, strict=True))
        assert rows[number]["bn/local_deviation"] == pytest.approx(float(by_hand), rel=1e-10)
        assert rows[number]["bn/global_change"] == 0


@pytest.mark.parametrize("method", [FBN, lambda: StaticBN("pooled")])
def test_the_change_is_seen_whichever_callback_sets_the_statistics(method):
    for callbacks in ([diagnostics(), method()], [method(), diagnostics()]):
        _, rows, states, *_ = run(*callbacks, trainer=EVALUATED)
        for number, row in rows.items():
            change = float((statistics(states[number]) - statistics(states[number - 1])).abs().sum())
            assert row["bn/global_change"] == pytest.approx(change, rel=1e-10)


@EXECUTORS
def test_the_window_holds_each_clients_last_statistics_and_no_more(executor, monkeypatch):
    data, watched = uneven_clients(), diagnostics(window=3)
    _, rows, states, *_ = run(watched, rounds=5, executor=executor(), data=data)
    variances = []
    for client in range(3):
        own = [batch_statistics(states[r], client_batch(data, client, r)).flatten() for r in (2, 3, 4)]
        assert torch.allclose(watched.windows[client], torch.stack(own), rtol=1e-10, atol=1e-12)
        variances.append(torch.stack(own).var(0).mean())
    assert rows[5]["bn/window_variance"] == pytest.approx(float(sum(variances) / 3), rel=1e-9)
    assert "bn/window_variance" not in rows[1]
    monkeypatch.setattr(batch_norm_diagnostics, "WINDOW_CLIENTS", 2)
    few = diagnostics(window=3)
    run(few, rounds=5)
    assert {client: len(rows) for client, rows in few.windows.items()} == {0: 3, 1: 3}


def test_a_client_seen_once_has_no_variance():
    assert mean_variance([torch.ones(1, 4)]) is None
    found = mean_variance([torch.ones(1, 2), torch.tensor([[0.0, 1.0], [2.0, 1.0]])])
    assert found.tolist() == [2.0, 0.0]


def test_statistics_of_the_pooled_pass_have_no_bias_and_no_recalibration_gap():
    for callbacks in ([diagnostics()], [diagnostics(), StaticBN("pooled_total_variance")]):
        rows = run(*callbacks, trainer=EVALUATED).rows
        found = [rows[4][f"bn/{name}"] for name in ("mean_bias", "var_bias", "recalibration_gap")]
        if len(callbacks) == 2:
            assert found == [0, 0, 0]
        else:
            assert min(found[:2]) > 0.05
        assert "bn/mean_bias" not in rows[1]


def pooled_moments(model, data):
    """Mean and biased variance ``[2, channels]`` of each BN layer's inputs, batches being the unions of all clients'."""
    steps, seen = [data.steps_per_epoch(client) for client in range(3)], {layer: [] for layer in BN}
    model = deepcopy(model).train()
    for step in range(max(steps)):
        inputs = torch.cat([client_batch(data, i, step)[0] for i in range(3) if step < steps[i]])
        for layer in BN:
            with torch.no_grad():
                seen[layer].append(deepcopy(model)[:layer](inputs).transpose(0, 1).flatten(1))
    values = [torch.cat(found, 1) for found in seen.values()]
    return [torch.stack([layer.mean(1), layer.var(1, correction=0)]) for layer in values]


def test_the_pooled_pass_has_the_moments_of_all_values_of_the_union_batches_in_deep_layers_too():
    data, watched = uneven_clients(), diagnostics()
    module, rows, *_ = run(watched, data=data, trainer=EVALUATED)
    by_hand = pooled_moments(module.model, data)
    pooled, own = (
        measured_statistics(module.trainer, module, f"{mode}_total_variance")
        for mode in ("pooled", "per_client")
    )
    apart = []
    for layer, wanted in zip(map(str, BN), by_hand, strict=True):
        names = (f"{layer}.running_mean", f"{layer}.running_var")
        together, apart_by = (torch.stack([found[name] for name in names]) for found in (pooled, own))
        assert torch.allclose(together, wanted, rtol=1e-10, atol=1e-12)
        apart.append(float((apart_by - wanted).norm() / wanted.norm()))
    assert apart[0] < 1e-12
    assert apart[1] > 0.05  # clients that normalise by themselves lose their differences
    true = {
        f"{layer}.running_{kind}": value
        for layer, wanted in zip(BN, by_hand, strict=True)
        for kind, value in zip(("mean", "var"), wanted, strict=True)
    }
    biases = statistics_bias(module.state_dict(), true, [str(layer) for layer in BN])
    for name, values in zip(("mean_bias", "var_bias"), biases, strict=True):
        assert rows[4][f"bn/{name}"] == pytest.approx(sum(values) / 2, rel=1e-9)


def test_bias_is_relative_to_the_true_statistics():
    true = {"a.running_mean": torch.tensor([0.0, 0.0]), "a.running_var": torch.tensor([4.0, 12.0])}
    held = {"a.running_mean": torch.tensor([1.0, 0.0]), "a.running_var": torch.tensor([1.0, 8.0])}
    means, variances = statistics_bias(held, true, ["a"])
    assert means == pytest.approx([1 / 4])
    assert variances == pytest.approx([5 / 160**0.5])


def test_the_gap_is_running_minus_batch_statistics():
    data = uneven_clients()
    _, rows, states, *_ = run(diagnostics(), trainer=EVALUATED, data=data)
    right = {True: 0, False: 0}
    model = small_cnn().double()
    loader = data.val_dataloader()
    for training, batches in ((False, loader), (True, mixed_batches(loader, len(loader)))):
        for inputs, targets in batches:
            model.load_state_dict(states[4])
            right[training] += int((model.train(training)(inputs).argmax(1) == targets).sum())
    count = len(data.server.dataset)
    assert rows[4]["val/accuracy_batch_statistics"] == pytest.approx(right[True] / count)
    assert rows[4]["bn/train_eval_gap"] == pytest.approx((right[False] - right[True]) / count, abs=1e-6)
    assert right[False] != right[True]


def test_only_what_is_chosen_is_measured():
    prefixes = {
        "statistics": ("bn/local_deviation", "bn/global_change", "bn/window_variance"),
        "gradients": ("bn/gradient_deviation",),
        "gap": ("bn/train_eval_gap",),
        "bias": ("bn/mean_bias", "bn/var_bias", "bn/recalibration_gap"),
    }
    for chosen, names in prefixes.items():
        rows = run(diagnostics(measure=[chosen]), rounds=2, trainer=EVALUATED).rows
        found = {name for name in rows[2] if name.startswith("bn/")}
        assert all(any(name.startswith(prefix) for name in found) for prefix in names)
        assert all(name.startswith(names) for name in found)


class WithSpare(nn.Module):
    """A model with a BN layer that its forward pass never calls."""

    def __init__(self, model):
        super().__init__()
        self.model, self.spare = model, nn.BatchNorm2d(3)

    def forward(self, inputs):
        return self.model(inputs)


@EXECUTORS
def test_a_layer_that_is_not_called_does_not_deviate(executor):
    settings = {"executor": executor(), "trainer": EVALUATED}
    watched = diagnostics()
    rows = run(watched, model=WithSpare(small_cnn()), **settings).rows
    wanted = run(diagnostics(), **settings).rows
    for number, row in rows.items():
        for name in ("local_deviation", "global_change", "gradient_deviation", "mean_bias", "train_eval_gap"):
            if f"bn/{name}" in row:
                assert row[f"bn/{name}"] == pytest.approx(wanted[number][f"bn/{name}"])
    for quantity in ("local_deviation_mean", "global_change_var", "window_variance_mean"):
        assert all(layers["spare"] == 0 for layers in watched._by_quantity()[quantity].values())


def test_a_second_fit_starts_anew_and_one_that_goes_on_does_not():
    watched = diagnostics()
    run(watched, rounds=6, trainer={"limit_val_batches": 1.0})
    module = run(watched, model=small_cnn(seed=1)).module
    alone = diagnostics()
    run(alone, model=small_cnn(seed=1))
    assert sorted(watched._by_quantity()["gradient_deviation"]) == [1, 2, 3, 4]
    assert watched.history == alone.history
    assert watched.result() == alone.result()
    assert {client: len(rows) for client, rows in watched.windows.items()} == {0: 4, 1: 4, 2: 4}
    trainer = module.trainer
    trainer.fit_loop.max_epochs = 6
    trainer.fit(module, datamodule=uneven_clients())
    assert sorted(watched._by_quantity()["gradient_deviation"]) == [1, 2, 3, 4, 5, 6]


def test_a_result_has_numbers_of_one_round_for_each_measure():
    watched = diagnostics()
    run(watched, FixBN(freeze_round=2, freeze="both"), trainer={**EVALUATED, "check_val_every_n_epoch": 3})
    found = watched.result()
    rounds = {name: value for name, value in found.items() if name.endswith("_round")}
    assert rounds == {
        "bn_statistics_round": 4,
        "bn_gradients_round": 4,
        "bn_gap_round": 4,
        "bn_bias_round": 4,
    }
    assert "bn_gradient_deviation_weights" in found
    assert "bn_gradient_deviation_affine" not in found  # that of round 2


def test_an_evaluation_after_the_last_round_counts_as_that_rounds():
    watched, data = diagnostics(measure=["gap"]), uneven_clients()
    module, rows, *_ = run(watched, rounds=3, trainer=EVALUATED, data=data)
    module.trainer.validate(module, datamodule=data, verbose=False)
    number, metrics = watched.newest["gap"]
    assert metrics["bn/train_eval_gap"] == rows[3]["bn/train_eval_gap"]
    assert number == watched.result()["bn_gap_round"] == 3
    assert watched.result_lines()["train/eval gap"].endswith("in round 3")
    curve = (
        watched.figures([*rows.values()])["bn_drift"](["x"]).axes[-1].get_lines()[1]
    )  # the first is the zero line
    assert [*curve.get_xdata()] == [2, 3]
    assert curve.get_ydata()[1] == metrics["bn/train_eval_gap"]


def test_rounds_between_are_not_measured():
    watched = BatchNormDiagnostics(every_n_rounds=3, measure=["gradients"])
    run(watched, rounds=7)
    assert sorted(watched._by_quantity()["gradient_deviation"]) == [1, 3, 6]


@pytest.mark.parametrize(
    "model", [small_cnn("gn"), nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), small_cnn("none"))]
)
def test_without_running_statistics_only_gradients_are_measured(model):
    rows = run(diagnostics(), rounds=2, model=model, trainer=EVALUATED).rows
    assert {name.removesuffix("_affine").removesuffix("_weights") for name in rows[2] if "bn/" in name} == {
        "bn/gradient_deviation"
    }


def test_many_rounds_are_thinned_evenly():
    report = diagnostics()
    for number in (1, *range(2, 1001, 2)):
        report._keep(SimpleNamespace(round=number, planned_rounds=1000), "x", {"a": float(number)})
    kept = sorted(report._by_quantity()["x"])
    assert len(kept) == MAX_ROUNDS
    assert max(b - a for a, b in pairwise(kept)) <= 12
    for number in range(1, 41):
        report._keep(SimpleNamespace(round=number, planned_rounds=40), "few", {"a": 0.0})
    assert len(report._by_quantity()["few"]) == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_rounds": 0}, "every_n_rounds must be at least 1, found 0"),
        ({"every_n_rounds": 1.5}, "every_n_rounds must be at least 1 and a whole number, found 1.5"),
        ({"window": 1}, "window must be at least 2, found 1"),
        ({"window": 2.5}, "window must be at least 2 and a whole number, found 2.5"),
        ({"measure": "gap"}, r"measure: 'gap' must be a list: \[gap\]"),
        ({"measure": ["drift"]}, "measure: 'drift' must be one of statistics, gradients, gap, bias"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=f"^BatchNormDiagnostics.{message}$"):
        BatchNormDiagnostics(**settings)
