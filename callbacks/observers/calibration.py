"""Functions of logits that separate errors of the classifier's bias from errors of the features.

Common arguments, with N samples and C classes:

- ``logits``: Class scores, finite, float64, shape ``[N, C]``.
- ``labels``: Class of each sample, int64, shape ``[N]``.
- ``groups``: Classes of each client.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 1e-9
"""Largest relative deviation of a class's mean probability from 1 / C at convergence."""
_ITERATIONS = 200
_OWN = 0.1


def predicted_shares(logits: Tensor) -> Tensor:
    """Return the share of the samples for which each class is predicted, ``[C]``."""
    return logits.argmax(1).bincount(minlength=logits.shape[1]).double() / len(logits)


def uniform_bias(logits: Tensor) -> Tensor | None:
    """Return the bias whose addition to the logits makes the mean probability of every class 1 / C.

    The bias minimises the convex function ``mean_n logsumexp(logits_n + bias) - mean(bias)``, whose
    gradient is the mean probability minus 1 / C. For finite logits the minimum exists and is unique
    up to a constant. If the model never predicts a class, the bias raises that class. Each
    iteration takes a fixed-point step ``bias -= log(C * mean probability)``, as in Sinkhorn's
    scaling. A Newton step follows if it brings the mean probabilities closer to 1 / C.

    Returns:
        The bias with mean 0, float64, shape ``[C]``. None if after 200 iterations a class's mean
        probability has a relative deviation from 1 / C above :data:`TOLERANCE`.
    """
    # large logits need a near start: the bias of the same logits scaled down
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
    """Return the next bias, and the largest deviation of ``C * mean probability`` from 1."""
    fixed_point = bias - _log_shares(logits + bias)
    candidates = [fixed_point, fixed_point + _newton_step(logits + fixed_point)]
    deviations = [float(_log_shares(logits + b).expm1().abs().max()) for b in candidates]
    # False if the Newton step is not finite: its deviation is NaN
    better = int(deviations[1] < deviations[0])
    return candidates[better] - candidates[better].mean(), deviations[better]


def _log_shares(logits: Tensor) -> Tensor:
    """Return ``log(C * mean probability)`` of each class without underflow, ``[C]``."""
    samples, classes = logits.shape
    return logits.log_softmax(1).logsumexp(0) + math.log(classes / samples)


def _newton_step(logits: Tensor) -> Tensor:
    """Return the Newton step of the bias at 0, ``[C]``; not finite if the Hessian is singular."""
    samples, classes = logits.shape
    probabilities = logits.softmax(1)
    means = probabilities.mean(0)
    hessian = means.diag() - probabilities.T @ probabilities / samples
    # a constant bias changes no probability; + 1 / C makes the Hessian regular in that direction
    step: Tensor = torch.linalg.solve_ex(hessian + 1 / classes, 1 / classes - means)[0]
    return step


def client_classes(histograms: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return each client's own classes, given its number of training samples of each class.

    A class is a client's own if the client has at least a tenth as many samples of it as of its
    most frequent class. A few additional samples of every other class are thus ignored.
    """
    return [
        [label for label, count in enumerate(counts) if count and count >= _OWN * max(counts)]
        for counts in histograms
    ]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of the samples whose class has the highest logit."""
    return float((logits.argmax(1) == labels).double().mean())


def accuracy_within(logits: Tensor, labels: Tensor, groups: Sequence[Sequence[int]]) -> float | None:
    """Return the accuracy if the client is known: the mean over clients.

    A client is evaluated on the samples of its classes, and only these classes can be predicted.
    Clients without such samples are left out.

    Returns:
        The mean; None if all clients are left out.
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
    """Return the accuracy of predicting a sample's client, for clients with disjoint classes.

    The predicted client is the most probable client under the model: its classes have the largest
    summed probability. Samples whose class belongs to no client are left out.

    Returns:
        The share of samples with the right client; None if all samples are left out.
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
    """Return two clients and a class that they share; None if the clients' classes are disjoint."""
    owner: dict[int, int] = {}
    for client, group in enumerate(groups):
        for label in group:
            if label in owner:
                return owner[label], client, label
            owner[label] = client
    return None
