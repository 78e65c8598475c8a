"""What cells share: the rounds until T* are trained once."""

from collections.abc import Iterable

from fl_lightning.experiments.studies.cells import Cell
from fl_lightning.experiments.studies.first_stages import family_of, first_stage


def share_first_stages(cells: Iterable[Cell]) -> None:
    """Let each cell go on from the run with the latest T* that is otherwise the same, where that keeps its round T*.

    A run without such a method is one whose T* never comes. Runs with a budget, whose rounds are not known before, share nothing.
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
