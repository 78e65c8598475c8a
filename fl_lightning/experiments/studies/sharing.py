"""Sharing of first stages. If cells are equal up to T*, the rounds up to T* are trained once.

T* is the last round in which a method such as FixBN trains with batch statistics.
"""

from collections.abc import Iterable

from fl_lightning.experiments.studies.cells import Cell
from fl_lightning.experiments.studies.first_stages import family_of, first_stage


def share_first_stages(cells: Iterable[Cell]) -> None:
    """Choose a parent for each cell whose first rounds another cell also trains.

    Among cells that differ only in T*, the parent is the cell with the latest T*, or a cell without
    T*. Each other cell then trains only the rounds after T*, from a checkpoint of the parent.

    A cell with a budget of epochs has no parent, because the number of rounds is unknown.
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
