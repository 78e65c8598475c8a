"""What a callback adds to the report of a run: pictures, tables, histograms and lines of the result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, float]]
"""Rows of ``metrics.jsonl``: the metrics of a round by name."""

Drawing = Callable[[Sequence[str]], "Figure"]
"""Makes a figure under the given lines of title (see :func:`~fl_lightning.pictures.style.new_figure`)."""


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words under named columns.

    Attributes:
        columns: The names of the columns.
        rows: One sequence of cells per row, as long as ``columns``.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[float | str]]


class Report:
    """A callback with something to show: a base class beside ``FederatedCallback``; override what there is.

    Names become files in the run's folder (``<name>.png``, ``<name>.csv``) and keys of the run at W&B (``<name>``,
    ``<name>_table``), so a picture and the table behind it may have one name. All methods are
    called when a fit ends, also one that was stopped or failed, and must work before the first round too.
    """

    def figures(self, rows: Rows) -> Mapping[str, Drawing]:
        """Pictures by name.

        Args:
            rows: Rows of ``metrics.jsonl``, of this run and of what it was resumed from.
        """
        return {}

    def tables(self) -> Mapping[str, Table]:
        """Tables by name."""
        return {}

    def histograms(self) -> Mapping[str, Sequence[float]]:
        """Values whose distribution W&B shows, by name."""
        return {}

    def result(self) -> Mapping[str, float]:
        """Numbers for ``result.json`` and the summary at W&B, by name."""
        return {}

    def result_lines(self) -> Mapping[str, str]:
        """Lines of the printed result table, by what stands before them."""
        return {}
