"""Preprocessing of features, fitted on training samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client_data.federated import counted
from fl_lightning.client_data.raw_inputs import TableInputs
from fl_lightning.datamodules.tables import read_column
from fl_lightning.errors import ConfigurationError


class Preprocessing(TableInputs):
    """Preprocessing that reads tables, and is fitted on training samples."""

    def raw(self, table: Any, path: Path) -> Any:
        """Return the numbers of a table, float64 ``[N, columns]``.

        A missing value is NaN. A category is its position in ``categories``, or -1 if it is unknown.

        Args:
            table: ``pandas.DataFrame`` with the feature columns. Other columns are ignored.
            path: File of the table, for messages.

        Raises:
            ConfigurationError: A column or a value is missing, or a value is no number.
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
