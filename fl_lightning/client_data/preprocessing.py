"""Preprocessing of raw inputs: fitted on training samples, used by the run and by its trained model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.errors import ConfigurationError, counted

_LISTED = 20  # features of a table that are listed


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
class Preprocessing:
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
        missing: Words for missing values in tables. None: the built-in words.
    """

    columns: list[str] = field(default_factory=list)
    categories: dict[str, list[str | None]] = field(default_factory=dict)
    impute: str | None = None
    fill: Any = None
    mean: Any = None
    std: Any = None
    dtype: str = "float32"
    decimal: str | None = None
    missing: list[str] | None = None

    def fit(self, train: Tensor, standardize: bool) -> None:
        """Fit all values on the raw features of the training samples, ``[n, ...]``.

        Raises:
            ConfigurationError: All training samples miss a value, or features to be scaled are
                integers.
        """
        codes = {name: self.columns.index(name) for name in self.categories}
        if self.impute is not None and train.is_floating_point():
            train = train.double()
            self.fill = self._filled(train.flatten(1).numpy(), [*codes.values()], train.shape[1:])
            train = self._fill(train)
        for name, column in codes.items():
            seen = set(train[:, column].tolist())
            self.categories[name] = [x if i in seen else None for i, x in enumerate(self.categories[name])]
        if standardize:
            if not train.is_floating_point():
                raise ConfigurationError(
                    f"data.standardize: features are {train.dtype}; give features of floating point, or standardize: false"
                )
            mean, std = train.double().mean(0), train.double().std(0, correction=0)
            for column in codes.values():
                mean[column], std[column] = 0, 1
            self.mean, self.std = mean.tolist(), std.where(std > 0, 1).tolist()

    def _filled(self, train: Any, codes: Sequence[int], shape: Sequence[int]) -> Any:
        from sklearn.impute import SimpleImputer  # this import takes seconds

        fill = SimpleImputer(strategy=self.impute).fit(train).statistics_
        if codes:
            fill[codes] = SimpleImputer(strategy="most_frequent").fit(train[:, codes]).statistics_
        if len(empty := np.isnan(fill).nonzero()[0]):
            name = self.columns[empty[0]] if self.columns else f"feature {empty[0]}"
            raise ConfigurationError(
                f"data.impute: {self.impute} of {name} is not defined, because each training sample misses the value; leave the column out"
            )
        return fill.reshape(shape).tolist()

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

    def listed(self, features: Tensor) -> list[str]:
        """Return a sentence about a table's raw features: the kind, the range and the gaps of each."""
        words = []
        for column, name in enumerate(self.columns[:_LISTED]):
            values = features[:, column]
            given = values[~values.isnan()]
            ends = [f"{x:.{15 if x == round(x) else 4}g}" for x in (float(given.min()), float(given.max()))]
            names = self.categories.get(name, [])
            kind = f"{len(names) - names.count(None)} categories" if names else f"numbers {' to '.join(ends)}"
            gaps = len(values) - len(given)
            words.append(f"{name}: {kind}" + f", {gaps:,} missing" * bool(gaps))
        more = f"; and {len(self.columns) - _LISTED} more" * (len(self.columns) > _LISTED)
        return [f"features: {'; '.join(words)}{more}"] if words else []

    def describe(self, features: Tensor) -> list[str]:
        """Return sentences about values of a table's raw features that were not given or not known."""
        if not self.columns:
            return []
        is_category = torch.tensor([name in self.categories for name in self.columns])
        missing, notes = features.isnan(), []
        for words, where in (
            (f"missing values, replaced by {self.impute}", missing & ~is_category),
            ("missing values, replaced by the most frequent category", missing & is_category),
            ("values that are no category", (features == -1) & is_category),
        ):
            numbers = zip(self.columns, where.sum(0).tolist(), strict=True)
            if counts := {name: number for name, number in numbers if number}:
                notes.append(f"{words} of the training samples: {counted(counts)} of {len(features)} samples")
        return notes


class PreparedTable(nn.Module):
    """Layer that maps raw features to a model's inputs.

    Args:
        table: The map.
    """

    def __init__(self, table: Preprocessing) -> None:
        super().__init__()
        self.table = table

    def forward(self, features: Tensor) -> Tensor:
        """Return the model's inputs for raw features ``[N, ...]``."""
        return self.table.inputs(features)


def restored_preprocessing(facts: Mapping[str, Any] | None) -> nn.Module:
    """Return the layer that prepares raw inputs as the run did.

    Args:
        facts: The preprocessing in a checkpoint: arguments of :class:`Preprocessing` for tables, or
            of :class:`Normalize`. None: inputs are not changed.
    """
    if facts is None:
        return nn.Identity()
    return PreparedTable(Preprocessing(**facts)) if "columns" in facts else Normalize(**facts)
