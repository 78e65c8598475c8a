"""Raw inputs: their normalisation, and samples of new files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        >>> mean, std = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
        >>> Normalize(mean, std, scale=1.0, channels_last=False)(torch.tensor([[2.0, 10.0]]))
        tensor([[1., 2.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, scale: float, channels_last: bool) -> None:
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


def channel_normalization(
    mean: Sequence[float], std: Sequence[float], scale: float = 255.0, channels_last: bool = False
) -> Normalize:
    """Return the normalisation of images ``[..., C, H, W]`` by each channel's mean and std."""
    means, stds = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (mean, std))
    return Normalize(means, stds, scale, channels_last)


@dataclass
class TableInputs:
    """Map from raw features to a model's inputs: fill, scale, and encode categories as one-hot.

    All attributes are plain numbers, text, lists and dicts.

    Attributes:
        columns: Names of the feature columns of a table. Empty for tensors.
        categories: Categories of each categorical column. A category that no training sample has is
            None; its input is always 0, as for unknown categories.
        impute: Strategy of scikit-learn's ``SimpleImputer`` that fills missing values; None if missing values are refused.
        fill: Value that replaces a missing value, in the shape of a sample. For a categorical
            column, the position of the category. None: nothing is filled.
        mean: Mean of the training samples, in the shape of a sample. None: features are not scaled.
        std: Standard deviation of the training samples; 1 for constant features.
        dtype: Type of the inputs, such as ``"float32"``. Raw features may have another type.
        decimal: Decimal mark of the training table. None: it is unknown.
    """

    columns: list[str] = field(default_factory=list)
    categories: dict[str, list[str | None]] = field(default_factory=dict)
    impute: str | None = None
    fill: Any = None
    mean: Any = None
    std: Any = None
    dtype: str = "float32"
    decimal: str | None = None

    def inputs(self, features: Tensor) -> Tensor:
        """Return the inputs of a model for raw features ``[N, ...]``.

        All is computed in float64, and rounded once.
        """
        kind = getattr(torch, self.dtype)
        if self.fill is None and self.mean is None and not self.categories:
            return features.to(kind)
        features = scaled = self._fill(features.double())
        if self.mean is not None:
            mean, std = (features.new_tensor(x) for x in (self.mean, self.std))
            scaled = (features - mean) / std
        if not self.categories:
            return scaled.to(kind)
        parts = []
        for column, name in enumerate(self.columns):
            part = scaled[:, column : column + 1]
            if name in self.categories:
                known = [
                    -2 if x is None else i for i, x in enumerate(self.categories[name])
                ]  # -2: in no sample
                part = (features[:, column : column + 1] == features.new_tensor(known)).to(part)
            parts.append(part)
        return torch.cat(parts, dim=1).to(kind)

    def _fill(self, features: Tensor) -> Tensor:
        if self.fill is None:
            return features
        return torch.where(features.isnan(), features.new_tensor(self.fill), features)


class PreparedTable(nn.Module):
    """Layer that maps raw features to a model's inputs.

    Args:
        table: The map.
    """

    def __init__(self, table: TableInputs) -> None:
        super().__init__()
        self.table = table

    def forward(self, features: Tensor) -> Tensor:
        """Return the model's inputs for raw features ``[N, ...]``."""
        return self.table.inputs(features)


@dataclass(frozen=True)
class NewSamples(Dataset[tuple[Tensor, Tensor | None]]):
    """Samples of a file that is no part of a run's data. The index is a slice.

    Attributes:
        unit: Word for the place of a sample, such as ``"line"``.
        places: Place of each sample in the file.
        inputs: Function that returns the raw inputs of a slice of the samples.
        targets: Target of each sample ``[N, ...]``; None if they are not read.
        notes: Sentences about the samples, for the user.
    """

    unit: str
    places: Sequence[str | int]
    inputs: Callable[[slice], Tensor]
    targets: Tensor | None = None
    notes: Sequence[str] = ()

    def __getitem__(self, part: slice) -> tuple[Tensor, Tensor | None]:
        return self.inputs(part), None if self.targets is None else self.targets[part]
