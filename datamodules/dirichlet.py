"""The partition with class proportions from a Dirichlet distribution."""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor

from fl_lightning.datamodules.partitions import (
    Groups,
    IntegerArray,
    Partition,
    check_num_clients,
    class_sizes,
    deal,
    equal_sizes,
)
from fl_lightning.errors import ConfigurationError, check_at_least

Balance = Literal["client", "class"]


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

    ignores_groups = True

    def __init__(self, alpha: float, balance: Balance = "client") -> None:
        if not 0 < alpha < math.inf:
            raise ConfigurationError(
                f"alpha must be a positive number, found {alpha}; IID() is the limit alpha = inf"
            )
        self.alpha = alpha
        self.balance: Balance = balance

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`."""
        check_num_clients(num_clients, len(labels))
        available = class_sizes(labels)
        rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
        if self.balance == "client":
            return deal(labels, _counts_per_client(available, num_clients, self.alpha, rng), generator)
        owners = self._owners(len(available), num_clients, generator)
        counts = _counts_per_class(available, num_clients, self.alpha, rng, owners)
        if empty := int((counts.sum(1) == 0).sum()):
            raise ConfigurationError(
                f"partition {self} leaves {empty} of {num_clients} clients without a sample; use a larger alpha, fewer clients, "
                "another seed or Dirichlet with balance='client' (equal sizes)"
            )
        return deal(labels, counts, generator)

    def _owners(
        self, num_classes: int, num_clients: int, generator: Generator
    ) -> npt.NDArray[np.bool_] | None:
        return None


class ExtendedDirichlet(Dirichlet):
    """Partition with a fixed number of classes per client, and Dirichlet proportions among the owners of a class.

    Every client draws ``classes_per_client`` different classes, so that every class has an owner. The
    samples of each class are divided among the class's owners in proportions from ``Dir(alpha, ...,
    alpha)``. Client sizes are unequal. If every client owns all classes, the partition is
    ``Dirichlet(alpha, balance="class")``. The strategy is from Li and Lyu, "Convergence Analysis of
    Sequential Federated Learning on Heterogeneous Data", NeurIPS 2023, appendix.

    Args:
        classes_per_client: Number of classes of a client, at most the number of classes.
        alpha: Concentration, above 0. With a smaller value, the sizes differ more.

    Raises:
        ConfigurationError: A setting is out of its range, the clients cannot own all classes, or a
            client would have no sample.
    """

    def __init__(self, classes_per_client: int, alpha: float) -> None:
        super().__init__(alpha, balance="class")
        check_at_least(1, classes_per_client=classes_per_client)
        self.classes_per_client = classes_per_client

    def __repr__(self) -> str:
        return f"ExtendedDirichlet(classes_per_client={self.classes_per_client}, alpha={self.alpha})"

    def _owners(self, num_classes: int, num_clients: int, generator: Generator) -> npt.NDArray[np.bool_]:
        own = self.classes_per_client
        if not own <= num_classes <= own * num_clients:
            raise ConfigurationError(
                f"ExtendedDirichlet.classes_per_client: {num_clients} clients with {own} classes each cannot divide {num_classes} "
                f"classes; use {-(-num_classes // num_clients)} to {num_classes}"
            )
        owners = np.zeros((num_classes, num_clients), dtype=bool)
        if own == num_classes:
            return ~owners
        # deal each class to one client, then fill up each client with random other classes
        classes, clients = (
            torch.randperm(n, generator=generator).numpy() for n in (num_classes, num_clients)
        )
        owners[classes, clients[np.arange(num_classes) % num_clients]] = True
        for client in range(num_clients):
            order = torch.randperm(num_classes, generator=generator).numpy()
            others = order[~owners[order, client]]
            owners[others[: own - owners[:, client].sum()], client] = True
        return owners


def _counts_per_client(
    available: IntegerArray, num_clients: int, alpha: float, rng: np.random.Generator
) -> IntegerArray:
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


def _counts_per_class(
    available: IntegerArray,
    num_clients: int,
    alpha: float,
    rng: np.random.Generator,
    owners: npt.NDArray[np.bool_] | None = None,
) -> IntegerArray:
    """Return the number of samples of each class at each client, ``[n, C]``.

    For each class, the shares of its owners (``[C, n]``, default: all clients) are drawn from
    ``Dir(alpha, ..., alpha)``.
    """
    log_shares = _log_dirichlet(np.full((len(available), num_clients), alpha), rng)
    proportions = _softmax(log_shares if owners is None else np.where(owners, log_shares, -np.inf))
    cuts = np.rint(proportions.cumsum(1) * available[:, None]).astype(np.int64)
    cuts[:, -1] = available
    return np.diff(cuts, axis=1, prepend=0).T


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
