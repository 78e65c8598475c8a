"""Frozen BN layers, which normalise with their running statistics and do not update them."""

from collections.abc import Collection, Mapping

from torch import nn

from fl_lightning.batch_norm.layers import batch_norm_layers


def freeze_statistics(model: nn.Module, layers: Collection[nn.Module], treatments: Mapping[str, str]) -> None:
    """Let BN layers normalise with their running statistics or with the statistics of batches.

    The function is called in every round, as FixBN (Zhong et al. 2023) freezes the statistics after
    round T*. A layer with frozen running statistics normalises with them and does not update them.

    Args:
        model: The model.
        layers: The BN layers that track statistics.
        treatments: The treatment of each buffer by name.
    """
    tracking = {id(layer) for layer in layers}
    for name, layer in batch_norm_layers(model).items():
        if id(layer) in tracking:
            mean = f"{name}.running_mean" if name else "running_mean"
            layer.train(treatments.get(mean) != "frozen")
