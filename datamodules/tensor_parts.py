"""Parts of a data set that are given as tensors, arrays or files: reading and checks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.datamodules.tables import MISSING, Columns, missing_word, read_table
from fl_lightning.errors import ConfigurationError
from fl_lightning.models.weights import load_whole

PARTS = (
    "features",
    "targets",
    "groups",
    "subjects",
    "test_features",
    "test_targets",
    "test_groups",
    "test_subjects",
)
NAMES = ("groups", "subjects")  # parts whose values are names
_BINS = 10


def is_frame(given: Any) -> bool:
    """Return whether a value is a ``pandas.DataFrame``, without an import of pandas."""
    return hasattr(given, "iterrows")


def read_parts(
    path: Path,
    given: Mapping[str, Any],
    columns: Columns,
    labelled: bool = True,
    decimal: str | None = None,
    missing: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Read the parts in a file: a table, ``.npz`` or ``.pt``.

    Args:
        path: The file.
        given: All parts by name, as the user gives them. For a table: names of columns.
        columns: Feature columns of a table, see :func:`~fl_lightning.datamodules.tables.read_table`.
        labelled: Whether to read targets.
        decimal: See :func:`~fl_lightning.datamodules.tables.read_frame`.
        missing: See :func:`~fl_lightning.datamodules.tables.read_frame`.

    Returns:
        All parts by name. Parts that the file does not have are as given.

    Raises:
        ConfigurationError: The file cannot be read, lacks a part, or has a part that is also given.
    """
    kinds = ".csv, .parquet, .npz or .pt"
    if path.suffix not in (".csv", ".parquet", ".npz", ".pt"):
        raise ConfigurationError(f"data.features: {path} has no known ending; use {kinds}")
    if not path.is_file():
        raise ConfigurationError(f"data.features: {path} does not exist; give a {kinds} file")
    if path.suffix in (".csv", ".parquet"):
        targets = given["targets"] if labelled else None
        names = {name: given[name] for name in NAMES}
        return {**given, **read_table(path, targets, names, columns, decimal, missing)}
    try:
        content: Any = (
            dict(np.load(path, allow_pickle=False)) if path.suffix == ".npz" else load_whole("file", path)
        )
    except (OSError, ValueError, EOFError) as error:
        raise ConfigurationError(f"data.features: {path} cannot be read: {error}") from error
    needed = PARTS[: 1 + labelled]
    if not isinstance(content, Mapping) or not {*needed} <= content.keys():
        raise ConfigurationError(f"data.features: {path} holds no {' and '.join(needed)}; write both by name")
    for name in PARTS[1:]:
        if name in content and given[name] is not None:
            raise ConfigurationError(f"data.{name}: {path} holds {name}; leave data.{name} out")
    return {**given, **{name: content[name] for name in PARTS if name in content}}


def checked_tensor(name: str, given: Any, impute: str | None, dtype: str | None = None) -> Tensor:
    """Return targets as a tensor of the type in the run, and features as a tensor of their own type.

    Args:
        name: Name for messages.
        given: Tensor, array or list.
        impute: Strategy for missing features. None: they are refused.
        dtype: Type in the run. Default: int64 for integers ``[N]``, float32 for float64, otherwise
            the type of ``given``.

    Raises:
        ConfigurationError: ``given`` is no tensor, or a value is not finite, or changes, in the
            type of the run.
    """
    try:
        tensor = torch.as_tensor(np.asarray(given) if isinstance(given, list | tuple) else given).detach()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name}: {type(given).__name__} is no tensor or array: {error}") from error
    is_features = name.endswith("features")
    dtype = dtype or ("int64" if has_classes(tensor) else rounded(tensor.dtype))
    converted = tensor.to(getattr(torch, dtype))
    if converted.is_floating_point():
        missing = tensor.isnan() if is_features and impute is not None else False
        wrong, what = ~(converted.isfinite() | missing), "not finite in"
    else:
        wrong, what = converted.to(tensor.dtype) != tensor, "no value of"
    for place in wrong.nonzero()[:1].tolist():
        raise ConfigurationError(
            f"{name}: the value {tensor[tuple(place)].item()} at {place} is {what} {dtype}; correct it, leave the sample out, or set "
            "data.impute for features that are NaN"
        )
    return tensor if is_features else converted


def rows_as_bytes(features: Tensor, targets: Tensor) -> list[bytes]:
    """Return each sample's features and target as bytes."""
    return [x.numpy().tobytes() + y.numpy().tobytes() for x, y in zip(features, targets, strict=True)]


def rounded(kind: torch.dtype) -> str:
    """Return the name of the type of inputs or targets: float32 for float64."""
    return str(torch.float32 if kind == torch.float64 else kind).removeprefix("torch.")


def check_lengths(data: Mapping[str, Tensor]) -> None:
    """Raise a ConfigurationError if the parts of a split have different numbers of samples, or none."""
    for split in ("", "test_"):
        names = [f"{split}{part}" for part in ("features", "targets", *NAMES)]
        sizes = {name: len(data[name]) for name in names if name in data}
        if sizes and (not {*names[:2]} <= sizes.keys() or len({*sizes.values()}) > 1 or 0 in sizes.values()):
            counts = ", ".join(f"data.{name}: {size} samples" for name, size in sizes.items())
            raise ConfigurationError(
                f"{counts}; give features and targets, and groups and subjects if there are any, of the same samples"
            )


def numbers_of_names(
    kind: str, groups: Mapping[str, Any], missing: Sequence[str] | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Replace groups or subjects by numbers.

    Args:
        kind: ``"groups"`` or ``"subjects"``.
        groups: Groups of training samples, and of test samples, by name.
        missing: Words for missing values. None: the built-in words.

    Returns:
        The numbers by name, and the name of each number.
    """
    if not groups:
        return {}, []
    parts = [np.asarray(x) for x in groups.values()]
    names, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    if (word := missing_word(names, missing)) is not None:
        raise ConfigurationError(f"data.{kind}: one {kind[:-1]} is {word or 'empty'}, {MISSING}")
    split = torch.split(torch.from_numpy(numbers).long(), [len(part) for part in parts])
    return dict(zip(groups, split, strict=True)), [*map(str, names)]


def has_classes(targets: Tensor) -> bool:
    """Return whether targets are classes: integers ``[N]``."""
    return targets.dim() == 1 and not targets.is_floating_point()


def strata_of(targets: Tensor) -> Tensor:
    """Return the class of each sample for a partition, int64 ``[N]``."""
    if has_classes(targets):
        return targets
    if targets.dim() > 1:
        return torch.zeros(len(targets), dtype=torch.int64)
    edges = torch.quantile(targets.double(), torch.linspace(0, 1, _BINS + 1, dtype=torch.float64)[1:-1])
    return torch.bucketize(targets.double(), edges)
