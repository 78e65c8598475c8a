"""Running statistics that the clients of PrivateSGD release with noise before round 1."""

import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.callbacks import FixBN, PrivateSGD
from fl_lightning.methods import epsilon_of
from fl_lightning.methods.private_statistics import clipped_sum
from tests.support.helpers import SaveRounds, blobs, distance, federated_run
from tests.support.private import of_rates, poisson


class TestReleasedStatistics:
    """What is released, and what it costs."""

    @staticmethod
    def network():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 2, 2)), torch.nn.BatchNorm2d(1), torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2),
            torch.nn.Flatten(), torch.nn.Linear(8, 3),
        ).double()  # fmt: skip
        model[1].running_mean += 0.3
        model[1].running_var *= 2
        return model

    def released(self, clip, noise, rounds=1, **settings):
        """The statistics after a run with frozen statistics."""
        private = PrivateSGD(0.5, 1.0, statistics_clip=clip, statistics_noise=noise)
        data = poisson(0.3)
        settings = {"data": data, "model": self.network(), "rounds": rounds, **settings}
        run = federated_run(FixBN(freeze_round=0), private, **settings)
        return run, private, data

    def test_without_clipping_and_noise_they_are_the_moments_of_a_pass_with_the_old_statistics(self):
        run, _, data = self.released(1e9, 0.0)
        model, inputs = (
            self.network().eval(),
            data.samples.inputs[torch.cat([c.indices for c in data.clients])],
        )
        first = model[0](inputs.double())
        second = model[2](model[1](first))
        for place, values in (("1", first), ("3", second)):
            values = values.transpose(0, 1).flatten(1)
            variance, mean = torch.var_mean(values, dim=1, correction=0)
            torch.testing.assert_close(run.states[-1][f"{place}.running_mean"], mean, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(run.states[-1][f"{place}.running_var"], variance, rtol=1e-9, atol=1e-9)

    def test_a_record_moves_what_its_client_sends_by_at_most_the_clipping_norm(self):
        vectors = torch.randn(50, 6, dtype=torch.float64) * torch.logspace(-2, 2, 50).unsqueeze(1)
        whole = clipped_sum(vectors, 0.7)
        moved = [(whole - clipped_sum(vectors[torch.arange(50) != left], 0.7)).norm() for left in range(50)]
        assert max(moved) <= 0.7 * (1 + 1e-9)
        assert max(moved) > 0.69

    def test_noise_has_the_stated_deviation_and_differs_by_client_and_seed(self):
        # a sum of noise alone: the clipping norm is so small that the samples do not count
        means = [
            self.released(1e-6, 3e6, seed=seed)[0].states[-1]["3.running_mean"] * 30 / 3 for seed in range(60)
        ]
        drawn = torch.stack(means) * 3**0.5  # the mean of three clients
        assert 0.8 < float(drawn.std()) < 1.2
        assert len({float(x[0]) for x in means}) == 60

    def test_the_release_is_one_step_with_all_samples_in_epsilon_of_every_client_and_in_the_traffic(self):
        run, private, _ = self.released(1.0, 5.0, participation=2, rounds=2)
        plain = federated_run(
            FixBN(freeze_round=0), PrivateSGD(0.5, 1.0), data=poisson(0.3), model=self.network(), participation=2, rounds=2
        )  # fmt: skip
        for name, history in private.histories().items():
            assert history[0] == (5.0, 1.0, 1)
            assert [segment[:2] for segment in history[1:]] in ([(1.0, 0.3)], [])
            assert private.epsilons()[name] == epsilon_of(history, 1e-5)
        assert len(private.histories()) == 3
        more = run.rows[1]["comm/upload_bytes"] - plain.rows[1]["comm/upload_bytes"]
        assert more == 3 * 2 * (1 + 2) * 8
        assert run.rows[2]["comm/upload_bytes"] == plain.rows[2]["comm/upload_bytes"]

    def test_a_wanted_epsilon_includes_the_release(self):
        private = PrivateSGD(0.5, epsilon=3.0, statistics_noise=5.0)
        federated_run(FixBN(freeze_round=0), private, data=poisson(0.3), model=self.network(), rounds=3)
        assert 2.99 < max(private.epsilons().values()) <= 3.0
        with pytest.raises(
            ConfigurationError,
            match=r"epsilon: 0\.5 cannot be reached in 6 steps at delta 1e-05 by the accountant rdp; raise epsilon or statistics_noise",
        ):
            federated_run(
                FixBN(freeze_round=0), PrivateSGD(0.5, epsilon=0.5, statistics_noise=1.0), data=poisson(0.3), model=self.network()
            )  # fmt: skip

    def test_a_resumed_run_does_not_release_again(self, tmp_path):
        whole, private, _ = self.released(1.0, 5.0, rounds=3)
        assert whole.states[1]["3.running_mean"].equal(whole.states[3]["3.running_mean"])
        saved = PrivateSGD(0.5, 1.0, statistics_clip=1.0, statistics_noise=5.0)
        federated_run(FixBN(freeze_round=0), saved, SaveRounds(tmp_path), data=poisson(0.3), model=self.network(), rounds=3)  # fmt: skip
        resumed, again, _ = self.released(1.0, 5.0, rounds=3, ckpt_path=tmp_path / "2.ckpt")
        assert distance(whole.states[-1], resumed.states[-1]) == 0
        assert again.epsilons() == private.epsilons()

    def test_what_cannot_be_released(self):
        with pytest.raises(ConfigurationError, match="does not keep its samples in memory"):
            federated_run(
                FixBN(freeze_round=0), PrivateSGD(0.5, 1.0, statistics_noise=1.0), data=of_rates(blobs())
            )
        with pytest.raises(ConfigurationError, match="has no BN layers with running statistics"):
            federated_run(
                PrivateSGD(0.5, 1.0, statistics_noise=1.0),
                data=poisson(0.3),
                model=torch.nn.Linear(4, 3).double(),
            )
