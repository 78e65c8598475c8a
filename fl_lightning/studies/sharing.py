"""What cells share: FixBN trains like FedAvg with BN until T*, so one run feeds every T*."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from fl_lightning.optimizers.milestones import round_at
from fl_lightning.run_directory.description import class_name, config_hash
from fl_lightning.studies.cells import Cell


def share_first_stages(cells: Iterable[Cell]) -> None:
    """Let each cell go on from the run with the latest T* that is otherwise the same, where that keeps its round T*.

    A run without FixBN is one whose T* never comes. Runs with a budget, whose rounds are not known before, share nothing.
    """
    families: dict[str, list[tuple[float, Cell]]] = {}
    for cell in cells:
        freeze_round = first_stage(cell.config)
        if cell.rounds and freeze_round is not None:
            families.setdefault(_family(cell), []).append((freeze_round, cell))
    for family in families.values():
        latest, parent = max(family, key=lambda entry: entry[0])
        for freeze_round, cell in family:
            if 0 < freeze_round < latest:
                cell.parent, cell.shared_rounds = parent, int(freeze_round)
                parent.keep_rounds.add(int(freeze_round))


def first_stage(config: Mapping[str, Any]) -> float | None:
    """Up to which round a run is one of FedAvg with BN: T* of its FixBN, infinity where that never comes; None where it is not known."""
    found = [one["init_args"] for one in config["trainer"]["callbacks"] or [] if _is_fixbn(one)]
    if len(found) > 1:
        return None
    if not found:
        return float("inf")
    own, rounds = found[0], int(config["trainer"]["max_epochs"])
    moment = own["freeze_round"] if own["freeze_round"] is not None else own["freeze_fraction"]
    freeze_round = round_at(0.5 if moment is None else moment, rounds)
    return freeze_round if freeze_round < rounds else float("inf")


def _is_fixbn(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is ours: a class of this name elsewhere may have any first stage."""
    return class_name(entry) == "FixBN" and str(entry["class_path"]).partition(".")[0] == "callbacks"


def _family(cell: Cell) -> str:
    """The name of a configuration and seed without FixBN."""
    config = deepcopy({key: cell.config[key] for key in ("model", "data", "trainer")})
    callbacks = config["trainer"]["callbacks"] or []
    config["trainer"]["callbacks"] = [one for one in callbacks if not _is_fixbn(one)]
    return f"{config_hash(config)}-{cell.seed}-{cell.rounds}"
