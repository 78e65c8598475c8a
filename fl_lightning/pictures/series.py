"""Numbers of a run over its rounds, as arrays for figures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

_LARGEST = 1e30  # what is larger has diverged, and no axis can show it


def series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[Series, Series]:
    """The rounds that have a metric, and its values."""
    found = [(float(row["round"]), float(row[name])) for row in rows if name in row]
    rounds, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return rounds, values


def can_be_drawn(values: Series) -> NDArray[np.bool_]:
    """Which values an axis can show."""
    return np.isfinite(values) & (np.abs(values) <= _LARGEST)


def means(rounds: Series, values: Series, width: int) -> tuple[Series, Series]:
    """Means of each ``width`` consecutive values and of their rounds; not finite where one of the values is not."""
    if width <= 1:
        return rounds, values
    starts = np.arange(0, len(rounds), width)
    sizes = np.diff(starts, append=len(rounds))
    tame = np.where(can_be_drawn(values), values, np.nan)
    return np.add.reduceat(rounds, starts) / sizes, np.add.reduceat(tame, starts) / sizes
