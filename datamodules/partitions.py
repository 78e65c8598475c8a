"""Partitions of the training data over the clients, by a rule."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor

from fl_lightning.errors import ConfigurationError, check_choice
from fl_lightning.recorded import Recorded

Counts = npt.NDArray[np.int64]
Incidence = npt.NDArray[np.bool_]
Groups = Tensor | Sequence[str] | Sequence[int] | None
Balance = Literal["client", "class"]
ClassAssignment = Literal["random", "consecutive", "modulo"]


class Partition(Recorded):
    """A rule that assigns the training samples to the clients."""

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """Assign every sample to one client, or to several if :class:`Shards` has a ``tail``.

        Args:
            labels: Class of each sample, shape ``[N]``.
            num_clients: Number of clients.
            generator: Random number generator of all draws.
            groups: Group of each sample, shape ``[N]``. None: no groups.

        Returns:
            Indices of each client's samples, int64, ascending. Every client has at least one sample.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define __call__(labels, num_clients, generator, groups)"
        )

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={x!r}" for name, x in vars(self).items() if name[:1] != "_")
        return f"{type(self).__name__}({arguments})"


class IID(Partition):
    """Random partition. Client sizes differ by at most one."""

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        _check_num_clients(num_clients, len(labels))
        owner = torch.empty(len(labels), dtype=torch.int64)
        owner[torch.randperm(len(labels), generator=generator)] = torch.arange(len(labels)) % num_clients
        return _index_lists(owner, num_clients)


class Dirichlet(Partition):
    """Partition with class proportions from a Dirichlet distribution.

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

    Args:
        alpha: Concentration, above 0. With a smaller value, the clients differ more.
        balance: ``"client"`` (equal client sizes) or ``"class"`` (unequal client sizes).

    Raises:
        ConfigurationError: A setting is out of its range, or ``balance="class"`` leaves a client
            without a sample.
    """

    def __init__(self, alpha: float, balance: Balance = "client") -> None:
        if not 0 < alpha < math.inf:
            raise ConfigurationError(
                f"alpha must be a positive number, found {alpha}; IID() is the limit alpha = inf"
            )
        if balance not in ("client", "class"):
            raise ConfigurationError(f"balance must be 'client' or 'class', found {balance!r}")
        self.alpha = alpha
        self.balance: Balance = balance

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        _check_num_clients(num_clients, len(labels))
        available = _class_sizes(labels)
        rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
        if self.balance == "client":
            return _deal(labels, _counts_per_client(available, num_clients, self.alpha, rng), generator)
        counts = _counts_per_class(available, num_clients, self.alpha, rng)
        if empty := int((counts.sum(1) == 0).sum()):
            raise ConfigurationError(
                f"partition Dirichlet(alpha={self.alpha}, balance='class') leaves {empty} of "
                f"{num_clients} clients without a sample; use a larger alpha, fewer clients, another seed or "
                "balance='client' (equal sizes)"
            )
        return _deal(labels, counts, generator)


