"""SlidingWindowFixBN: appendix B.6 of Zhong et al., arXiv 2303.06530."""

from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.aggregation import Median
from fl_lightning.callbacks import FBN, FedPer, FixBN, SlidingWindowFixBN, sliding_window
from fl_lightning.pictures.learning_curve import learning_curve_figure
from fl_lightning.round.policy import policy_table, stages_in_words
from tests.support.command_line import rows, run
from tests.support.helpers import SaveRounds, States, blobs, federated_run, small_cnn, train

ROUNDS, WINDOW = 12, 3
DECAYING = partial(torch.optim.SGD, lr=0.02)
SIZES = (24, 40, 32)


class Sent(FederatedCallback):
    """Keeps what each client sends and the metrics of each round."""

    def __init__(self):
        self.rounds, self.rows = [], []

    def on_before_aggregate(self, trainer, pl_module, cohort):
        names = [name for name in cohort.buffers if name.endswith(("running_mean", "running_var"))]
        sent = {
            client: torch.cat([cohort.buffers[name][row] for name in names])
            for row, client in enumerate(cohort.client_ids)
        }
        self.rounds.append((dict(zip(cohort.client_ids, cohort.weights.tolist(), strict=True)), sent))

    def on_train_epoch_start(self, trainer, pl_module):
        if self.rounds:
            self.rows.append(dict(pl_module.metrics))

    def on_train_end(self, trainer, pl_module):
        self.rows.append(dict(pl_module.metrics))


def search(threshold, rounds=ROUNDS, window=WINDOW, extra=(), ckpt_path=None, **settings):
    """A run that looks for T*: the method, what was sent, and the server's states."""
    method, sent = SlidingWindowFixBN(window, threshold), Sent()
    settings |= {"data": blobs(4, SIZES), "client_optimizer": DECAYING, "ckpt_path": ckpt_path}
    return method, sent, federated_run(method, sent, *extra, rounds=rounds, **settings).states


def by_hand(sent, norm=1, weighted=True, correction=0, window=WINDOW):
    """The change of each round and the variance of its window, None where there is none."""
    last, changes, found = {}, [], []
    for weights, statistics in sent:
        seen = [client for client in statistics if client in last]
        shares = [weights[client] if weighted else 1.0 for client in seen]
        moved = [float(torch.linalg.vector_norm(statistics[client] - last[client], norm)) for client in seen]
        change = sum(s * m for s, m in zip(shares, moved, strict=True)) / sum(shares) if seen else None
        changes += [change] if seen else []
        full = bool(seen) and len(changes) >= window
        variance = (
            torch.tensor(changes[-window:], dtype=torch.float64).var(correction=correction).item()
            if full
            else None
        )
        found.append((change, variance))
        last |= statistics
    return found


def t_star(found, threshold):
    below = [r for r, (_, variance) in enumerate(found, 1) if variance is not None and variance < threshold]
    return below[0] if below else None


@pytest.fixture(scope="module")
def never():
    """A run that never freezes: what was sent, and a threshold at which a later round than the first possible is T*."""
    torch.set_num_threads(1)
    _, sent, _ = search(0.0)
    variances = [variance for _, variance in by_hand(sent.rounds) if variance is not None]
    falling = next(v for k, v in enumerate(variances) if k >= 2 and v < min(variances[:k]))
    return sent, falling * (1 + 1e-6)


@pytest.mark.parametrize("participation", [1.0, 2])
def test_change_and_variance_are_those_computed_by_hand(participation):
    _, sent, _ = search(0.0, participation=participation)
    for row, (change, variance) in zip(sent.rows, by_hand(sent.rounds), strict=True):
        assert row.get("fixbn/statistics_change") == (change and pytest.approx(change, rel=1e-12))
        assert row.get("fixbn/window_variance") == (variance and pytest.approx(variance, rel=1e-9))
        assert "fixbn/freeze_round" not in row


