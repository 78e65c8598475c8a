"""Function that switches BN layers between batch statistics and frozen running statistics."""

from collections.abc import Collection, Mapping

from torch import nn

from fl_lightning.batch_norm.layers import batch_norm_layers


def freeze_statistics(model: nn.Module, layers: Collection[nn.Module], treatments: Mapping[str, str]) -> None:
    """Set each BN layer to frozen running statistics or to batch statistics, for one round.

    A layer with frozen running statistics uses the statistics without updating them. The function
    is called in every round, because a method may freeze statistics in any round. For example,
    FixBN (Zhong et al. 2023) freezes statistics after round T*.

    Args:
        model: The model.
        layers: The BN layers that have running statistics.
        treatments: Treatment of each buffer in this round, such as ``"frozen"``. The keys are the
            names of the buffers.
    """
    for name, layer in batch_norm_layers(model).items():
        if layer in layers:
            layer.train(treatments.get(f"{name}.running_mean".lstrip(".")) != "frozen")
