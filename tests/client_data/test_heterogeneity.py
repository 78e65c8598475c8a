"""The figures of a partition against numbers that are known."""

import math

import numpy as np
import pytest
from scipy.stats import entropy

from fl_lightning.client_data.heterogeneity import distance_to_union, effective_classes, heterogeneity


def test_equally_many_samples_of_k_classes_are_k_effective_classes_and_rare_ones_count_less():
    found = effective_classes([[5, 0, 0, 0], [3, 3, 0, 0], [7, 7, 7, 7], [99, 1, 0, 0], [0, 0, 0, 0]])
    assert found[:3] == pytest.approx([1, 2, 4])
    assert found[3] == pytest.approx(math.exp(-0.99 * math.log(0.99) - 0.01 * math.log(0.01)))
    assert found[4] == 0
    counts = np.random.default_rng(0).integers(0, 50, (20, 7))
    assert effective_classes(counts.tolist()) == pytest.approx(np.exp(entropy(counts, axis=1)))


def test_the_distance_is_the_share_of_samples_that_are_of_other_classes_than_the_unions():
    assert distance_to_union([[4, 4], [8, 8]]) == pytest.approx([0, 0])
    # the union has a quarter of class 0: the first client would exchange three quarters, the second a quarter
    assert distance_to_union([[10, 0], [0, 30]]) == pytest.approx([0.75, 0.25])


def test_the_mean_distance_is_weighted_by_size():
    found = heterogeneity([[10, 0], [0, 30]])
    assert found["distance_to_union"] == pytest.approx({"mean": (10 * 0.75 + 30 * 0.25) / 40, "max": 0.75})
    assert heterogeneity([[1, 1, 0], [2, 0, 0], [1, 1, 1]])["classes"] == {"min": 1, "median": 2, "max": 3}