def test_t_star_is_the_first_round_whose_variance_is_below_the_threshold(never):
    sent, threshold = never
    method, own, _ = search(threshold)
    assert method.freeze_round == t_star(by_hand(sent.rounds), threshold)
    assert WINDOW + 1 < method.freeze_round < ROUNDS
    for row in own.rows:
        found, after = row["round"] >= method.freeze_round, row["round"] > method.freeze_round
        assert row.get("fixbn/freeze_round") == (method.freeze_round if found else None)
        assert ("fixbn/statistics_change" in row) == (row["round"] > 1 and not after)


def test_the_run_is_fixbn_with_the_found_t_star_bit_for_bit(never):
    method, _, states = search(never[1])
    fixed = States()
    settings = {"client_optimizer": DECAYING, "local_steps": 2}
    train(small_cnn(), blobs(4, SIZES), ROUNDS, [FixBN(freeze_round=method.freeze_round), fixed], **settings)
    for ours, theirs in zip(states, fixed.states, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(states[method.freeze_round]["1.running_mean"], states[1]["1.running_mean"])
    assert torch.equal(states[method.freeze_round]["1.running_mean"], states[-1]["1.running_mean"])


def test_under_partial_participation_a_change_is_from_the_last_time_a_client_took_part():
    _, sent, _ = search(0.0, participation=1)
    orders = [next(iter(statistics)) for _, statistics in sent.rounds]
    assert len(set(orders)) > 1
    first = {client: orders.index(client) + 1 for client in orders}
    for row, client in zip(sent.rows, orders, strict=True):
        assert ("fixbn/statistics_change" in row) == (row["round"] != first[client])


class Broken(FederatedCallback):
    """The statistics of client 1 become NaN in round 3."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        if cohort.round == 3 and 1 in cohort.client_ids:
            cohort.buffers["1.running_mean"][cohort.client_ids.index(1)] = torch.nan


def test_statistics_that_are_not_finite_are_ignored():
    _, sent, _ = search(0.0, extra=[Broken()], aggregator=Median())
    del sent.rounds[2][1][1]
    for row, (change, variance) in zip(sent.rows, by_hand(sent.rounds), strict=True):
        assert row.get("fixbn/statistics_change") == (change and pytest.approx(change, rel=1e-12))
        assert row.get("fixbn/window_variance") == (variance and pytest.approx(variance, rel=1e-9))


def test_statistics_that_clients_keep_in_their_heads_do_not_count():
    method, _, _ = search(0.0, rounds=2, extra=[FedPer(["8", "4"])])
    assert method.statistics[0]["statistics"].shape == (2 * 4,)  # the first BN layer has 4 channels


def test_threshold_zero_never_freezes_and_is_fedavg_bit_for_bit():
    method, _, states = search(0.0)
    assert method.freeze_round is None
    plain = train(small_cnn(), blobs(4, SIZES), ROUNDS, client_optimizer=DECAYING, local_steps=2)
    assert all(torch.equal(states[-1][name], plain[name]) for name in plain)


@pytest.mark.parametrize("start", [1, 4, "found", "after"])
def test_t_star_survives_a_resume_bit_for_bit(start, never, tmp_path):
    method, _, states = search(never[1], extra=[SaveRounds(tmp_path)])
    start = {"found": method.freeze_round, "after": method.freeze_round + 1}.get(start, start)
    again, _, resumed = search(never[1], ckpt_path=tmp_path / f"{start}.ckpt")
    assert again.freeze_round == method.freeze_round
    assert all(torch.equal(states[-1][name], resumed[-1][name]) for name in resumed[-1])


@pytest.mark.parametrize("wrong", [{"norm": 2}, {"weighted": False}, {"correction": 1}])
def test_another_norm_mean_or_variance_would_give_another_t_star(wrong, never):
    sent, _ = never
    right, other = by_hand(sent.rounds), by_hand(sent.rounds, **wrong)
    thresholds = [variance * (1 + 1e-6) for _, variance in right if variance is not None]
    assert any(t_star(right, threshold) != t_star(other, threshold) for threshold in thresholds)
    threshold = next(t for t in thresholds if t_star(right, t) != t_star(other, t))
    assert search(threshold)[0].freeze_round == t_star(right, threshold)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mean_change", lambda now, before, weights: float((now - before).norm(dim=1).mean())),
        ("mean_change", lambda now, before, weights: float((now - before).abs().sum(1).mean())),
        ("window_variance", lambda changes: float(torch.tensor(changes).var())),
    ],
)
def test_a_wrong_formula_is_far_from_what_is_computed_by_hand(name, wrong, monkeypatch):
    monkeypatch.setattr(sliding_window, name, wrong)
    _, sent, _ = search(0.0)
    _, variance = by_hand(sent.rounds)[-1]
    assert sent.rows[-1]["fixbn/window_variance"] != pytest.approx(variance, rel=1e-3)


def test_the_policy_table_says_in_words_that_t_star_is_not_known_yet():
    method = SlidingWindowFixBN(10, 0.1)
    promise = [(1, "averaged"), ("SlidingWindowFixBN", "frozen")]
    table = policy_table(small_cnn(), [method], 5)
    assert (table["mean"], table["var"], table["affine"]) == (promise, promise, [(1, "averaged")])
    assert stages_in_words(promise) == "averaged; frozen from the round that SlidingWindowFixBN finds"
    method.freeze_round = 3
    assert policy_table(small_cnn(), [method], 5)["mean"] == [(1, "averaged"), (4, "frozen")]


def test_the_command_line_says_when_it_freezes_and_draws_the_line_there(capsys):
    cli = run(
        *("--trainer.callbacks", "SlidingWindowFixBN", "--trainer.callbacks.window", 2),
        *("--trainer.callbacks.threshold", 1e9, "--trainer.max_epochs", 5),
    )
    printed = capsys.readouterr().out
    assert "BN running mean      averaged; frozen from the round that SlidingWindowFixBN finds" in printed
    assert printed.count("SlidingWindowFixBN: T* = 3; BN is frozen from round 4 on.") == 1
    policy = {"mean": [[1, "averaged"], ["SlidingWindowFixBN", "frozen"]]}
    for found, lines in ((rows(cli.attempt), [4.0]), ([{"round": 0}, {"round": 5}], [])):
        axes = learning_curve_figure(found, policy, ["a title"]).axes[0]
        assert [segment[0][0] for c in axes.collections for segment in c.get_segments()] == lines


def test_a_method_that_pools_statistics_is_refused_before_the_first_round():
    states = States()
    with pytest.raises(
        ConfigurationError, match="FBN and SlidingWindowFixBN cannot be combined: one wants mean pooled"
    ):
        train(small_cnn(), blobs(), 5, [FBN(), SlidingWindowFixBN(3, 0.1), states])
    assert states.states == []


def test_a_client_that_diverges_freezes_nothing():
    method = SlidingWindowFixBN(2, 1e9)
    settings = {"client_optimizer": partial(torch.optim.SGD, lr=1e30), "on_divergence": "record"}
    train(small_cnn(), blobs(), 4, [method], **settings)
    assert method.freeze_round is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"window": 1, "threshold": 0.1}, "window: 1"),
        ({"window": 5, "threshold": -0.1}, "threshold: -0.1"),
        ({"window": 5, "threshold": float("nan")}, "threshold: nan"),
    ],
)
def test_settings_out_of_range_are_named(settings, named):
    with pytest.raises(ConfigurationError, match=named):
        SlidingWindowFixBN(**settings)


def test_a_model_without_running_statistics_is_refused():
    for model in (
        small_cnn("gn"),
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72, track_running_stats=False), nn.Linear(72, 3)),
    ):
        with pytest.raises(ConfigurationError, match="SlidingWindowFixBN: "):
            train(model, blobs(), 1, [SlidingWindowFixBN(2, 0.1)])
