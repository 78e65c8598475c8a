"""A release of BN statistics with differential privacy, for training with frozen statistics."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.batch_norm.swapping import evaluating
from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import generator

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule


@torch.no_grad()
def release_statistics(pl_module: "FederatedModule", clip: float, noise: float) -> int:
    """Replace the model's running statistics by noisy ones of all clients' training samples.

    Each client computes, in one pass in eval mode, a vector for each of its n samples: mean and mean
    square of each channel at all BN layers. The client sends ``(1 / n) (sum_j min(1, C / |v_j|) v_j +
    N(0, sigma^2 C^2 I))``. The server averages what the clients send. A variance that is not positive
    keeps its last value.

    Args:
        pl_module: The run. Its data are in memory.
        clip: Largest norm C of a sample's vector.
        noise: Standard deviation sigma of the noise, in units of ``clip``.

    Returns:
        Number of floats that each client sends.
    """
    data: Any = pl_module.data
    if not hasattr(data, "samples"):
        raise ConfigurationError(
            f"PrivateSGD.statistics_noise: {type(data).__name__} does not keep its samples in memory; leave statistics_noise out"
        )
    layers = batch_norm_layers(pl_module.model)
    if not layers or any(layer.running_mean is None for layer in layers.values()):
        raise ConfigurationError(
            f"PrivateSGD.statistics_noise: {type(pl_module.model).__name__} has no BN layers with running statistics; leave it out"
        )
    clients = [*range(data.num_clients)]
    weights = pl_module.plan.usual().weights(clients, 1)
    pooled: Any = 0.0
    for client, weight in zip(clients, weights.tolist(), strict=True):
        indices, total = data.distribution.clients[client], torch.zeros(())
        for part in torch.split(indices, data.eval_batch_size):
            vectors = _vectors(pl_module, layers, data.samples[part][0]).double().cpu()
            total = total + clipped_sum(vectors, clip)
        drawn = torch.randn(total.shape, generator=generator(pl_module.seed, "private statistics", client))
        pooled = pooled + weight * (total + noise * clip * drawn) / len(indices)
    moments = torch.split(pooled, [size for x in layers.values() for size in [x.num_features] * 2])
    for layer, mean, square in zip(layers.values(), moments[::2], moments[1::2], strict=True):
        variance, old = square - mean.square(), layer.get_buffer("running_var")
        layer.get_buffer("running_mean").copy_(mean)
        old.copy_(torch.where(variance > 0, variance.to(old), old))
    return len(pooled)


def clipped_sum(vectors: Tensor, clip: float) -> Tensor:
    """Return ``sum_j min(1, C / |v_j|) v_j`` for vectors ``[n, d]``, without those that are not finite."""
    vectors = vectors[vectors.isfinite().all(1)]
    factors: Tensor = (clip / vectors.norm(dim=1)).clamp(max=1.0)
    return factors @ vectors


def _vectors(pl_module: "FederatedModule", layers: dict[str, Any], inputs: Tensor) -> Tensor:
    """Return the moments of each sample at all BN layers, ``[b, sum of 2 C]``."""
    found: dict[str, Tensor] = {}

    def look(_: nn.Module, given: tuple[Tensor, ...], name: str) -> None:
        values = given[0].flatten(2) if given[0].dim() > 2 else given[0].unsqueeze(2)
        found[name] = torch.cat([values.mean(2), values.square().mean(2)], 1)

    hooks = [layer.register_forward_pre_hook(partial(look, name=name)) for name, layer in layers.items()]
    try:
        with evaluating(pl_module.model):
            pl_module.model(pl_module.on_device(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([found[name] for name in layers], 1)
