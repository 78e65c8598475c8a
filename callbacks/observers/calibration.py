"""Functions of logits that distinguish errors of the classifier's bias from errors of the features.

All functions take some of these arguments, for N samples and C classes:

- ``logits``: Class scores, finite, float64, shape ``[N, C]``.
- ``labels``: Class of each sample, int64, shape ``[N]``.
- ``groups``: List of classes of each client.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 1e-9
"""Largest accepted relative deviation of a mean class probability from 1 / C."""
_ITERATIONS = 200
_OWN = 0.1


def predicted_shares(logits: Tensor) -> Tensor:
    """Return the share of the samples that are predicted as each class, ``[C]``."""
    return logits.argmax(1).bincount(minlength=logits.shape[1]).double() / len(logits)


def uniform_bias(logits: Tensor) -> Tensor | None:
    """Return a bias for the logits that makes the mean probability of every class 1 / C.

    The bias minimises the convex function ``mean_n logsumexp(logits_n + bias) - mean(bias)``, whose
    gradient is the mean probability minus 1 / C. For finite logits, the minimum exists, and is
    unique up to an added constant. If the model never predicts a class, the bias raises the logit
    of this class.

    Each iteration takes a fixed-point step ``bias -= log(C * mean probability)``, as in Sinkhorn's
    scaling. A Newton step follows if it brings the mean probabilities closer to 1 / C.

    Returns:
        The bias with mean 0, float64, shape ``[C]``. The result is None if 200 iterations do not
        reach :data:`TOLERANCE`.
    """
    # large logits need a good starting point: solve the problem for smaller logits first
    spread = float(logits.std(0, correction=0).max())
    halvings = max(0, math.ceil(math.log2(max(1.0, spread))))
    bias, deviation = logits.new_zeros(logits.shape[1]), math.inf
    for scale in (0.5**halving for halving in range(halvings, -1, -1)):
        for _ in range(_ITERATIONS):
            bias, deviation = _iterated(logits * scale, bias * scale)
            bias = bias / scale
            if deviation <= TOLERANCE:
                break
    return bias if deviation <= TOLERANCE else None


def _iterated(logits: Tensor, bias: Tensor) -> tuple[Tensor, float]:
    """Run one iteration of :func:`uniform_bias`.

    Returns:
        The next bias, ``[C]``, and the largest deviation of ``C * mean probability`` from 1.
    """
    fixed_point = bias - _log_shares(logits + bias)
    candidates = [fixed_point, fixed_point + _newton_step(logits + fixed_point)]
    deviations = [float(_log_shares(logits + b).expm1().abs().max()) for b in candidates]
    # a non-finite Newton step has the deviation NaN, and is never chosen
    better = int(deviations[1] < deviations[0])
    return candidates[better] - candidates[better].mean(), deviations[better]


def _log_shares(logits: Tensor) -> Tensor:
    """Return ``log(C * mean probability)`` of each class, ``[C]``, without underflow."""
    samples, classes = logits.shape
    return logits.log_softmax(1).logsumexp(0) + math.log(classes / samples)


def _newton_step(logits: Tensor) -> Tensor:
    """Return the Newton step from a bias of 0, ``[C]``.

    The step is not finite if the Hessian is singular.
    """
    samples, classes = logits.shape
    probabilities = logits.softmax(1)
    means = probabilities.mean(0)
    hessian = means.diag() - probabilities.T @ probabilities / samples
    # add 1 / C to the Hessian: it is singular, because a constant bias changes no probability
    step: Tensor = torch.linalg.solve_ex(hessian + 1 / classes, 1 / classes - means)[0]
    return step


def client_classes(histograms: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the list of classes that belong to each client.

    A class belongs to a client if the client has enough samples of the class: at least a tenth of
    the number of samples in the client's most frequent class.

    Args:
        histograms: Number of training samples of each class, for each client.
    """
    return [
        [label for label, count in enumerate(counts) if count and count >= _OWN * max(counts)]
        for counts in histograms
    ]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of the samples whose class has the highest logit."""
    return float((logits.argmax(1) == labels).double().mean())


def accuracy_within(logits: Tensor, labels: Tensor, groups: Sequence[Sequence[int]]) -> float | None:
    """Return the mean accuracy over clients if the model knows each sample's client.

    A client is evaluated on all samples of the client's classes. The prediction is the class with
    the highest logit among the client's classes. Clients without samples are left out.

    Returns:
        The mean accuracy, or None if all clients are left out.
    """
    values = []
    for group in groups:
        classes = torch.tensor(sorted(group), dtype=torch.int64)
        chosen = torch.isin(labels, classes)
        if bool(chosen.any()):
            guesses = classes[logits[chosen][:, classes].argmax(1)]
            values.append(float((guesses == labels[chosen]).double().mean()))
    return sum(values) / len(values) if values else None


def accuracy_between(logits: Tensor, labels: Tensor, groups: Sequence[Sequence[int]]) -> float | None:
    """Return the share of the samples for which the right client is predicted.

    No class may belong to two clients. The predicted client is the client whose classes have the
    largest sum of probabilities. Samples of classes without a client are left out.

    Returns:
        The share, or None if all samples are left out.
    """
    owner = torch.full((logits.shape[1],), -1)
    for client, group in enumerate(groups):
        owner[list(group)] = client
    known = owner[labels] >= 0
    if not bool(known.any()):
        return None
    log_probabilities = logits[known].log_softmax(1)
    of_clients = [log_probabilities[:, list(group)].logsumexp(1) for group in groups]
    guesses = torch.stack(of_clients, 1).argmax(1)
    return float((guesses == owner[labels[known]]).double().mean())


def shared_class(groups: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """Return two clients and a class that belongs to both; None if there is no such class."""
    owner: dict[int, int] = {}
    for client, group in enumerate(groups):
        for label in group:
            if label in owner:
                return owner[label], client, label
            owner[label] = client
    return None