class Shards(Partition):
    """Partition with the same number of classes at each client: FixBN, section 4, and Hsieh et al.

    Each client holds ``ceil(class_fraction * C)`` of C classes. All classes are held by equally
    many clients, up to a difference of one. The clients that hold a class share its samples
    equally. For example, with five clients and ``class_fraction=0.2``, each client holds a fifth of
    the classes, and no two clients share a class.

    Args:
        class_fraction: Share of the classes that a client holds, in (0, 1]. The FixBN paper uses
            0.2.
        assignment: Rule that chooses the classes of a client.

            - ``"random"``: A random draw. The clients take their classes one after the other from
              random permutations of all classes.
            - ``"consecutive"``: Adjacent classes in ascending order of label. Client 0 holds the
              first classes, client 1 the next classes, and so on. After the last class, the order
              starts again with the first class.
            - ``"modulo"``: Only client c % n holds class c, as in the code of Hsieh et al. The
              number of clients times the number of classes per client must be C.
        tail: Number of samples, at least 0, that a client additionally gets from every class that
            it does not hold. The clients that hold the class keep these samples, so that a sample
            may belong to several clients. The code of FedBE (Chen, Chao, ICLR 2021) uses 10.

    Raises:
        ConfigurationError: A setting is out of its range, the clients cannot hold every class, the
            numbers of clients and classes do not fit ``"modulo"``, or a class has too few samples
            for its clients or for the tail.
    """

    def __init__(self, class_fraction: float, assignment: ClassAssignment = "random", tail: int = 0) -> None:
        if not 0 < class_fraction <= 1:
            raise ConfigurationError(f"class_fraction must be in (0, 1], such as 0.2, found {class_fraction}")
        check_choice("Shards.assignment", assignment, get_args(ClassAssignment))
        if not isinstance(tail, int) or tail < 0:
            raise ConfigurationError(
                f"Shards.tail: {tail} must be at least 0, a whole number of samples of every class"
            )
        self.class_fraction = class_fraction
        self.assignment: ClassAssignment = assignment
        self.tail = tail

    def __repr__(self) -> str:
        assignment = f", assignment={self.assignment!r}" if self.assignment != "random" else ""
        tail = f", tail={self.tail}" if self.tail else ""
        return f"Shards(class_fraction={self.class_fraction}{assignment}{tail})"

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        _check_num_clients(num_clients, len(labels))
        available = _class_sizes(labels)
        holds = self._holders(num_clients, len(available), generator)
        scarce = np.flatnonzero(available < holds.sum(0))
        if len(scarce):
            label = np.unique(labels.numpy())[scarce[0]]
            raise ConfigurationError(
                f"class_fraction={self.class_fraction} with {num_clients} clients gives class {label} "
                f"{holds[:, scarce[0]].sum()} holders but it has {available[scarce[0]]} samples; use a smaller "
                "class_fraction or fewer clients"
            )
        parts = _deal(labels, _split_among_holders(available, holds), generator)
        return _with_tail(parts, labels, holds, self.tail, generator) if self.tail else parts

    def _holders(self, num_clients: int, num_classes: int, generator: Generator) -> Incidence:
        # tolerance for rounding: 0.07 * 100 is 7.000000000000001 and must give 7 classes
        held = max(1, math.ceil(self.class_fraction * num_classes - 1e-9))
        if num_clients * held < num_classes:
            enough = math.ceil(num_classes / num_clients) / num_classes
            raise ConfigurationError(
                f"class_fraction={self.class_fraction} gives each of {num_clients} clients {held} of "
                f"{num_classes} classes, too few to hold every class; use class_fraction >= {enough:.4g} "
                f"or num_clients >= {math.ceil(num_classes / held)}"
            )
        if self.assignment == "modulo" and num_clients * held != num_classes:
            raise ConfigurationError(
                f"assignment='modulo' with class_fraction={self.class_fraction} gives {num_clients} clients {held} classes each, but "
                f"there are {num_classes} classes; use num_clients that divide {num_classes} and class_fraction = 1 / num_clients"
            )
        if self.assignment == "random":
            return _random_classes(num_clients, num_classes, held, generator)
        positions = np.arange(num_clients * held).reshape((num_clients, held))
        if self.assignment == "modulo":
            positions = positions.reshape((held, num_clients)).T
        holds = np.zeros((num_clients, num_classes), dtype=np.bool_)
        np.put_along_axis(holds, positions % num_classes, True, axis=1)
        return holds


class GammaSimilarity(Partition):
    """Partition that assigns a share of the data at random, and the rest sorted by class.

    The FBN paper (section 5) uses this partition. The SCAFFOLD paper calls it "s % similarity".
    First, ``gamma * N`` random samples are distributed equally over the clients. The other samples
    are sorted by label and cut into one chunk per client. Client sizes differ by at most one. With
    ``gamma=1``, the clients are IID. With 0, all samples are sorted by class.

    Args:
        gamma: Share of the data that is assigned at random, in [0, 1].
    """

    def __init__(self, gamma: float) -> None:
        if not 0 <= gamma <= 1:
            raise ConfigurationError(f"gamma must be in [0, 1] (0 sorted by class, 1 IID), found {gamma}")
        self.gamma = gamma

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        total = len(labels)
        _check_num_clients(num_clients, total)
        order = torch.randperm(total, generator=generator)
        num_dealt = round(self.gamma * total)
        dealt, rest = order[:num_dealt], order[num_dealt:]
        rest = rest[labels[rest].argsort(stable=True)]
        clients = torch.arange(num_clients)
        chunk_sizes = _equal_sizes(total, num_clients) - _equal_sizes(num_dealt, num_clients)
        owner = torch.empty(total, dtype=torch.int64)
        owner[dealt] = torch.arange(num_dealt) % num_clients
        owner[rest] = clients.repeat_interleave(torch.from_numpy(chunk_sizes))
        return _index_lists(owner, num_clients)


