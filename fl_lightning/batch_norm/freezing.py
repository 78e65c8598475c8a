"""Frozen BN layers, which normalise with their running statistics and do not update them."""

from collections.abc import Iterable

from torch import nn


def freeze_statistics(layers: Iterable[nn.Module], frozen: bool) -> None:
    """Let BN layers normalise with their running statistics or with the statistics of batches.

    Called in every round: FixBN (Zhong et al. 2023) freezes the statistics from round T* on.

    Args:
        layers: The BN layers that track statistics.
        frozen: Whether the layers normalise with the running statistics, without updates.
    """
    for layer in layers:
        layer.train(not frozen)
