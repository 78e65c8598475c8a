"""DP-FedAvg: clipped updates of clients, noise at the server, its accountant, and what is refused."""

import math
from functools import partial

import lightning as L
import pytest
import torch

from fl_lightning import ClientFailures, ConfigurationError, FederatedCallback, FederatedModule
from fl_lightning.aggregation import Median
from fl_lightning.callbacks import FBN, SCAFFOLD, Byzantine, FedBN, FedDyn, FixBN, PrivateFedAvg
from fl_lightning.datamodules import TensorData
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.methods.privacy import epsilon_of
from fl_lightning.round.plan import sample_poisson
from tests.support.helpers import SaveRounds, blobs, distance, federated_run, fit, small_cnn

NEEDS = PrivateFedAvg.needs
WITHOUT_PRIVACY = {"clip": math.inf, "noise": 0.0}


def vector(state, names):
    return torch.cat([state[name].double().flatten() for name in names])


def sent_names(state, statistics=True):
    """The names of parameters and, if they are sent, of running statistics."""
    other = ("num_batches_tracked",) if statistics else ("num_batches_tracked", "running_mean", "running_var")
    return [name for name in state if not name.endswith(other)]


class TestParticipation:
    """Cohorts that clients join independently."""

    def test_clients_join_with_the_rate_independently_of_each_other_and_of_other_rounds(self):
        rounds, clients, rate = 4000, 6, 0.3
        joined = torch.zeros(rounds, clients)
        for number in range(rounds):
            joined[number, sample_poisson(clients, rate, 0, number)] = 1
        error = 5 * (rate * (1 - rate) / rounds) ** 0.5
        assert ((joined.mean(0) - rate).abs() < error).all()
        apart = torch.corrcoef(joined.T) - torch.eye(clients)
        assert apart.abs().max() < 5 / rounds**0.5
        counts = joined.sum(1)
        assert abs(float(torch.corrcoef(torch.stack([counts[1:], counts[:-1]]))[0, 1])) < 5 / rounds**0.5
        assert (counts == 0).any()

    def test_a_run_draws_these_cohorts_and_skips_rounds_without_clients(self):
        run = federated_run(data=blobs(4), rounds=8, participation=0.3, cohort_sampling="poisson")
        drawn = [sample_poisson(4, 0.3, 0, number) for number in range(1, 9)]
        assert [] in drawn
        for number, clients in enumerate(drawn, 1):
            assert [*run.clients.end.get(number, {})] == clients
            if not clients:
                assert distance(run.states[number - 1], run.states[number]) == 0

    def test_a_number_of_clients_is_their_mean(self):
        module = federated_run(data=blobs(4), rounds=1, participation=2, cohort_sampling="poisson").module
        assert module.plan.rate == 0.5


