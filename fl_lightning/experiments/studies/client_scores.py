"""Metrics of clients' predictions, with weights of the samples, for tables and bootstrap intervals.

Weights ``[B, n]`` give the number of times that each of n samples is in each of B resamples. A metric
is computed for all resamples at once. A metric that the samples do not define is NaN.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Predictions(NamedTuple):
    """Predictions of a client's own test samples.

    Attributes:
        targets: Number of the class of each sample ``[n]``.
        guesses: Number of the predicted class ``[n]``.
        probabilities: Probability of each class ``[n, classes]``.
    """

    targets: Array
    guesses: Array
    probabilities: Array

    @classmethod
    def of(cls, frame: Any) -> "Predictions":
        """Return the predictions in a frame of ``test_predictions.csv``, whose cells are text."""
        columns = [name for name in frame if name.startswith("probability_")]
        number = {name.removeprefix("probability_"): place for place, name in enumerate(columns)}
        targets, guesses = (frame[name].map(number).to_numpy() for name in ("target", "prediction"))
        return cls(targets, guesses, frame[columns].to_numpy(float))

    @property
    def classes(self) -> Sequence[int]:
        """The classes that are scored one against the rest: the second of two, or all."""
        count = self.probabilities.shape[1]
        return [1] if count == 2 else range(count)


Parts = list[tuple[Array, Array]]
"""Numerators and denominators ``[B]`` of a metric, for each class."""


def _accuracy(of: Predictions, weights: Array) -> Parts:
    return [(weights @ (of.guesses == of.targets), weights.sum(1))]


def _sensitivity(of: Predictions, weights: Array) -> Parts:
    known = [((of.targets == x), (of.guesses == x)) for x in of.classes]
    return [(weights @ (is_class & told), weights @ is_class) for is_class, told in known]


def _specificity(of: Predictions, weights: Array) -> Parts:
    known = [((of.targets != x), (of.guesses != x)) for x in of.classes]
    return [(weights @ (is_class & told), weights @ is_class) for is_class, told in known]


def _auroc(of: Predictions, weights: Array) -> Parts:
    """Count the pairs of a positive and a negative sample, and those in the right order (ties: half)."""
    parts = []
    for number in of.classes:
        scores, positive = of.probabilities[:, number], of.targets == number
        order = scores.argsort(kind="stable")
        starts = np.flatnonzero(np.diff(scores[order], prepend=-1))  # of equal scores
        positives, negatives = (
            np.add.reduceat((weights * of_kind)[:, order], starts, axis=1)
            for of_kind in (positive, ~positive)
        )
        below = negatives.cumsum(1) - negatives / 2
        parts.append(((positives * below).sum(1), positives.sum(1) * negatives.sum(1)))
    return parts


SCORES: Mapping[str, Callable[[Predictions, Array], Parts]] = {
    "accuracy": _accuracy,
    "auroc": _auroc,
    "sensitivity": _sensitivity,
    "specificity": _specificity,
}
"""Metrics by name. For more than two classes, a metric is the mean over the classes."""


def score(metric: str, parts: Sequence[tuple[Predictions, Array]]) -> Array:
    """Return a metric ``[B]`` over the samples of several clients together.

    Args:
        metric: Name of the metric in :data:`SCORES`.
        parts: Predictions of each client, with the weights of its samples.
    """
    together = Predictions(*(np.concatenate(x) for x in zip(*(part for part, _ in parts), strict=True)))
    return _mean(SCORES[metric](together, np.concatenate([weights for _, weights in parts], 1)), metric)


def score_within(metric: str, parts: Sequence[tuple[Predictions, Array]]) -> Array:
    """Return an AUROC ``[B]`` over the pairs of samples within each client."""
    of_clients = [SCORES[metric](*part) for part in parts]
    sums = [[sum(x) for x in zip(*of_class, strict=True)] for of_class in zip(*of_clients, strict=True)]
    return _mean([(top, bottom) for top, bottom in sums], metric)


def _mean(parts: Sequence[tuple[Any, Any]], metric: str) -> Array:
    """Return the mean over the classes. An AUROC needs all classes; other metrics omit absent ones."""
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice")
        shares = [np.asarray(top) / np.asarray(bottom) for top, bottom in parts]
        values: Array = (np.mean if metric == "auroc" else np.nanmean)(shares, axis=0)
    return values


def resamples(units: Array, count: int, generator: np.random.Generator) -> Array:
    """Draw a client's samples with replacement, and return their weights ``[count, n]``.

    Args:
        units: Unit of each sample ``[n]``. All samples of a unit, such as a patient, are drawn together.
        count: Number of resamples B.
        generator: Generator of random numbers.
    """
    names, of = np.unique(units, return_inverse=True)
    drawn = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=count)
    weights: Array = drawn[:, of].astype(float)
    return weights
