"""First stages: rounds that several runs have in common.

A method such as FixBN trains with batch statistics until round T*. Runs that differ only in T* are
equal up to the smallest T*, and can share these rounds.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.config_digest import class_path, config_hash
from fl_lightning.experiments.run_directory.describe import origin_in_words
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.source import provenance
from fl_lightning.round.record import Origin


def smallest_freeze_round(config: Config) -> float:
    """Return the smallest T* of a run's methods.

    T* is the last round in which a method such as FixBN trains with batch statistics. Until the end
    of round T*, the method does not affect the run.

    Args:
        config: Resolved configuration of the run.

    Returns:
        The smallest T*; infinity if no method has a T* before the last round.
    """
    rounds = int(config["trainer"]["max_epochs"])
    known = [until for x in _callbacks(config) if (until := _same_until(x, rounds)) is not None]
    return min((until for until in known if until < rounds), default=float("inf"))


def family_of(config: Config) -> str:
    """Return a key that is equal for runs with a common first stage.

    The key depends on the seed, the number of rounds, the source code and the configuration.
    Methods that do nothing in the first stage are ignored.
    """
    rounds = int(config["trainer"]["max_epochs"])
    others = [callback for callback in _callbacks(config) if _same_until(callback, rounds) is None]
    first = {"model": config["model"], "data": config["data"]}
    first["trainer"] = {**config["trainer"], "callbacks": others}
    computes = json.dumps(provenance(first), sort_keys=True)
    return f"{config_hash(first)}-{config['seed_everything']}-{rounds}-{computes}"


def other_origin(continued_from: Iterable[Origin], config: Config, folder: Path) -> str:
    """Describe the other runs that a run continues.

    Checkpoints of shared first stages do not count.

    Args:
        continued_from: Checkpoints that the run continues, as in ``result.json``.
        config: Resolved configuration of the run.
        folder: Folder of the runs that may share a first stage with this run.
    """
    return "; ".join(
        origin_in_words([x for x in continued_from if x["differs"] and not _is_shared(x, config, folder)])
    )


def _is_shared(entry: Origin, config: Config, folder: Path) -> bool:
    """Return whether a run equals the run that it continues, up to the checkpoint."""
    try:
        source = Attempt(folder / Path(entry["checkpoint"]).parts[-3]).read_config()
        until = min(smallest_freeze_round(source), smallest_freeze_round(config))
        return family_of(source) == family_of(config) and entry["round"] <= until
    # this folder does not contain the configuration of the earlier run
    except (ConfigurationError, ErrorDuringImport, IndexError, KeyError, TypeError):
        return False


def _callbacks(config: Config) -> list[Any]:
    callbacks = config["trainer"]["callbacks"] or []
    return callbacks if isinstance(callbacks, list) else [callbacks]


def _same_until(callback: Any, rounds: int) -> int | None:
    """Return the T* that a callback's class declares; None if the class declares none.

    A class does not inherit a declaration, because a subclass may change earlier rounds. The class
    is made with the settings, so a setting that is an object of its own has no T*.
    """
    kind: Any = locate(class_path(callback))
    settings = callback["init_args"] if isinstance(callback, dict) and callback.get("init_args") else {}
    if "same_until" not in getattr(kind, "__dict__", {}) or any(
        isinstance(x, dict) for x in settings.values()
    ):
        return None
    try:
        until: int | None = kind(**settings).same_until(rounds)
    except Exception:  # noqa: BLE001  # the run reports the wrong settings
        return None
    return until
