"""The arithmetic behind the partitions: how many samples of each class every client holds, and which.

Shapes: n clients, C classes, N samples. ``available [C]`` holds the sizes of the classes in ascending order
    of label.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Counts = npt.NDArray[np.int64]
Incidence = npt.NDArray[np.bool_]


def class_sizes(labels: Tensor) -> Counts:
    """Number of samples of each class that occurs, in ascending order of label, ``[C]``."""
    return np.unique(labels.numpy(), return_counts=True)[1]


def equal_sizes(total: int, num_clients: int) -> Counts:
    """Split ``total`` into ``num_clients`` sizes that differ by at most one, the larger first, ``[n]``."""
    return total // num_clients + (np.arange(num_clients) < total % num_clients).astype(np.int64)


def index_lists(owner: Tensor, num_clients: int) -> list[Tensor]:
    """The samples of each client, ascending, from the client that owns each sample, ``owner [N]``."""
    sizes = torch.bincount(owner, minlength=num_clients)
    return list(owner.argsort(stable=True).tensor_split(sizes.cumsum(0)[:-1]))


def deal(labels: Tensor, counts: Counts, generator: torch.Generator) -> list[Tensor]:
    """Give client i ``counts[i, c]`` random samples of class c.

    Args:
        labels: Class of each sample, shape ``[N]``.
        counts: Shape ``[n, C]``; column c sums to the number of samples of the c-th class.
        generator: Decides which samples of its classes a client receives.
    """
    num_clients, num_classes = counts.shape
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    owner = torch.empty(len(labels), dtype=torch.int64)
    owner[order] = (
        torch.arange(num_clients).repeat(num_classes).repeat_interleave(torch.from_numpy(counts.T.flatten()))
    )
    return index_lists(owner, num_clients)


def counts_per_client(available: Counts, num_clients: int, alpha: float, rng: np.random.Generator) -> Counts:
    """Class counts ``[n, C]`` of clients of equal size, each drawing from its own ``q ~ Dir(alpha * prior)``.

    To draw from the renormalised ``q`` once a class is exhausted is to draw from ``q`` and reject that class.
    So a client draws all its classes at once, keeps what is in stock and draws the rest again: the same law
    as one by one.
    """
    prior = available / available.sum()
    stock = available.copy()
    counts = np.zeros((num_clients, len(available)), dtype=np.int64)
    for client, size in enumerate(equal_sizes(int(available.sum()), num_clients)):
        log_q = _log_dirichlet(alpha * prior, rng)
        missing = size
        while missing > 0:
            log_q[stock == 0] = -np.inf
            taken = np.minimum(rng.multinomial(missing, _softmax(log_q)), stock)
            counts[client] += taken
            stock -= taken
            missing -= taken.sum()
    return counts


def counts_per_class(available: Counts, num_clients: int, alpha: float, rng: np.random.Generator) -> Counts:
    """Class counts ``[n, C]`` when each class is cut in proportions drawn from ``Dir(alpha, ..., alpha)``."""
    proportions = _softmax(_log_dirichlet(np.full((len(available), num_clients), alpha), rng))
    cuts = np.rint(proportions.cumsum(1) * available[:, None]).astype(np.int64)
    cuts[:, -1] = available
    return np.diff(cuts, axis=1, prepend=0).T


def assign_classes(num_clients: int, num_classes: int, held: int, generator: torch.Generator) -> Incidence:
    """Give every client ``held`` classes, every class equally many holders (+-1): who holds what, ``[n, C]``.

    The clients take their classes in turn from one random permutation of the classes after the other. Where a
    permutation ends within a client, the classes that it already holds go to the end of the next one.
    """
    slots: list[int] = []
    while len(slots) < num_clients * held:
        own = set(slots[len(slots) // held * held :])
        order: list[int] = torch.randperm(num_classes, generator=generator).tolist()
        slots += sorted(order, key=own.__contains__)
    holds = np.zeros((num_clients, num_classes), dtype=np.bool_)
    holds[np.arange(num_clients).repeat(held), slots[: num_clients * held]] = True
    return holds


def split_among_holders(available: Counts, holds: Incidence) -> Counts:
    """Class counts ``[n, C]`` when each class is split equally among its holders.

    What is left of a class that does not divide goes, one sample each, to its holders with the fewest
    samples. A client then passes such a sample on, if need be over others, while someone who can be reached
    has two fewer; so the sizes of the clients are as equal as they can be.
    """
    counts = np.where(holds, available // holds.sum(0), 0)
    extra = np.zeros_like(holds)
    for column, left in enumerate(available - counts.sum(0)):
        holders = np.flatnonzero(holds[:, column])
        sizes = counts[holders].sum(1) + extra[holders].sum(1)
        extra[holders[np.argsort(sizes, kind="stable")[:left]], column] = True
    while path := _path_to_smaller(counts.sum(1) + extra.sum(1), extra, holds & ~extra):
        for giver, taker in pairwise(path):
            column = np.flatnonzero(extra[giver] & holds[taker] & ~extra[taker])[0]
            extra[giver, column], extra[taker, column] = False, True
    return counts + extra


def _path_to_smaller(sizes: Counts, extra: Incidence, lacks: Incidence) -> list[int]:
    # Breadth-first from the largest client down: who is of no use to a larger one is of none to a smaller.
    parent: dict[int, int] = {}
    for source in np.argsort(-sizes, kind="stable").tolist():
        queue = [] if source in parent else [source]
        parent.setdefault(source, source)
        for client in queue:
            if sizes[client] <= sizes[source] - 2:
                path = [client]
                while path[0] != source:
                    path.insert(0, parent[path[0]])
                return path
            for taker in np.flatnonzero(lacks[:, extra[client]].any(1)).tolist():
                if taker not in parent:
                    parent[taker] = client
                    queue.append(taker)
    return []


def _log_dirichlet(
    concentration: npt.NDArray[np.float64], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    # Gamma(a) = Gamma(a + 1) * U**(1/a): in logarithms no concentration is too small for a draw.
    gamma = np.log(rng.standard_gamma(concentration + 1))
    result: npt.NDArray[np.float64] = gamma - rng.standard_exponential(concentration.shape) / concentration
    return result


def _softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    result: npt.NDArray[np.float64] = weights / weights.sum(-1, keepdims=True)
    return result
