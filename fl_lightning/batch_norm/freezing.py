"""Frozen BN layers: they compute with their running statistics and never update them."""

from collections.abc import Iterable

from torch import nn


def freeze_statistics(layers: Iterable[nn.Module], frozen: bool) -> None:
    """Let BN layers compute with their running statistics, or with the statistics of batches.

    A round calls it with what its policy says: from T* on the statistics are frozen (FixBN, Zhong et al. 2023).

    Args:
        layers: The BN layers that track statistics.
        frozen: Whether the running statistics are used and kept.
    """
    for layer in layers:
        layer.train(not frozen)
