"""Partitions as pure functions. They assign training samples to clients.

Each function takes labels and a random number generator, and returns the sample indices of each
client. Indices are int64 and ascending within a client. Every client gets at least one sample.
Every sample is assigned to exactly one client; only :func:`shards` with a ``tail`` may assign a
sample to several clients. If an argument is out of its range, a ConfigurationError is raised.

Common arguments, for n clients, C classes and N samples:

- ``labels``: Class of each sample, shape ``[N]``.
- ``num_clients``: Number n of clients, in [1, N].
- ``generator``: Random number generator of all draws.
- ``available``: Number of samples of each class, in ascending order of label, shape ``[C]``.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor

from fl_lightning.errors import ConfigurationError, check_choice

Counts = npt.NDArray[np.int64]
Incidence = npt.NDArray[np.bool_]
Balance = Literal["client", "class"]
Assignment = Literal["random", "consecutive", "modulo"]


def class_sizes(labels: Tensor) -> Counts:
    """Return the size of each class that occurs, in ascending order of label, ``[C]``."""
    return np.unique(labels.numpy(), return_counts=True)[1]


def equal_sizes(total: int, num_clients: int) -> Counts:
    """Split ``total`` into n sizes that differ by at most one, the larger sizes first, ``[n]``."""
    return total // num_clients + (np.arange(num_clients) < total % num_clients).astype(np.int64)


def index_lists(owner: Tensor, num_clients: int) -> list[Tensor]:
    """Return the ascending indices of each client's samples.

    Args:
        owner: Client of each sample, shape ``[N]``.
        num_clients: Number of clients.
    """
    sizes = torch.bincount(owner, minlength=num_clients)
    return list(owner.argsort(stable=True).tensor_split(sizes.cumsum(0)[:-1]))


def deal(labels: Tensor, counts: Counts, generator: Generator) -> list[Tensor]:
    """Assign ``counts[i, c]`` random samples of class c to client i.

    The counts must sum to the number of samples of each class.
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
    """Return the number of samples of each class at each client, ``[n, C]``.

    Client sizes differ by at most one. Each client draws class proportions ``q ~ Dir(alpha *
    prior)``. Then it draws the classes of all its samples from ``q``. If too few samples of a class
    are left, the client takes these samples and draws the missing samples again without this class.
    This is the same as if ``q`` were renormalised as soon as the class is used up.
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
    """Return the number of samples of each class at each client, ``[n, C]``.

    For each class, the shares of the clients are drawn from ``Dir(alpha, ..., alpha)``.
    """
    proportions = _softmax(_log_dirichlet(np.full((len(available), num_clients), alpha), rng))
    cuts = np.rint(proportions.cumsum(1) * available[:, None]).astype(np.int64)
    cuts[:, -1] = available
    return np.diff(cuts, axis=1, prepend=0).T


def assign_classes(num_clients: int, num_classes: int, held: int, generator: Generator) -> Incidence:
    """Return a bool matrix ``[n, C]`` that says which client holds which class.

    Each client holds ``held`` classes. All classes are held by equally many clients, up to a
    difference of one.

    The clients take their classes one after the other from a random permutation of all classes.
    Whenever a permutation is used up, a new one begins. If this happens before a client has all its
    classes, the classes that it already has move to the end of the new permutation.
    """
    slots: list[int] = []
    while len(slots) < num_clients * held:
        taken = set(slots[len(slots) // held * held :])
        order: list[int] = torch.randperm(num_classes, generator=generator).tolist()
        slots += sorted(order, key=taken.__contains__)
    holds = np.zeros((num_clients, num_classes), dtype=np.bool_)
    holds[np.arange(num_clients).repeat(held), slots[: num_clients * held]] = True
    return holds


def split_among_holders(available: Counts, holds: Incidence) -> Counts:
    """Return the number of samples of each class at each client, ``[n, C]``.

    Each class is split equally among the clients that hold it. If the class does not divide evenly,
    the clients with the fewest samples so far get one additional sample each. Afterwards,
    additional samples are moved from larger to smaller clients until no move makes the sizes more
    equal. A move may pass through several clients.
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
    # start from the largest source: a client too large for it is too large for all others
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
    # Gamma(a) equals Gamma(a + 1) times U**(1/a), U uniform in (0, 1); logarithms avoid underflow
    gamma = np.log(rng.standard_gamma(concentration + 1))
    result: npt.NDArray[np.float64] = gamma - rng.standard_exponential(concentration.shape) / concentration
    return result


def _softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    result: npt.NDArray[np.float64] = weights / weights.sum(-1, keepdims=True)
    return result


def iid(labels: Tensor, num_clients: int, generator: Generator) -> list[Tensor]:
    """Assign random samples to the clients, equally many to each (up to a difference of one)."""
    _check_num_clients(num_clients, len(labels))
    owner = torch.empty(len(labels), dtype=torch.int64)
    owner[torch.randperm(len(labels), generator=generator)] = torch.arange(len(labels)) % num_clients
    return index_lists(owner, num_clients)