class TestServer:
    """The server's step."""

    def test_without_clipping_and_noise_and_with_all_clients_it_is_fedavg(self):
        plain = federated_run(weighting="uniform").states
        private = federated_run(PrivateFedAvg(**WITHOUT_PRIVACY), **NEEDS).states
        assert max(distance(*pair) for pair in zip(plain, private, strict=True)) < 1e-12

    @pytest.mark.parametrize("frozen", [False, True])
    def test_it_moves_by_the_sum_of_clipped_updates_divided_by_the_expected_number(self, frozen):
        clip, methods = 0.05, [FixBN(freeze_round=0)] if frozen else []
        run = federated_run(
            *methods, PrivateFedAvg(clip, 0.0), data=blobs(4), rounds=6, participation=0.6, **NEEDS
        )
        # what clients send is clipped already, so the same run without privacy tells their updates
        names, sizes = sent_names(run.states[0], statistics=not frozen), set()
        for number in range(1, 7):
            before, after = (vector(run.states[n], names) for n in (number - 1, number))
            states = run.clients.end.get(number, {}).values()
            total = torch.zeros_like(before)
            for state in states:
                moved = vector(state, names) - before
                assert float(moved.norm()) <= clip * (1 + 1e-9)
                total += moved
            torch.testing.assert_close(after - before, total / (0.6 * 4), rtol=1e-9, atol=1e-12)
            sizes.add(len(states))
        assert len(sizes) > 1  # the divisor is fixed, and cohorts are not

    def test_an_update_beyond_the_norm_keeps_its_direction(self):
        free = federated_run(PrivateFedAvg(**WITHOUT_PRIVACY), rounds=1, **NEEDS)
        clipped = federated_run(PrivateFedAvg(0.05, 0.0), rounds=1, **NEEDS)
        names = sent_names(free.states[0])
        start = vector(free.states[0], names)
        for client in range(3):
            whole, short = (vector(run.clients.end[1][client], names) - start for run in (free, clipped))
            assert float(whole.norm()) > 0.05
            torch.testing.assert_close(short, whole * 0.05 / whole.norm(), rtol=1e-9, atol=1e-12)

    def test_the_noise_has_the_stated_variance_is_new_in_each_round_and_comes_without_clients(self):
        clip, noise = 0.5, 2.0
        model = partial(small_cnn, "gn", channels=2)
        private = PrivateFedAvg(clip, noise)
        run = federated_run(
            private, data=blobs(4), model=model, rounds=12, participation=0.1, client_lr_schedule=lambda *_: 0.0, **NEEDS
        )  # fmt: skip
        names = sent_names(run.states[0])
        drawn = [sample_poisson(4, 0.1, 0, number) for number in range(1, 13)]
        assert [] in drawn
        assert any(drawn)
        moves = torch.stack(
            [vector(run.states[n], names) - vector(run.states[n - 1], names) for n in range(1, 13)]
        ) * (0.1 * 4 / (noise * clip))
        count = moves.numel()
        assert abs(float(moves.square().sum()) - count) < 5 * math.sqrt(2 * count)
        correlations = torch.corrcoef(moves) - torch.eye(12, dtype=torch.float64)
        assert correlations.abs().max() < 6 / math.sqrt(moves.shape[1])
        assert private.histories() == {"every client": ((2.0, 0.1, 12),)}
        assert run.module.trainer.global_step == 12

    def test_running_variances_stay_positive(self):
        run = federated_run(PrivateFedAvg(5.0, 4.0), rounds=6, **NEEDS)
        variances = [value for name, value in run.states[-1].items() if name.endswith("running_var")]
        assert all((value > 0).all() for value in variances)
        moved = [distance({"": run.states[n - 1]["1.running_var"]}, {"": run.states[n]["1.running_var"]}) for n in range(1, 7)]  # fmt: skip
        assert max(moved) > 0.1

    def test_a_resumed_run_and_two_ranks_draw_the_same(self, tmp_path):
        def run(*callbacks, **settings):
            private = PrivateFedAvg(0.5, 1.0)
            found = federated_run(
                private, *callbacks, data=blobs(4), participation=0.4, rounds=6, **NEEDS, **settings
            )
            return found.states[-1], private

        whole, private = run(SaveRounds(tmp_path))
        assert [] in [sample_poisson(4, 0.4, 0, number) for number in range(4, 7)]
        resumed, again = run(ckpt_path=tmp_path / "3.ckpt")
        assert distance(whole, resumed) == 0
        assert again.epsilons() == private.epsilons()
        ranks, _ = run(trainer={"devices": 2, "strategy": CohortStrategy()})
        assert distance(whole, ranks) == 0


class TestAccountant:
    """Epsilon of every client."""

    def test_epsilon_is_that_of_opacus_for_the_rounds_so_far(self):
        private = PrivateFedAvg(0.5, 1.0)
        run = federated_run(private, data=blobs(4), participation=0.5, rounds=5, **NEEDS)
        assert private.epsilons() == {"every client": epsilon_of(((1.0, 0.5, 5),), 1e-5)}
        assert run.rows[5]["privacy/epsilon"] == pytest.approx(private.result()["privacy/epsilon"], rel=1e-6)

    def test_a_round_in_which_all_clients_are_dropped_counts_once(self):
        data, private = blobs(3), PrivateFedAvg(0.5, 1.0)
        for client in data.clients:
            client.dataset.tensors[0].fill_(math.nan)
        federated_run(private, data=data, rounds=3, on_divergence="drop", check_first_steps=False, **NEEDS)
        assert private.histories() == {"every client": ((1.0, 1.0, 3),)}

    def test_an_epsilon_beyond_the_accountant_is_not_called_a_run_without_noise(self, monkeypatch):
        private = PrivateFedAvg(0.5, 1.0)
        federated_run(private, data=blobs(3), rounds=1, **NEEDS)
        monkeypatch.setattr("fl_lightning.methods.privacy.epsilon_of", lambda *_: math.inf)
        assert private.result_lines() == {
            "privacy": "none, as epsilon is infinite or too large for the accountant"
        }

    def test_the_noise_of_a_wanted_epsilon_reaches_it_in_the_planned_rounds(self):
        private = PrivateFedAvg(0.5, epsilon=4.0)
        federated_run(private, data=blobs(4), participation=0.5, rounds=5, **NEEDS)
        assert 3.99 < private.epsilons()["every client"] <= 4.0


