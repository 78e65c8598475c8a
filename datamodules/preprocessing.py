"""Preprocessing of features, fitted on training samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client_data.federated import counted
from fl_lightning.datamodules.tables import read_column
from fl_lightning.errors import ConfigurationError


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
    """

    columns: list[str] = field(default_factory=list)
    categories: dict[str, list[str | None]] = field(default_factory=dict)
    impute: str | None = None
    fill: Any = None
    mean: Any = None
    std: Any = None

    def transform(self, table: Any, path: Path) -> Tensor:
        """Return the inputs ``[N, inputs]`` for the rows of a table.

        Args:
            table: ``pandas.DataFrame`` with the feature columns. Other columns are ignored.
            path: File of the table, for messages.

        Raises:
            ConfigurationError: A column or a value is missing, or a value is no number.
        """
        return self.inputs(torch.from_numpy(self.raw(table, path)).float())

    def raw(self, table: Any, path: Path) -> Any:
        """Return the numbers of a table, float64 ``[N, columns]``.

        A missing value is NaN. A category is its position in ``categories``, or -1 if it is unknown.
        """
        if absent := [name for name in self.columns if name not in table]:
            raise ConfigurationError(
                f"data.columns: {absent[0]} is no column of {path}; it has {', '.join(map(str, table))}"
            )
        parts = [read_column(path, table[x], self.categories.get(x), bool(self.impute)) for x in self.columns]
        return np.stack(parts, axis=1)

    def fit(self, train: Tensor, standardize: bool) -> None:
        """Fit all values on the raw features of the training samples, ``[n, ...]``.

        Raises:
            ConfigurationError: All training samples miss a value, or features to be scaled are
                integers.
        """
        codes = {name: self.columns.index(name) for name in self.categories}
        if self.impute is not None and train.is_floating_point():
            self.fill = self._filled(train.double().flatten(1).numpy(), [*codes.values()], train.shape[1:])
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

    def inputs(self, features: Tensor) -> Tensor:
        """Return the inputs of a model for raw features ``[N, ...]``."""
        features = self._fill(features)
        scaled = features
        if self.mean is not None:
            mean, std = (torch.tensor(x, dtype=torch.float64) for x in (self.mean, self.std))
            scaled = ((features.double() - mean) / std).to(features.dtype)
        if not self.categories:
            return scaled
        parts = []
        for column, name in enumerate(self.columns):
            part = scaled[:, column : column + 1]
            if name in self.categories:
                known = [
                    -2 if x is None else i for i, x in enumerate(self.categories[name])
                ]  # -2: in no sample
                part = (features[:, column : column + 1] == torch.tensor(known)).to(part)
            parts.append(part)
        return torch.cat(parts, dim=1)

    def _fill(self, features: Tensor) -> Tensor:
        if self.fill is None:
            return features
        return torch.where(features.isnan(), torch.tensor(self.fill, dtype=features.dtype), features)

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

    def describe(self, features: Tensor) -> list[str]:
        """Return sentences about the categories and the missing values of raw features ``[N, ...]``."""
        notes = []
        if self.categories:
            sizes = {name: len(names) - names.count(None) for name, names in self.categories.items()}
            notes.append(f"one-hot columns and their numbers of categories: {counted(sizes)}")
        if self.fill is not None and self.columns:
            counts = zip(self.columns, features.isnan().sum(0).tolist(), strict=True)
            missing = counted({name: count for name, count in counts if count}) or "none"
            notes.append(f"missing values, replaced by {self.impute} of the training samples: {missing}")
        return notes
