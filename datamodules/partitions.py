"""Partitions of the training data over the clients, by a rule.

``Dirichlet`` is in ``dirichlet.py``, and ``Shards`` is in ``shards.py``.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor

from fl_lightning.errors import ConfigurationError, check_at_least
from fl_lightning.recorded import Recorded

IntegerArray = npt.NDArray[np.int64]
Groups = Tensor | Sequence[str] | Sequence[int] | None


class Partition(Recorded):
    """A rule that assigns the training samples to the clients.

    Attributes:
        ignores_groups: Whether the rule ignores the groups of the samples. Data with groups then
            refuse the partition.
    """

    ignores_groups = False

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

    ignores_groups = True

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        check_num_clients(num_clients, len(labels))
        owner = torch.empty(len(labels), dtype=torch.int64)
        owner[torch.randperm(len(labels), generator=generator)] = torch.arange(len(labels)) % num_clients
        return index_lists(owner, num_clients)


class GammaSimilarity(Partition):
    """Partition that assigns a share of the data at random, and the rest sorted by class.

    The FBN paper (section 5) uses this partition. The SCAFFOLD paper calls it "s % similarity".
    First, ``gamma * N`` random samples are distributed equally over the clients. The other samples
    are sorted by label and cut into one chunk per client. Client sizes differ by at most one. With
    ``gamma=1``, the clients are IID. With 0, all samples are sorted by class.

    Args:
        gamma: Share of the data that is assigned at random, in [0, 1].
    """

    ignores_groups = True

    def __init__(self, gamma: float) -> None:
        if not 0 <= gamma <= 1:
            raise ConfigurationError(f"gamma must be in [0, 1] (0 sorted by class, 1 IID), found {gamma}")
        self.gamma = gamma

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        total = len(labels)
        check_num_clients(num_clients, total)
        order = torch.randperm(total, generator=generator)
        num_dealt = round(self.gamma * total)
        dealt, rest = order[:num_dealt], order[num_dealt:]
        rest = rest[labels[rest].argsort(stable=True)]
        clients = torch.arange(num_clients)
        chunk_sizes = equal_sizes(total, num_clients) - equal_sizes(num_dealt, num_clients)
        owner = torch.empty(total, dtype=torch.int64)
        owner[dealt] = torch.arange(num_dealt) % num_clients
        owner[rest] = clients.repeat_interleave(torch.from_numpy(chunk_sizes))
        return index_lists(owner, num_clients)


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
        names, owner = np.unique(np.asarray(groups), return_inverse=True)
        return index_lists(torch.from_numpy(owner), len(names))


class HonestOnly(Partition):
    """Partition that divides all data among the honest clients, as in ByzFL.

    The clients with the highest ids are the attackers, as with ``Byzantine(clients=attackers)``.
    Attackers get copies of honest clients' data, because some attacks need data.

    Args:
        partition: Partition of the data over the honest clients.
        attackers: Number of attackers, at least 0.
    """

    def __init__(self, partition: Partition, attackers: int) -> None:
        check_at_least(0, attackers=attackers)
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


def class_sizes(labels: Tensor) -> IntegerArray:
    """Return the size of each class that occurs, in ascending order of label, ``[C]``."""
    return np.unique(labels.numpy(), return_counts=True)[1]


def equal_sizes(total: int, num_clients: int) -> IntegerArray:
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


def deal(labels: Tensor, counts: IntegerArray, generator: Generator) -> list[Tensor]:
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


def check_num_clients(num_clients: int, num_samples: int) -> None:
    """Raise a ConfigurationError if there are fewer samples than clients."""
    if not 1 <= num_clients <= num_samples:
        raise ConfigurationError(
            f"num_clients must be in [1, {num_samples}], as there are {num_samples} training samples; "
            f"found {num_clients}"
        )