class TestRefusals:
    """What cannot be private ends with one line before anything is trained."""

    @pytest.mark.parametrize(
        ("callbacks", "settings", "message"),
        [
            ([], {"cohort_sampling": "fixed"}, "set model.cohort_sampling: poisson"),
            ([], {"weighting": "examples"}, "model.weighting: examples gives clients more weight"),
            ([], {"min_clients": 2}, "model.min_clients: 2 lets one client decide"),
            ([], {"aggregator": Median()}, "its noise is that of a mean"),
            ([], {"statistics_aggregator": Median()}, "its noise is that of a mean"),
            ([], {"centralised": True}, "centralised training joins"),
            ([SCAFFOLD()], {}, "it and SCAFFOLD cannot be combined"),
            ([FBN()], {}, "it and FBN cannot be combined: FBN uses or changes what clients send"),
            ([FedDyn()], {}, "it and FedDyn cannot be combined: FedDyn uses"),
            ([FedBN()], {}, "it and FedBN cannot be combined: FedBN uses"),
        ],
    )
    def test_runs_that_no_noise_protects(self, callbacks, settings, message):
        with pytest.raises(ConfigurationError, match=f"^PrivateFedAvg: .*{message}"):
            federated_run(*callbacks, PrivateFedAvg(1.0, 1.0), **{**NEEDS, **settings})

    @pytest.mark.parametrize(
        "policy",
        [
            lambda number, _: {"0": "local"} if number > 1 else {},
            lambda number, _: {"mean": "max", "var": "max"},
            lambda number, _: {"mean": "pooled", "var": "pooled"} if number == 2 else {},
        ],
    )
    def test_state_that_reaches_the_server_without_noise_in_any_round(self, policy):
        own = FederatedCallback()
        own.policy = policy
        with pytest.raises(
            ConfigurationError, match=r"^PrivateFedAvg: it cannot be combined with a method that treats"
        ):
            federated_run(own, PrivateFedAvg(1.0, 1.0), **NEEDS)

    def test_buffers_that_local_steps_change(self):
        class Center(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("center", torch.zeros((), dtype=torch.float64))

            def forward(self, inputs):
                self.center.copy_(self.center * 0.5 + inputs.mean() * 0.5)
                return inputs

        for model in (
            torch.nn.Sequential(Center(), small_cnn("gn")),
            torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(72, 3))
            ),
        ):
            with pytest.raises(ConfigurationError, match=r"^PrivateFedAvg: local steps change the buffer"):
                federated_run(PrivateFedAvg(1.0, 1.0), model=model.double(), **NEEDS)

    def test_attackers_that_send_what_they_want(self):
        with pytest.raises(ConfigurationError, match="it and Byzantine cannot be combined"):
            federated_run(PrivateFedAvg(1.0, 1.0), Byzantine(**Byzantine.examples[0]), **NEEDS)

    def test_rounds_without_the_method(self, tmp_path):
        federated_run(SaveRounds(tmp_path), rounds=2)
        with pytest.raises(ConfigurationError, match="rounds 1 to 2 of the resumed run trained without it"):
            federated_run(PrivateFedAvg(1.0, 1.0), ckpt_path=tmp_path / "2.ckpt", rounds=3, **NEEDS)

    def test_canaries_for_a_lightning_module(self):
        class Module(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 3)

            def training_step(self, batch, batch_idx):
                return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        features, targets = torch.randn(100, 4, dtype=torch.float64), torch.arange(100) % 3
        given = {"test_features": features[:6], "test_targets": targets[:6], "num_clients": 2}
        for canaries in (0, 40):
            module = FederatedModule(Module().double(), local_steps=1, **NEEDS)
            data, private = TensorData(features, targets, canaries=canaries, **given), PrivateFedAvg(0.5, 1.0)
            if canaries:
                with pytest.raises(ConfigurationError, match=r"^data\.canaries: the audit needs model\.loss"):
                    fit(module, data, 2, [private])
            else:
                fit(module, data, 2, [private])
                assert private.histories() == {"every client": ((1.0, 1.0, 2),)}

    def test_another_kind_of_cohorts(self):
        with pytest.raises(ConfigurationError, match=r"cohort_sampling: 'gaussian' must be one of"):
            federated_run(cohort_sampling="gaussian")

    def test_failures_of_clients_are_allowed(self):
        failures = ClientFailures(dropout=0.5)
        run = federated_run(PrivateFedAvg(0.5, 1.0), data=blobs(4), failures=failures, rounds=6, **NEEDS)
        assert all(value.isfinite().all() for value in run.states[-1].values())
