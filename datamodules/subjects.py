"""Subjects, such as patients: all samples of a subject stay in one part of the data."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_lightning.datamodules.images import balanced_subset
from fl_lightning.errors import ConfigurationError


def subjects_of_files(pattern: str, files: Iterable[Path]) -> list[str]:
    """Return the subject of each file: what the pattern matches in the file's path.

    Args:
        pattern: Regular expression. If it has a group, the group is the subject.
        files: Paths below the folder of the data set.

    Raises:
        ConfigurationError: The pattern is no regular expression, or matches no part of a path.
    """
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise ConfigurationError(f"data.subjects: {pattern!r} is no regular expression: {error}") from error
    subjects = []
    for file in files:
        if (found := search(file.as_posix())) is None:
            raise ConfigurationError(
                f"data.subjects: {pattern!r} is in no part of the path {file}; give a pattern that each path has, such as P[0-9]+"
            )
        subjects.append(next((group for group in found.groups() if group is not None), found[0]))
    return subjects


class Subjects:
    """Subject of each sample, with the most frequent class of each subject.

    Args:
        of: Subject of each sample, int64 ``[N]``, numbered from 0.
        labels: Class of each sample, int64 ``[N]``.
        names: Name of each subject.

    Attributes:
        labels: Most frequent class of each subject ``[S]``; the smallest of several.
        mixed: Whether a subject has samples of several classes, bool ``[S]``.

    Example:
        >>> subjects = Subjects(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]), ["P1", "P2"])
        >>> subjects.samples(torch.tensor([1]), torch.arange(3))
        tensor([2])
    """

    def __init__(self, of: Tensor, labels: Tensor, names: Sequence[str]) -> None:
        self.of, self.names = of, names
        counts = torch.zeros(len(names), int(labels.max()) + 1, dtype=torch.int64)
        counts.index_put_((of, labels), torch.ones_like(of), accumulate=True)
        self.labels, self.mixed = counts.argmax(1), (counts > 0).sum(1) > 1

    @classmethod
    def of_names(cls, names: Sequence[str], labels: Tensor) -> "Subjects":
        """Return the subjects of samples, given by the subject's name of each sample."""
        every, of = np.unique(np.asarray(names), return_inverse=True)
        return cls(torch.from_numpy(of).long(), labels, [*map(str, every)])

    def of_samples(self, samples: Tensor) -> Tensor:
        """Return the subjects of some samples, ascending."""
        return torch.arange(len(self.names))[self.of[samples].bincount(minlength=len(self.names)) > 0]

    def samples(self, subjects: Tensor, among: Tensor) -> Tensor:
        """Return the samples in ``among`` of some subjects."""
        return among[torch.isin(self.of[among], subjects)]

    def subset(self, among: Tensor, share: float, generator: torch.Generator) -> Tensor:
        """Draw a share of the subjects, stratified by class. Return their samples in ``among``."""
        every = self.of_samples(among)
        drawn = balanced_subset(self.labels[every], round(share * len(every)), generator)
        return self.samples(every[drawn], among)

    def check_apart(self, parts: Mapping[str, Iterable[Tensor]], setting: str) -> None:
        """Require that no subject has samples in two parts.

        Args:
            parts: Indices of the samples in each part, by the part's name.
            setting: Setting that names the subjects, for the message.

        Raises:
            ConfigurationError: A subject is in two parts.
        """
        part_of: dict[int, str] = {}
        for part, indices in parts.items():
            for subject in self.of_samples(torch.cat([*indices])).tolist():
                other = part_of.setdefault(subject, part)
                if other != part:
                    raise ConfigurationError(
                        f"{setting}: subject {self.names[subject]} is in {other} and in {part}; give all samples of a subject to one of them"
                    )
