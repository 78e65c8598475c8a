"""A lower bound of epsilon by an attack on canaries: honest runs stay below their accountant, and a run without noise does not.

200 canaries, about 100 of which the attack guesses; confidence 0.95.
"""

from functools import partial

import pytest
import torch
from scipy.stats import binom

from fl_lightning import ConfigurationError
from fl_lightning.callbacks import PrivateFedAvg, PrivateSGD
from fl_lightning.datamodules import Digits, TensorData
from fl_lightning.methods.privacy_audit import epsilon_lower_bound
from tests.support.helpers import federated_run


class Forgets(PrivateSGD):
    """PrivateSGD whose noise is left out, though its accountant counts it."""

    def step_executor(self, pl_module, executor):
        found = super().step_executor(pl_module, executor)
        found.noise = 0.0
        return found


def vectors(canaries=200, seed=0, **settings):
    draws = torch.Generator().manual_seed(0)
    features, targets = torch.randn(500, 300, generator=draws), torch.arange(500) % 4
    return TensorData(
        features, targets, test_features=features[:8], test_targets=targets[:8], num_clients=2, batch_size=100,
        canaries=canaries, seed=seed, **{"sampling": "poisson", **settings},
    )  # fmt: skip


def attacked(private, seed):
    """The audit of a linear model, which remembers each sample, and its epsilon by the accountant."""
    torch.manual_seed(seed)
    settings = {
        "client_optimizer": partial(torch.optim.SGD, lr=1.0),
        "weighting": "uniform",
        "local_steps": 4,
    }
    data = vectors(seed=seed)
    federated_run(private, data=data, model=torch.nn.Linear(300, 4), rounds=10, **settings)
    return private.audited, max(private.epsilons().values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [0.5, 4.0, 16.0])
def test_the_lower_bound_of_an_honest_run_is_below_its_epsilon(noise, seed):
    private = PrivateSGD(1.0, noise)
    found, epsilon = attacked(private, seed)
    assert (found.canaries, found.guesses) == (200, 100)
    assert found.epsilon <= epsilon
    assert (found.epsilon > 1) == (noise == 0.5)  # the attack is not blind
    assert private.result()["privacy/epsilon_lower_bound"] == found.epsilon
    assert "above the epsilon" not in private.result_lines()["privacy audit"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("epsilon", [0.5, 1.0])
def test_a_run_whose_noise_is_left_out_is_caught(epsilon, seed):
    private = Forgets(1.0, epsilon=epsilon)
    found, claimed = attacked(private, seed)
    assert claimed <= epsilon
    assert found.epsilon > epsilon
    assert "above the epsilon of the accountant" in private.result_lines()["privacy audit"]


class TestBound:
    """The bound from right guesses."""

    @pytest.mark.parametrize(("guesses", "right"), [(100, 90), (100, 60), (40, 40), (1000, 700)])
    def test_without_delta_it_is_that_of_the_binomial_test(self, guesses, right):
        found = epsilon_lower_bound(2 * guesses, guesses, right, 0.0)
        assert binom.sf(right - 1, guesses, 1 / (1 + torch.tensor(-found).exp().item())) == pytest.approx(
            0.05, abs=1e-3
        )

    def test_delta_and_few_right_guesses_lower_it(self):
        assert epsilon_lower_bound(200, 100, 50, 1e-5) == 0
        assert epsilon_lower_bound(200, 100, 90, 1e-3) < epsilon_lower_bound(200, 100, 90, 0.0)

    def test_of_randomised_answers_it_is_exceeded_by_chance_alone(self):
        """Answers that are right with probability e^eps / (1 + e^eps) have exactly this epsilon."""
        draws = torch.Generator().manual_seed(0)
        right = (torch.rand(2000, 100, generator=draws) < 1 / (1 + torch.tensor(-1.0).exp())).sum(1)
        above = [epsilon_lower_bound(200, 100, n, 0.0) > 1.0 for n in right.unique().tolist()]
        share = sum(
            int((right == n).sum())
            for n, is_above in zip(right.unique().tolist(), above, strict=True)
            if is_above
        )
        assert share / 2000 < 0.06


class TestCanaries:
    """The random samples in the training data."""

    def test_half_of_them_stay_in_the_training_data_with_random_inputs_and_labels(self):
        plain, planted = vectors(0), vectors(200)
        for data in (plain, planted):
            data.setup("fit")
        indices, included = planted.planted
        assert len(indices.unique()) == 200
        assert 70 < int(included.sum()) < 130
        trained = [torch.cat([client.indices for client in data.clients]) for data in (plain, planted)]
        assert {*trained[0].tolist()} - {*trained[1].tolist()} == {*indices[~included].tolist()}
        assert torch.isin(indices[included], trained[1]).all()
        others = torch.ones(500, dtype=torch.bool)
        others[indices] = False
        assert torch.equal(plain.samples.inputs[:500][others], planted.samples.inputs[:500][others])
        assert not torch.isclose(plain.samples.inputs[indices], planted.samples.inputs[indices]).all(1).any()
        assert plain.planted is None
        assert [client.num_examples for client in planted.clients] == [
            len(c.indices) for c in planted.clients
        ]

    def test_they_depend_on_the_seed_alone(self):
        first, again, other = vectors(), vectors(), vectors(seed=1)
        for data in (first, again, other):
            data.setup("fit")
        assert all(torch.equal(*pair) for pair in zip(first.planted, again.planted, strict=True))
        assert torch.equal(first.samples.inputs, again.samples.inputs)
        assert not torch.equal(first.planted[0], other.planted[0])

    def test_images_are_of_random_pixels_in_their_range(self):
        data = Digits(num_clients=2, canaries=40)
        data.setup("fit")
        pixels = data.samples.inputs[data.planted[0]]
        assert (int(pixels.min()), int(pixels.max())) == (0, 16)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"canaries": 39}, "canaries must be at least 40"),
            ({"canaries": 300}, "data.canaries: 300 must be at most half"),
        ],
    )
    def test_too_few_or_too_many(self, settings, message):
        with pytest.raises(ConfigurationError, match=message):
            vectors(**settings).setup("fit")

    def test_a_client_that_would_lose_all_samples_and_targets_without_classes(self):
        features = torch.randn(100, 4)
        settings = {"test_features": features[:8], "canaries": 48, "sampling": "poisson"}
        few = TensorData(
            features,
            torch.arange(100) % 2,
            test_targets=torch.arange(8) % 2,
            num_clients=60,
            batch_size=2,
            **settings,
        )
        with pytest.raises(ConfigurationError, match=r"data\.canaries: 48 leave client \d+ without samples"):
            few.setup("fit")
        numbers = TensorData(
            features, torch.randn(100), test_targets=torch.randn(8), num_clients=2, **settings
        )
        with pytest.raises(ConfigurationError, match=r"data\.canaries: the targets are no classes"):
            numbers.setup("fit")

    def test_the_clients_method_is_audited_too(self):
        private = PrivateFedAvg(1.0, 0.0)
        federated_run(
            private, data=vectors(sampling="epochs"), model=torch.nn.Linear(300, 4), rounds=1, **private.needs
        )
        assert private.audited.canaries == 200
