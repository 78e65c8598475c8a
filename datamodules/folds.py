"""Folds of cross-validation, drawn within each client."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.errors import ConfigurationError, counted


def folds_of_samples(
    labels: Tensor, clients: Tensor, names: Sequence[str], subjects: Tensor | None, folds: int, fold: int
) -> tuple[Tensor, list[str]]:
    """Return the fold in which each sample is a test sample, with notes.

    scikit-learn's ``StratifiedGroupKFold`` divides the subjects of each client; without subjects,
    ``StratifiedKFold`` divides its samples. The draw is the same for every seed. A client with S
    subjects, fewer than folds, has test samples in S folds. A single subject always trains. The k-th
    part of client c is tested in fold (k + c) modulo the number of folds, so that folds have similar
    sizes.

    Args:
        labels: Class of each sample, int64 ``[N]``.
        clients: Client of each sample, int64 ``[N]``.
        names: Name of each client.
        subjects: Subject of each sample, int64 ``[N]``. None: each sample is a subject.
        folds: Number of folds.
        fold: The fold of this run.

    Returns:
        The fold of each sample, int64 ``[N]``, -1 for a sample that always trains. The notes name this
        run's fold, and the clients with fewer subjects than folds.

    Raises:
        ConfigurationError: The fold of this run has no test sample.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold  # this import takes seconds

    fold_of, small = torch.full_like(labels, -1), dict[str, int]()
    for client, name in enumerate(names):
        samples = (clients == client).nonzero().flatten()
        of_client = None if subjects is None else subjects[samples]
        if (count := len(samples if of_client is None else torch.unique(of_client))) < folds:
            small[name] = count
        count = min(count, folds)
        if count < 2:
            continue
        strata = labels[samples]
        if int(strata.bincount().max()) < count:  # scikit-learn cannot stratify so few samples
            strata = torch.zeros_like(strata)
        kind = StratifiedKFold if subjects is None else StratifiedGroupKFold
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The least populated class")
            divided = kind(count, shuffle=True, random_state=0).split(samples, strata, of_client)
            for part, (_, test) in enumerate(divided):
                fold_of[samples[torch.from_numpy(test)]] = (part + client) % folds
    if not (fold_of == fold).any():
        raise ConfigurationError(
            f"data.fold={fold} of {folds} has no test sample, as the clients have too few subjects; use fewer folds"
        )
    notes, unit = [f"test data: fold {fold} of {folds}, 0 to {folds - 1}"], "samples"
    if small:
        unit = unit if subjects is None else "subjects"
        notes.append(
            f"fewer {unit} than {folds} folds (n {unit} are test data in n folds, a single one in none): {counted(small)}"
        )
    return fold_of, notes


def check_fold(folds: int | None, fold: int) -> None:
    """Raise a ConfigurationError if there are fewer than two folds, or if there is no such fold."""
    if folds is None and fold:
        raise ConfigurationError(f"data.fold={fold} needs the number of folds; set data.folds, such as 5")
    if folds is not None and (folds < 2 or int(folds) != folds):
        raise ConfigurationError(f"data.folds must be a whole number from 2, such as 5, found {folds}")
    if folds is not None and not 0 <= fold < folds:
        raise ConfigurationError(
            f"data.fold must be in 0 to {folds - 1}, as data.folds={folds}; found {fold}"
        )
