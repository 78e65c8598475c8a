"""The partition with the same number of classes at each client."""

import math
from itertools import pairwise
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
)
from fl_lightning.errors import ConfigurationError, check_at_least

Incidence = npt.NDArray[np.bool_]
ClassAssignment = Literal["random", "consecutive", "modulo"]


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

    ignores_groups = True

    def __init__(self, class_fraction: float, assignment: ClassAssignment = "random", tail: int = 0) -> None:
        if not 0 < class_fraction <= 1:
            raise ConfigurationError(f"class_fraction must be in (0, 1], such as 0.2, found {class_fraction}")
        check_at_least(0, tail=tail)
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
        check_num_clients(num_clients, len(labels))
        available = class_sizes(labels)
        holds = self._holders(num_clients, len(available), generator)
        scarce = np.flatnonzero(available < holds.sum(0))
        if len(scarce):
            label = np.unique(labels.numpy())[scarce[0]]
            raise ConfigurationError(
                f"class_fraction={self.class_fraction} with {num_clients} clients gives class {label} "
                f"{holds[:, scarce[0]].sum()} holders but it has {available[scarce[0]]} samples; use a smaller "
                "class_fraction or fewer clients"
            )
        parts = deal(labels, _split_among_holders(available, holds), generator)
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


def _split_among_holders(available: IntegerArray, holds: Incidence) -> IntegerArray:
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


def _path_to_smaller(sizes: IntegerArray, extra: Incidence, lacks: Incidence) -> list[int]:
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
