"""Random numbers that depend on seed, purpose, round and client, but never on the order of calls.

All random draws of a federated run use generators of this module: participation, data order,
augmentation, dropout and attacks. Results therefore do not depend on the process or the executor
that computes a client. A resumed run needs no saved generator state.
"""

import hashlib
import pickle
import random
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor


def derive_seed(seed: int, purpose: str, *coordinates: int) -> int:
    """Hash a seed, a purpose and integer coordinates into an independent 63-bit seed.

    Args:
        seed: The run's seed.
        purpose: Use of the random numbers, such as ``"participation"``. Numbers for different
            purposes are independent.
        coordinates: Integers on which the draw depends, such as round, client and step.

    Returns:
        An integer in [0, 2**63).
    """
    message = purpose.encode() + struct.pack(f"<{len(coordinates) + 1}q", seed, *coordinates)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """Return a CPU generator whose seed is :func:`derive_seed` of the same arguments."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *coordinates))


def permutation(n: int, seed: int, purpose: str, *coordinates: int) -> Tensor:
    """Draw a random permutation of ``range(n)``, int64 ``[n]``.

    Seed, purpose and coordinates are the arguments of :func:`generator`.
    """
    return torch.randperm(n, generator=generator(seed, purpose, *coordinates))


def seed_global(seed: int, device: torch.device) -> None:
    """Seed the global generators of numpy, of Python, and of torch for the CPU and ``device``.

    This is faster than ``torch.manual_seed``, which seeds all devices.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


_has_accelerator = cache(torch.accelerator.is_available)


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch (all devices), numpy and Python from one integer."""
    seed_global(seed, torch.device("cpu"))
    if _has_accelerator():  # without an accelerator, torch.manual_seed would only be slow
        torch.manual_seed(seed)


def python_states() -> bytes:
    """Return the states of the global generators of NumPy and Python."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def isolated() -> AbstractContextManager[None]:
    """Restore all global random generators at the end of the ``with`` block."""
    # whether there is a GPU is asked once: the answer takes a millisecond
    return isolate_rng(include_cuda=_has_accelerator())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all global random generators for the block, and restore their states after it."""
    with isolated():
        seed_everything(seed)
        yield
