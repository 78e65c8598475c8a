"""What cells share: a method that changes nothing until a round T* leaves a run as it is without it, so one run feeds every T*."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from fl_lightning.round.callback import FederatedCallback
from fl_lightning.run_directory.description import config_hash

if TYPE_CHECKING:
    from fl_lightning.studies.cells import Cell


def share_first_stages(cells: "Iterable[Cell]") -> None:
    """Let each cell go on from the run with the latest T* that is otherwise the same, where that keeps its round T*.

    A run without such a method is one whose T* never comes. Runs with a budget, whose rounds are not known before, share nothing.
    """
    families: dict[str, list[tuple[float, Cell]]] = {}
    for cell in cells:
        if cell.rounds:
            family = json.dumps([family_of(cell.config), cell.now], sort_keys=True)
            families.setdefault(family, []).append((first_stage(cell.config), cell))
    for members in families.values():
        latest, parent = max(members, key=lambda entry: entry[0])
        for until, cell in members:
            if 0 < until < latest:
                cell.parent, cell.shared_rounds = parent, int(until)
                parent.keep_rounds.add(int(until))


def first_stage(config: Mapping[str, Any]) -> float:
    """Up to which round a run is the one without the methods that say until when they change nothing.

    Args:
        config: The run's resolved configuration.

    Returns:
        The first T* of these methods, infinity where none comes within the run.
    """
    rounds = int(config["trainer"]["max_epochs"])
    known = [until for entry in _entries(config) if (until := _same_until(entry, rounds)) is not None]
    return min((until for until in known if until < rounds), default=float("inf"))


def family_of(config: Mapping[str, Any]) -> str:
    """The name of a run without the methods that say until when they change nothing: its configuration, seed and rounds."""
    rounds = int(config["trainer"]["max_epochs"])
    others = [json.loads(entry) for entry in _entries(config) if _same_until(entry, rounds) is None]
    trainer = {**config["trainer"], "callbacks": others}
    hashed = config_hash({"model": config["model"], "data": config["data"], "trainer": trainer})
    return f"{hashed}-{config['seed_everything']}-{rounds}"


def _entries(config: Mapping[str, Any]) -> list[str]:
    """The callbacks of a configuration as JSON: one may stand without a list."""
    callbacks = config["trainer"]["callbacks"] or []
    entries = callbacks if isinstance(callbacks, list) else [callbacks]
    return [json.dumps(entry, sort_keys=True) for entry in entries]


@cache
def _same_until(entry: str, rounds: int) -> int | None:
    """What a callback says to :meth:`~fl_lightning.round.declarations.Declarations.same_until`, made from its entry; None where it is no method."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--method", type=FederatedCallback)
    try:
        method = parser.instantiate(parser.parse_object({"method": json.loads(entry)})).method
        until: int | None = method.same_until(rounds)
    except Exception:  # noqa: BLE001  # another kind of callback, or a class that refuses its settings: the cell's own run says so
        return None
    return until
