"""Samples of a file that is no part of a run's data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True)
class NewSamples(Dataset[tuple[Tensor, Tensor | None]]):
    """Samples of a file that is no part of a run's data. The index is a slice.

    Attributes:
        unit: Word for the place of a sample, such as ``"line"``.
        places: Place of each sample in the file.
        inputs: Function that returns the raw inputs of a slice of the samples, or of their indices.
        targets: Target of each sample ``[N, ...]``; None if they are not read.
        notes: Sentences about the samples, for the user.
        clients: Name of the client that each sample belongs to; None if the file does not tell.
    """

    unit: str
    places: Sequence[str | int]
    inputs: Callable[[Any], Tensor]
    targets: Tensor | None = None
    notes: Sequence[str] = ()
    clients: Sequence[str] | None = None

    def __getitem__(self, part: slice) -> tuple[Tensor, Tensor | None]:
        return self.inputs(part), None if self.targets is None else self.targets[part]

    def some(self, indices: Sequence[int]) -> "NewSamples":
        """Return some of the samples, without targets."""
        chosen = torch.tensor(indices)
        return NewSamples(
            self.unit, [self.places[x] for x in indices], lambda part: self.inputs(chosen[part])
        )
