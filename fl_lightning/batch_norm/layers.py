"""Batch Normalization layers of a model, which are found by their type."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.errors import ConfigurationError, check_number

ONE_VALUE = (
    "gets one value per channel, whose variance is undefined; use batch_size >= 2, data.min_examples: 2 for a client of one sample, "
    "larger images, norm: gn or, for a DeepLab, pooled_norm: none"
)
"""Remedies in the error message for BN layers that get a single value per channel."""


def batch_norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return a model's BN layers by name.

    BN layers are ``BatchNorm1d``, ``BatchNorm2d``, ``BatchNorm3d``, ``SyncBatchNorm`` and
    subclasses.
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def require_batch_norm(
    model: nn.Module, method: str, *, statistics: bool = True, momentum: bool = False
) -> dict[str, _BatchNorm]:
    """Return a model's BN layers by name. Raise an error if they do not suit the method.

    Args:
        model: The model.
        method: Name of the method, for messages.
        statistics: Whether the method needs running statistics in every layer.
        momentum: Whether the method uses the layers' momentum.

    Raises:
        ConfigurationError: The model has no BN layer, or a layer lacks running statistics or
            momentum that the method needs.
    """
    layers, kind = batch_norm_layers(model), type(model).__name__
    if not layers:
        raise ConfigurationError(f"{method}: the model {kind} has no Batch Normalization layer; use norm: bn")
    untracked = [name for name, layer in layers.items() if layer.running_mean is None]
    if untracked and statistics:
        raise ConfigurationError(
            f"{method}: BN layer {untracked[0]!r} of {kind} keeps no running statistics; use track_running_stats=True"
        )
    for name, layer in layers.items():
        if momentum and not layer.momentum:
            raise ConfigurationError(
                f"{method}: BN layer {name!r} of {kind} has momentum={layer.momentum}, which {method} averages with; set "
                "model.bn_momentum in (0, 1]"
            )
    return layers


@contextmanager
def watching_inputs(layers: Mapping[str, _BatchNorm], look: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call a function with the inputs of each BN layer until the ``with`` block ends.

    Args:
        layers: BN layers with running statistics, by name.
        look: Function of a layer's name and the inputs ``[channels, K]``, in the dtype of the
            running statistics and without gradients.
    """

    @torch.no_grad()
    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], _outputs: Any, name: str) -> None:
        look(name, inputs[0].transpose(0, 1).flatten(1).to(layer.get_buffer("running_mean").dtype))

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(hook, name=name)))
        yield


def refuse_synchronised(model: nn.Module) -> None:
    """Raise a ``ConfigurationError`` if a layer would mix the clients of several ranks."""
    for name, layer in batch_norm_layers(model).items():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigurationError(
                f"model: BN layer {name!r} is a SyncBatchNorm, which would mix the clients of several ranks; use BatchNorm, or "
                "trainer.devices: 1"
            )


def set_momentum(model: nn.Module, momentum: float) -> None:
    """Set the momentum of all BN layers, in PyTorch's convention.

    The moving average is ``run <- (1 - momentum) run + momentum batch``.

    Raises:
        ConfigurationError: The momentum is outside (0, 1].
    """
    check_number("bn_momentum", momentum, "; torch's default is 0.1", above=0, most=1)
    for layer in batch_norm_layers(model).values():
        layer.momentum = momentum


@contextmanager
def explain_batch_of_one() -> Iterator[None]:
    """Add remedies to PyTorch's error message "expected more than 1 value per channel"."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise ConfigurationError(f"a BN layer {ONE_VALUE}") from error
        raise


def has_statistics(model: nn.Module) -> bool:
    """Return whether a model has BN layers, and all its BN layers keep running statistics."""
    layers = batch_norm_layers(model).values()
    return bool(layers) and all(layer.running_mean is not None for layer in layers)
