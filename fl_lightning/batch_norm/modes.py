"""Another mode for a while: BN layers that normalise with the batch's statistics, a model in evaluation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.batch_norm.swapping import SwappedBatchNorm


@contextmanager
def batch_statistics(layers: Sequence[_BatchNorm]) -> Iterator[None]:
    """Let BN layers normalise with the statistics of their input, whatever forward pass a method has given them."""
    before = [(layer.__class__, layer.training, layer.track_running_stats) for layer in layers]
    try:
        for layer in layers:
            if isinstance(layer, SwappedBatchNorm):
                layer.__class__ = layer.original  # type: ignore[assignment]  # the class that it came with
            layer.training, layer.track_running_stats = True, False
        yield
    finally:
        for layer, (kind, training, tracking) in zip(layers, before, strict=True):
            layer.__class__ = kind
            layer.training, layer.track_running_stats = training, tracking


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode; afterwards every module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training
