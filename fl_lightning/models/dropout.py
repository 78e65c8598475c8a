"""Dropout whose mask does not depend on the order of calls.

torch's dropout draws from a global generator. A client's masks therefore depend on earlier draws,
and ``torch.func.vmap`` draws different masks than a loop over clients. The dropout of this module
computes masks from a hash of the element's index, the layer's number and a key. The key depends on
the seed, round, client and step. Masks are bit-identical for every executor, device and dtype.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fl_lightning.errors import ConfigurationError, check_at_least, check_number
from fl_lightning.randomness import derive_seed

_MASK32 = 0xFFFFFFFF
_Words = TypeVar("_Words", int, Tensor)


def dropout_keys(seed: int, round: int, client_ids: Sequence[int], step: int) -> Tensor:
    """Return the dropout keys of a cohort for one local step.

    Args:
        seed: The run's seed.
        round: The communication round, from 1.
        client_ids: The clients of the cohort.
        step: The local step within the round, from 0.

    Returns:
        One key per client, shape ``[C]``, int64, each in [0, 2**63).
    """
    return torch.tensor(
        [derive_seed(seed, "dropout", round, client, step) for client in client_ids], dtype=torch.int64
    )


class Dropout(nn.Module):
    """Dropout: in training, elements become 0 with probability ``p``.

    All other elements are divided by ``1 - p``.

    The mask depends on the buffer ``key``, which is set before every local step (see
    :func:`dropout_keys`). Within a local step, a layer always uses the same mask. Use a separate
    layer for each call in a forward pass.

    Args:
        p: Probability in [0, 1] that an element is dropped.
        dim: Number of trailing dimensions whose elements are dropped together. 0 drops single
            elements. 1, 2 or 3 drops channels, like ``nn.Dropout1d``, ``nn.Dropout2d`` or
            ``nn.Dropout3d``. As in PyTorch, 2 drops channels of ``[b, channels, length]``, and
            single elements of ``[b, features]``.

    Attributes:
        key: Scalar int64 buffer in [0, 2**63), not in the ``state_dict``. Under ``vmap``, each
            client has a separate key.
        layer: Number of this layer in its model, see :func:`convert_dropout`.

    Raises:
        ConfigurationError: ``p`` or ``dim`` is out of range.

    Example:
        >>> layer = Dropout(0.5)
        >>> (layer(torch.ones(2, 8)) == layer(torch.ones(2, 8))).all()  # the key decides the mask
        tensor(True)
    """

    key: Tensor

    def __init__(self, p: float = 0.5, dim: int = 0) -> None:
        super().__init__()
        check_number("Dropout.p", p, least=0, most=1)
        check_at_least(0, **{"Dropout.dim": dim})
        check_number("Dropout.dim", dim, " (0 for elements, 1, 2 or 3 for channels)", least=0, most=3)
        self.p = p
        self.dim = dim
        self.layer = 0
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of one client's activations ``[b, ...]``. In eval mode, return ``x``."""
        if not self.training or self.p == 0:
            return x
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return torch.where(self.kept(x), x * scale, 0.0)

    def kept(self, x: Tensor) -> Tensor:
        """Return the bool mask of the elements that are kept.

        The mask has the shape of ``x``, except that the dimensions that are dropped together have
        size 1.
        """
        # like nn.Dropout2d, draw for [b, channels] even if the input has no height and width
        shape = x.shape[: max(x.dim() - self.dim, 2 if self.dim == 2 else 1)]
        # hash twice: after a single hash, the masks of two keys would be permutations
        low = _mix((self.key & _MASK32) ^ _mix(self.layer + 1))
        high = _mix((self.key >> 32) ^ low)
        words = _mix(_mix(torch.arange(shape.numel(), device=x.device) ^ low) ^ high)
        return (words >= round(self.p * 2**32)).view(shape + (1,) * (x.dim() - len(shape)))

    def extra_repr(self) -> str:
        """Return the layer's settings, which ``print(model)`` shows."""
        return f"p={self.p}, dim={self.dim}, layer={self.layer}"


def _mix(words: _Words) -> _Words:
    """Hash integers in [0, 2**32) to integers in [0, 2**32), without collisions.

    A tensor is changed in place. The constants come from a low-bias hash of C. Wellons's
    hash-prospector. Both multipliers are below 2**31, so that products do not overflow int64.
    """
    words ^= words >> 16
    words *= 0x21F0AAAD
    words &= _MASK32
    words ^= words >> 15
    words *= 0x735A2D97
    words &= _MASK32
    words ^= words >> 15
    return words


_DROPPED_DIMENSIONS: dict[type[nn.Module], int] = {
    nn.Dropout: 0,
    nn.Dropout1d: 1,
    nn.Dropout2d: 2,
    nn.Dropout3d: 3,
}
_OTHERS_THAT_DRAW = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def convert_dropout(model: nn.Module) -> int:
    """Replace torch's dropout layers by :class:`Dropout`, in place, and number all dropout layers.

    The numbers are 0, 1, ... in the order of ``model.modules()``. If several modules share a
    dropout layer, each module gets a separate layer. Calls of ``F.dropout`` are not replaced.

    Returns:
        Number of all dropout layers in the model.

    Raises:
        ConfigurationError: :class:`Dropout` cannot replace a torch layer that draws random numbers.
    """
    for path, module in list(model.named_modules(remove_duplicate=False)):
        inside = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
        if isinstance(module, nn.modules.dropout._DropoutNd) and type(module) in _DROPPED_DIMENSIONS:
            ours = Dropout(module.p, _DROPPED_DIMENSIONS[type(module)]).train(module.training)
            model.set_submodule(path, ours)
        elif inside or isinstance(module, _OTHERS_THAT_DRAW):
            raise ConfigurationError(
                f"model layer {path!r} is a {type(module).__name__}, whose random numbers depend on call order; use a layer "
                "that draws none (dropout 0 inside of attention and recurrent layers) and nn.Dropout, which is converted"
            )
    layers = [module for module in model.modules() if isinstance(module, Dropout)]
    for number, layer in enumerate(layers):
        layer.layer = number
    return len(layers)