def dirichlet(
    labels: Tensor, num_clients: int, alpha: float, generator: Generator, balance: Balance = "client"
) -> list[Tensor]:
    """Assign samples with class proportions from a Dirichlet distribution.

    The concentration ``alpha`` is above 0.

    - ``balance="client"``: Hsu et al. 2019, "Measuring the Effects of Non-Identical Data
      Distribution for Federated Visual Classification", section 3. Client m draws class proportions
      ``q_m ~ Dir(alpha * prior)``, with the class frequencies as ``prior``. Then it draws samples
      without replacement, with classes from ``q_m``. Once no sample of a class is left, the class
      is dropped and ``q_m`` is renormalised. Client sizes differ by at most one. The larger clients
      come first.
    - ``balance="class"``: The samples of each class are divided among the clients in proportions
      from ``Dir(alpha, ..., alpha)``, as in the FBN paper's experiments (appendix C.2). Client
      sizes are unequal.

    With C equally large classes, the concentration is ``alpha / C`` per class for ``"client"``, and
    ``alpha`` per client for ``"class"``. A large ``alpha`` makes the clients IID. With a small
    ``alpha``, ``"client"`` gives each client one class, and ``"class"`` gives each class to one
    client.

    Raises:
        ConfigurationError: ``balance="class"`` leaves a client without a sample.
    """
    check_dirichlet(alpha, balance)
    _check_num_clients(num_clients, len(labels))
    available = class_sizes(labels)
    rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
    if balance == "client":
        counts = counts_per_client(available, num_clients, alpha, rng)
    else:
        counts = counts_per_class(available, num_clients, alpha, rng)
        empty = int((counts.sum(1) == 0).sum())
        if empty:
            raise ConfigurationError(
                f"partition Dirichlet(alpha={alpha}, balance='class') leaves {empty} of "
                f"{num_clients} clients without a sample; use a larger alpha, fewer clients, another seed or "
                "balance='client' (equal sizes)"
            )
    return deal(labels, counts, generator)


def shards(
    labels: Tensor,
    num_clients: int,
    class_fraction: float,
    generator: Generator,
    assignment: Assignment = "random",
    tail: int = 0,
) -> list[Tensor]:
    """Assign ``ceil(class_fraction * C)`` classes to each client.

    See FixBN, section 4, and Hsieh et al. 2020. ``class_fraction`` is in (0, 1]. All classes are
    held by equally many clients, up to a difference of one. The clients that hold a class share its
    samples equally. For example, with five clients and ``class_fraction=0.2``, each client holds a
    fifth of the classes, and no two clients share a class.

    ``assignment`` decides which classes a client holds:

    - ``"random"``: A random draw, see :func:`assign_classes`.
    - ``"consecutive"``: Adjacent classes in ascending order of label. Client 0 holds the first
      classes, client 1 the next classes, and so on. After the last class, the order starts again
      with the first class.
    - ``"modulo"``: Only client c % n holds class c, as in the code of Hsieh et al. The number of
      clients times the number of classes per client must be C.

    With a ``tail``, every client also gets ``tail`` random samples of every class that it does not
    hold. The clients that hold the class keep these samples, so a sample may belong to several
    clients. The code of FedBE (Chen, Chao, ICLR 2021) uses a tail of 10.

    Raises:
        ConfigurationError: The clients cannot hold every class, the numbers of clients and classes
            do not fit ``"modulo"``, or a class has too few samples for its clients or for the tail.
    """
    check_shards(class_fraction, assignment, tail)
    _check_num_clients(num_clients, len(labels))
    available = class_sizes(labels)
    num_classes = len(available)
    # tolerance for rounding: 0.07 * 100 is 7.000000000000001 and must give 7 classes
    held = max(1, math.ceil(class_fraction * num_classes - 1e-9))
    if num_clients * held < num_classes:
        enough = math.ceil(num_classes / num_clients) / num_classes
        raise ConfigurationError(
            f"class_fraction={class_fraction} gives each of {num_clients} clients {held} of "
            f"{num_classes} classes, too few to hold every class; use class_fraction >= {enough:.4g} "
            f"or num_clients >= {math.ceil(num_classes / held)}"
        )
    if assignment == "modulo" and num_clients * held != num_classes:
        raise ConfigurationError(
            f"assignment='modulo' with class_fraction={class_fraction} gives {num_clients} clients {held} classes each, but "
            f"there are {num_classes} classes; use num_clients that divide {num_classes} and class_fraction = 1 / num_clients"
        )
    if assignment == "random":
        holds = assign_classes(num_clients, num_classes, held, generator)
    else:
        positions = np.arange(num_clients * held).reshape((num_clients, held))
        if assignment == "modulo":
            positions = positions.reshape((held, num_clients)).T
        holds = np.zeros((num_clients, num_classes), dtype=np.bool_)
        np.put_along_axis(holds, positions % num_classes, True, axis=1)
    scarce = np.flatnonzero(available < holds.sum(0))
    if len(scarce):
        label = np.unique(labels.numpy())[scarce[0]]
        raise ConfigurationError(
            f"class_fraction={class_fraction} with {num_clients} clients gives class {label} "
            f"{holds[:, scarce[0]].sum()} holders but it has {available[scarce[0]]} samples; use a smaller "
            "class_fraction or fewer clients"
        )
    parts = deal(labels, split_among_holders(available, holds), generator)
    return _with_tail(parts, labels, holds, tail, generator) if tail else parts


