"""Randomness as a function of (seed, purpose, round, client, ...), never of call order.

Every random draw of a federated run (participation, data order, augmentation, dropout, attacks) comes from a generator
made here. Results then do not depend on which process, block or executor computed a client, any round can be computed
alone, and a resumed run needs no saved generator state.
"""

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor


def derive_seed(seed: int, purpose: str, *coordinates: int) -> int:
    """Hash a seed, a purpose and integer coordinates into an independent 63-bit seed.

    Args:
        seed: The run's seed.
        purpose: What the numbers are for, such as ``"participation"``: equal coordinates of different purposes are
            independent.
        coordinates: Round, client, step, ...: whatever the draw is a function of.

    Returns:
        An integer in [0, 2**63).
    """
    message = purpose.encode() + struct.pack(f"<{len(coordinates) + 1}q", seed, *coordinates)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """A CPU generator for one purpose at the given coordinates (see :func:`derive_seed`)."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *coordinates))


def permutation(n: int, seed: int, purpose: str, *coordinates: int) -> Tensor:
    """A random permutation of ``range(n)`` for one purpose at the given coordinates, shape ``[n]``, int64."""
    return torch.randperm(n, generator=generator(seed, purpose, *coordinates))


def seed_global(seed: int, device: torch.device) -> None:
    """Seed torch's global generators of the CPU and of ``device``: cheaper than ``torch.manual_seed``."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


_has_accelerator = cache(torch.accelerator.is_available)


def seed_everything(seed: int) -> None:
    """Seed torch's (of all devices), numpy's and Python's global generators from one integer."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # the same, which keeps a traceback for each kind of device that might come later: slow
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """:func:`seed_everything` for a block; afterwards the generators are as they were."""
    with isolate_rng():
        seed_everything(seed)
        yield
