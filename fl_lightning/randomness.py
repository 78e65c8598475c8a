"""Randomness as a function of (seed, purpose, round, client, ...), never of call order.

Every random draw of a federated run (participation, data order, augmentation, dropout, attacks)
uses a generator made here. Results do not depend on the process, block or executor that computes a
client, any round can be computed alone, and a resumed run needs no saved generator state.
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
        purpose: Use of the numbers, such as ``"participation"``; purposes are independent.
        coordinates: Round, client, step and so on, on which the draw depends.

    Returns:
        An integer in [0, 2**63).
    """
    message = purpose.encode() + struct.pack(f"<{len(coordinates) + 1}q", seed, *coordinates)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """Return a CPU generator for a purpose at some coordinates (see :func:`derive_seed`)."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *coordinates))


def permutation(n: int, seed: int, purpose: str, *coordinates: int) -> Tensor:
    """Draw a random permutation of ``range(n)``, int64 ``[n]`` (see :func:`derive_seed`)."""
    return torch.randperm(n, generator=generator(seed, purpose, *coordinates))


def seed_global(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and ``device``, faster than ``torch.manual_seed``."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


_has_accelerator = cache(torch.accelerator.is_available)


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch (all devices), numpy and Python from one integer."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # equivalent, but fast: torch.manual_seed keeps a traceback for each uninitialised device
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Call :func:`seed_everything` for the block; restore the generators afterwards."""
    with isolate_rng():
        seed_everything(seed)
        yield
