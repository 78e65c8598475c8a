"""Raw inputs: their normalisation, and samples of new files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Normalize(nn.Module):
    """Normalisation of raw inputs, ``(inputs / scale - mean) / std``, in the precision of ``mean``.

    Inputs of floating point keep their type. Other inputs become float32.

    Args:
        mean: Mean of each feature ``[features]`` or of each channel ``[channels, 1, 1]``.
        std: Standard deviation, in the shape of ``mean``.
        scale: Number by which inputs are divided first.
        channels_last: Whether the result has the memory format of colour images in memory.

    Example:
        >>> Normalize(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))(torch.tensor([[2.0, 10.0]]))
        tensor([[1., 2.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, scale: float = 1.0, channels_last: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.scale, self.channels_last = scale, channels_last

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's inputs for raw inputs ``[N, ...]``."""
        kind = inputs.dtype if inputs.is_floating_point() else torch.float32
        values = ((inputs.to(self.mean.dtype) / self.scale - self.mean) / self.std).to(kind)
        return values.contiguous(memory_format=torch.channels_last) if self.channels_last else values

    def settings(self) -> dict[str, Any]:
        """Return the arguments of this module, as a checkpoint keeps them."""
        return {**self.state_dict(), "scale": self.scale, "channels_last": self.channels_last}


@dataclass(frozen=True)
class NewSamples(Dataset[tuple[Tensor, Tensor | None]]):
    """Samples of a file that is no part of a run's data. The index is a slice.

    Attributes:
        unit: Word for the place of a sample, such as ``"line"``.
        places: Place of each sample in the file.
        inputs: Function that returns the raw inputs of a slice of the samples.
        targets: Target of each sample ``[N, ...]``; None if they are not read.
    """

    unit: str
    places: Sequence[str | int]
    inputs: Callable[[slice], Tensor]
    targets: Tensor | None = None

    def __getitem__(self, part: slice) -> tuple[Tensor, Tensor | None]:
        return self.inputs(part), None if self.targets is None else self.targets[part]
