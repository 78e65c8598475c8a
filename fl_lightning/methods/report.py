"""Pictures, tables, histograms and result lines that a callback adds to a run's report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, float]]
"""Rows of ``metrics.jsonl``: the metrics of a round by name."""

Drawing = Callable[[Sequence[str]], "Figure"]
"""A function of title lines that draws a figure, see ``fl_lightning.pictures.style``."""


@dataclass(frozen=True)
class Table:
    """A table of numbers and strings.

    Attributes:
        columns: The names of the columns.
        rows: One sequence of cells per row, as long as ``columns``.

    Example:
        >>> Table(["client", "accuracy"], [[0, 0.5], [1, 0.75]]).columns
        ['client', 'accuracy']
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[float | str]]


class Report:
    """A mixin for callbacks that add to the report of a run.

    Names become files in the run's folder (``<name>.png``, ``<name>.csv``) and W&B keys
    (``<name>``, ``<name>_table``), so a picture and its table may share a name. All methods are
    called when a fit ends, stops or fails, possibly before the first round.

    Example:
        >>> class Steps(Report):
        ...     def tables(self):
        ...         return {"steps": Table(["client", "steps"], [[0, 5], [1, 7]])}
        >>> Steps().tables()["steps"].rows
        [[0, 5], [1, 7]]
    """

    def figures(self, rows: Rows) -> Mapping[str, Drawing]:
        """Return pictures by name.

        Args:
            rows: Rows of ``metrics.jsonl``, including those of the run that this run resumed.
        """
        return {}

    def tables(self) -> Mapping[str, Table]:
        """Return tables by name."""
        return {}

    def histograms(self) -> Mapping[str, Sequence[float]]:
        """Return values by name; W&B shows their histogram."""
        return {}

    def result(self) -> Mapping[str, float]:
        """Return numbers for ``result.json`` and the W&B summary, by name."""
        return {}

    def result_lines(self) -> Mapping[str, str]:
        """Return lines of the printed result table, by label."""
        return {}
