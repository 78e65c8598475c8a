"""Figures, tables, histograms and result lines that a callback adds to a run's report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, float]]
"""Rows of ``metrics.jsonl``. A row holds the metrics of a round by name."""

Drawing = Callable[[Sequence[str]], "Figure"]
"""Function that draws a figure under given title lines, see ``fl_lightning.pictures.style``."""


@dataclass(frozen=True)
class Table:
    """A table of numbers and strings.

    Attributes:
        columns: Names of the columns.
        rows: Rows of the table. A row has one cell for each column.

    Example:
        >>> Table(["client", "accuracy"], [[0, 0.5], [1, 0.75]]).columns
        ['client', 'accuracy']
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[float | str]]


class Report:
    """Mixin for callbacks that add figures, tables or numbers to the report of a run.

    The names of figures and tables become files in the run's folder (``<name>.png``,
    ``<name>.csv``) and W&B keys (``<name>``, ``<name>_table``). So a figure and a table may have
    the same name. All methods are called when a fit ends, stops or fails, perhaps before the first
    round.

    Example:
        >>> class Steps(Report):
        ...     def tables(self):
        ...         return {"steps": Table(["client", "steps"], [[0, 5], [1, 7]])}
        >>> Steps().tables()["steps"].rows
        [[0, 5], [1, 7]]
    """

    def figures(self, rows: Rows) -> Mapping[str, Drawing]:
        """Return figures by name.

        Args:
            rows: Rows of ``metrics.jsonl``. If the run was resumed, they include the earlier rows.
        """
        return {}

    def tables(self) -> Mapping[str, Table]:
        """Return tables by name."""
        return {}

    def histograms(self) -> Mapping[str, Sequence[float]]:
        """Return lists of values by name. W&B shows a histogram of each list."""
        return {}

    def result(self) -> Mapping[str, float]:
        """Return numbers for ``result.json`` and the W&B summary, by name."""
        return {}

    def result_lines(self) -> Mapping[str, str]:
        """Return lines of the printed result table, by label."""
        return {}
