"""The partitions as objects, so that a configuration can name them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.datamodules import partition
from fl_lightning.datamodules.partition import Balance
from fl_lightning.errors import ConfigurationError
from fl_lightning.recorded import Recorded

Groups = Tensor | Sequence[str] | Sequence[int]


class Partition(Recorded):
    """How the training data are spread over the clients.

    The subclasses wrap the functions of ``~fl_lightning.datamodules.partition``.
    """

    def __call__(
        self, labels: Tensor, num_clients: int, generator: torch.Generator, groups: Groups | None = None
    ) -> list[Tensor]:
        """Assign every sample to one client.

        Args:
            labels: Class of each sample, shape ``[N]``.
            num_clients: Number of clients.
            generator: The source of all random choices.
            groups: Group of each sample, shape ``[N]``, for data that come in groups.

        Returns:
            For each client the indices of its samples, int64, ascending.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define __call__(labels, num_clients, generator, groups)"
        )

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={x!r}" for name, x in vars(self).items() if name[:1] != "_")
        return f"{type(self).__name__}({arguments})"


class IID(Partition):
    """Equal random shares (:func:`~fl_lightning.datamodules.partition.iid`)."""

    def __call__(
        self, labels: Tensor, num_clients: int, generator: torch.Generator, groups: Groups | None = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        return partition.iid(labels, num_clients, generator)


class Dirichlet(Partition):
    """Class proportions from a Dirichlet distribution (:func:`~fl_lightning.datamodules.partition.dirichlet`).

    Args:
        alpha: Concentration, above 0; small values give skewed clients.
        balance: ``"client"`` (Hsu et al. 2019, clients of equal size) or ``"class"`` (each class split,
            unequal sizes).
    """

    def __init__(self, alpha: float, balance: Balance = "client") -> None:
        partition.check_dirichlet(alpha, balance)
        self.alpha = alpha
        self.balance: Balance = balance

    def __call__(
        self, labels: Tensor, num_clients: int, generator: torch.Generator, groups: Groups | None = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        return partition.dirichlet(labels, num_clients, self.alpha, generator, self.balance)


class Shards(Partition):
    """The same share of the classes at every client (:func:`~fl_lightning.datamodules.partition.shards`).

    Args:
        class_fraction: Share of the classes that a client holds, in (0, 1]; 0.2 in the FixBN paper.
    """

    def __init__(self, class_fraction: float) -> None:
        partition.check_class_fraction(class_fraction)
        self.class_fraction = class_fraction

    def __call__(
        self, labels: Tensor, num_clients: int, generator: torch.Generator, groups: Groups | None = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        return partition.shards(labels, num_clients, self.class_fraction, generator)


class GammaSimilarity(Partition):
    """A share of homogeneous data, the rest sorted by class (:func:`~fl_lightning.datamodules.partition.gamma_similarity`).

    Args:
        gamma: Share of homogeneous data, in [0, 1].
    """

    def __init__(self, gamma: float) -> None:
        partition.check_gamma(gamma)
        self.gamma = gamma

    def __call__(
        self, labels: Tensor, num_clients: int, generator: torch.Generator, groups: Groups | None = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        return partition.gamma_similarity(labels, num_clients, self.gamma, generator)


class Natural(Partition):
    """One client per group of the data set (:func:`~fl_lightning.datamodules.partition.natural`)."""

    def __call__(
        self, labels: Tensor, num_clients: int, generator: torch.Generator, groups: Groups | None = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`.

        Raises:
            ConfigurationError: The data set has no groups.
        """
        if groups is None:
            raise ConfigurationError(
                "partition Natural() needs data that come in groups, and this data set has none; "
                "use IID, Dirichlet, Shards or GammaSimilarity"
            )
        return partition.natural(groups)


class HonestOnly(Partition):
    """All data lie with the honest clients, as in the ByzFL library; attackers, the last ones, get copies of some of theirs.

    What attackers compute from their copies matters only to attacks that use it. ``Byzantine(clients=attackers)`` names the same
    clients.

    Args:
        partition: How the data are spread over the honest clients.
        attackers: How many clients are none, at least 0.
    """

    def __init__(self, partition: Partition, attackers: int) -> None:
        if attackers < 0:
            raise ConfigurationError(f"HonestOnly.attackers: {attackers} must be at least 0")
        self.partition, self.attackers = partition, attackers

    def __call__(
        self, labels: Tensor, num_clients: int, generator: torch.Generator, groups: Groups | None = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`.

        Raises:
            ConfigurationError: No client is honest.
        """
        if self.attackers >= num_clients:
            raise ConfigurationError(
                f"HonestOnly.attackers: {self.attackers} of {num_clients} clients leave none honest; use fewer"
            )
        honest = self.partition(labels, num_clients - self.attackers, generator, groups)
        return honest + [honest[i % len(honest)].clone() for i in range(self.attackers)]