class Natural(Partition):
    """Partition with one client per group (a city, a writer, a hospital), in sorted order."""

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`. Raise a ConfigurationError if the data have no groups."""
        if groups is None:
            raise ConfigurationError(
                "partition Natural() needs groups, but this data set has none; use IID, Dirichlet, Shards or GammaSimilarity"
            )
        if len(groups) == 0:
            raise ConfigurationError("partition Natural() found 0 samples; it needs one group per sample")
        names, owner = np.unique(np.asarray(groups), return_inverse=True)
        return _index_lists(torch.from_numpy(owner), len(names))


class HonestOnly(Partition):
    """Partition that divides all data among the honest clients, as in ByzFL.

    The clients with the highest ids are the attackers, as with ``Byzantine(clients=attackers)``.
    Attackers get copies of honest clients' data, because some attacks need data.

    Args:
        partition: Partition of the data over the honest clients.
        attackers: Number of attackers, at least 0.
    """

    def __init__(self, partition: Partition, attackers: int) -> None:
        if attackers < 0:
            raise ConfigurationError(f"HonestOnly.attackers: {attackers} must be at least 0")
        self.partition, self.attackers = partition, attackers

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`. Raise a ConfigurationError if no client is honest."""
        if self.attackers >= num_clients:
            raise ConfigurationError(
                f"HonestOnly.attackers: {self.attackers} of {num_clients} clients leave none honest; use fewer"
            )
        honest = self.partition(labels, num_clients - self.attackers, generator, groups)
        return honest + [honest[i % len(honest)].clone() for i in range(self.attackers)]


def _class_sizes(labels: Tensor) -> Counts:
    """Return the size of each class that occurs, in ascending order of label, ``[C]``."""
    return np.unique(labels.numpy(), return_counts=True)[1]


def _equal_sizes(total: int, num_clients: int) -> Counts:
    """Split ``total`` into n sizes that differ by at most one, the larger sizes first, ``[n]``."""
    return total // num_clients + (np.arange(num_clients) < total % num_clients).astype(np.int64)


def _index_lists(owner: Tensor, num_clients: int) -> list[Tensor]:
    """Return the ascending indices of each client's samples.

    Args:
        owner: Client of each sample, shape ``[N]``.
        num_clients: Number of clients.
    """
    sizes = torch.bincount(owner, minlength=num_clients)
    return list(owner.argsort(stable=True).tensor_split(sizes.cumsum(0)[:-1]))


def _deal(labels: Tensor, counts: Counts, generator: Generator) -> list[Tensor]:
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
    return _index_lists(owner, num_clients)


def _counts_per_client(available: Counts, num_clients: int, alpha: float, rng: np.random.Generator) -> Counts:
    """Return the number of samples of each class at each client, ``[n, C]``.

    Client sizes differ by at most one. Each client draws class proportions ``q ~ Dir(alpha *
    prior)``. Then it draws the classes of all its samples from ``q``. If too few samples of a class
    are left, the client takes these samples and draws the missing samples again without this class.
    This is the same as if ``q`` were renormalised as soon as the class is used up.
    """
    prior = available / available.sum()
    stock = available.copy()
    counts = np.zeros((num_clients, len(available)), dtype=np.int64)
    for client, size in enumerate(_equal_sizes(int(available.sum()), num_clients)):
        log_q = _log_dirichlet(alpha * prior, rng)
        missing = size
        while missing > 0:
            log_q[stock == 0] = -np.inf
            taken = np.minimum(rng.multinomial(missing, _softmax(log_q)), stock)
            counts[client] += taken
            stock -= taken
            missing -= taken.sum()
    return counts


def _counts_per_class(available: Counts, num_clients: int, alpha: float, rng: np.random.Generator) -> Counts:
    """Return the number of samples of each class at each client, ``[n, C]``.

    For each class, the shares of the clients are drawn from ``Dir(alpha, ..., alpha)``.
    """
    proportions = _softmax(_log_dirichlet(np.full((len(available), num_clients), alpha), rng))
    cuts = np.rint(proportions.cumsum(1) * available[:, None]).astype(np.int64)
    cuts[:, -1] = available
    return np.diff(cuts, axis=1, prepend=0).T


def _random_classes(num_clients: int, num_classes: int, held: int, generator: Generator) -> Incidence:
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


def _split_among_holders(available: Counts, holds: Incidence) -> Counts:
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


def _check_num_clients(num_clients: int, num_samples: int) -> None:
    if not 1 <= num_clients <= num_samples:
        raise ConfigurationError(
            f"num_clients must be in [1, {num_samples}], as there are {num_samples} training samples; "
            f"found {num_clients}"
        )
