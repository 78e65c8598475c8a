"""Figures, tables and result lines of a callback for a run's report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MetricRows = Sequence[Mapping[str, float]]
"""Rows of ``metrics.jsonl``. A row maps the names of a round's metrics to their values."""

Drawing = Callable[[Sequence[str]], "Figure"]
"""Function that draws a figure, given the lines of the figure's title.

See ``fl_lightning.pictures.style``.
"""


@dataclass(frozen=True)
class Table:
    """Table of numbers and strings.

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

    A figure becomes the file ``<name>.png`` in the run's folder, and has the key ``<name>`` at W&B.
    A table becomes the file ``<name>.csv``, and has the key ``<name>_table`` at W&B. A figure and a
    table may have the same name. All methods are called when a fit ends, stops or fails, even
    before the first round.

    Example:
        >>> class Steps(Report):
        ...     def tables(self):
        ...         return {"steps": Table(["client", "steps"], [[0, 5], [1, 7]])}
        >>> Steps().tables()["steps"].rows
        [[0, 5], [1, 7]]
    """

    def figures(self, rows: MetricRows) -> Mapping[str, Drawing]:
        """Return a drawing function for each figure, keyed by the figure's name.

        Args:
            rows: All rows of ``metrics.jsonl``, including rows from before a resume.
        """
        return {}

    def tables(self) -> Mapping[str, Table]:
        """Return the tables of the report by name."""
        return {}

    def result(self) -> Mapping[str, float]:
        """Return numbers by name, for ``result.json`` and for the W&B summary."""
        return {}

    def predictions(self) -> Mapping[int, Sequence[tuple[Tensor, Tensor]]]:
        """Return the outputs and targets of clients' own test samples, for ``test_predictions.csv``."""
        return {}

    def result_lines(self) -> Mapping[str, str]:
        """Return texts for the printed table of results, keyed by the labels of the lines."""
        return {}