def _with_tail(
    parts: list[Tensor], labels: Tensor, holds: Incidence, tail: int, generator: Generator
) -> list[Tensor]:
    """Give each client ``tail`` random samples of every class that the client does not hold."""
    samples = [(labels == label).nonzero().flatten() for label in torch.unique(labels)]
    rarest = min(samples, key=len)
    if len(rarest) < tail:
        raise ConfigurationError(
            f"tail={tail} samples of every class, but class {int(labels[rarest[0]])} has {len(rarest)}; use a smaller tail"
        )
    joined = []
    for part, held in zip(parts, holds, strict=True):
        foreign = [
            of_class[torch.randperm(len(of_class), generator=generator)[:tail]]
            for of_class, holder in zip(samples, held, strict=True)
            if not holder
        ]
        joined.append(torch.cat([part, *foreign]).sort().values)
    return joined


def gamma_similarity(labels: Tensor, num_clients: int, gamma: float, generator: Generator) -> list[Tensor]:
    """Assign a share ``gamma`` of the samples at random, and the rest in chunks sorted by class.

    The FBN paper (section 5) uses this partition. The SCAFFOLD paper calls it "s % similarity".
    First, ``gamma * N`` random samples are distributed equally over the clients. The other samples
    are sorted by label and cut into one chunk per client. Client sizes differ by at most one.
    ``gamma`` is in [0, 1]. With 1, the clients are IID. With 0, all samples are sorted by class.
    """
    check_gamma(gamma)
    total = len(labels)
    _check_num_clients(num_clients, total)
    order = torch.randperm(total, generator=generator)
    num_dealt = round(gamma * total)
    dealt, rest = order[:num_dealt], order[num_dealt:]
    rest = rest[labels[rest].argsort(stable=True)]
    clients = torch.arange(num_clients)
    chunk_sizes = equal_sizes(total, num_clients) - equal_sizes(num_dealt, num_clients)
    owner = torch.empty(total, dtype=torch.int64)
    owner[dealt] = torch.arange(num_dealt) % num_clients
    owner[rest] = clients.repeat_interleave(torch.from_numpy(chunk_sizes))
    return index_lists(owner, num_clients)


def natural(groups: Tensor | Sequence[str] | Sequence[int]) -> list[Tensor]:
    """Make each group (a city, a writer, a hospital) a client, in sorted order.

    Args:
        groups: Group of each sample, as an integer or a name, shape ``[N]`` with N at least 1.
    """
    if len(groups) == 0:
        raise ConfigurationError("partition Natural() found 0 samples; it needs one group per sample")
    names, owner = np.unique(np.asarray(groups), return_inverse=True)
    return index_lists(torch.from_numpy(owner), len(names))


def check_dirichlet(alpha: float, balance: str) -> None:
    """Raise a ConfigurationError if ``alpha`` is not positive or ``balance`` is unknown."""
    if not 0 < alpha < math.inf:
        raise ConfigurationError(
            f"alpha must be a positive number, found {alpha}; IID() is the limit alpha = inf"
        )
    if balance not in ("client", "class"):
        raise ConfigurationError(f"balance must be 'client' or 'class', found {balance!r}")


def check_shards(class_fraction: float, assignment: str, tail: int) -> None:
    """Raise a ConfigurationError if a setting of :func:`shards` is out of its range."""
    if not 0 < class_fraction <= 1:
        raise ConfigurationError(f"class_fraction must be in (0, 1], such as 0.2, found {class_fraction}")
    check_choice("Shards.assignment", assignment, get_args(Assignment))
    if not isinstance(tail, int) or tail < 0:
        raise ConfigurationError(
            f"Shards.tail: {tail} must be at least 0, a whole number of samples of every class"
        )


def check_gamma(gamma: float) -> None:
    """Raise a ConfigurationError if the share of IID data is outside [0, 1]."""
    if not 0 <= gamma <= 1:
        raise ConfigurationError(f"gamma must be in [0, 1] (0 sorted by class, 1 IID), found {gamma}")


def _check_num_clients(num_clients: int, num_samples: int) -> None:
    if not 1 <= num_clients <= num_samples:
        raise ConfigurationError(
            f"num_clients must be in [1, {num_samples}], as there are {num_samples} training samples; "
            f"found {num_clients}"
        )
