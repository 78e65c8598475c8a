"""Sharing of first stages: cells that are equal until T* train these rounds only once."""

from collections.abc import Iterable

from fl_lightning.experiments.studies.cells import Cell
from fl_lightning.experiments.studies.first_stages import family_of, first_stage


def share_first_stages(cells: Iterable[Cell]) -> None:
    """Let each cell continue at its T* from the otherwise equal cell with the latest T*.

    A cell without T* counts as the latest. Cells with a budget are ignored, as their number of
    rounds is unknown.
    """
    families: dict[str, list[tuple[float, Cell]]] = {}
    for cell in cells:
        if cell.rounds:
            family = family_of(cell.config)
            families.setdefault(family, []).append((first_stage(cell.config), cell))
    for members in families.values():
        latest, parent = max(members, key=lambda entry: entry[0])
        for until, cell in members:
            if 0 < until < latest:
                cell.parent, cell.shared_rounds = parent, int(until)
                parent.keep_rounds.add(int(until))
