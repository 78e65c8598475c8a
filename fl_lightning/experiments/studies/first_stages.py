"""First stages: a method that changes nothing until a round T* leaves a run as it is without it, so one run feeds every T*."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from jsonargparse import ArgumentParser

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.describe import origin_in_words
from fl_lightning.experiments.run_directory.description import config_hash
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.source import provenance
from fl_lightning.methods.callback import FederatedCallback
from fl_lightning.round.record import Origin


def first_stage(config: Config) -> float:
    """Up to which round a run is the one without the methods that say until when they change nothing.

    Args:
        config: The run's resolved configuration.

    Returns:
        The first T* of these methods, infinity where none comes within the run.
    """
    rounds = int(config["trainer"]["max_epochs"])
    known = [until for entry in _entries(config) if (until := _same_until(entry, rounds)) is not None]
    return min((until for until in known if until < rounds), default=float("inf"))


def family_of(config: Config) -> str:
    """Name a run without the methods that say until when they change nothing: by its configuration, seed, rounds and source."""
    rounds = int(config["trainer"]["max_epochs"])
    others = [json.loads(entry) for entry in _entries(config) if _same_until(entry, rounds) is None]
    first = {"model": config["model"], "data": config["data"]}
    first["trainer"] = {**config["trainer"], "callbacks": others}
    computes = json.dumps(provenance(first), sort_keys=True)
    return f"{config_hash(first)}-{config['seed_everything']}-{rounds}-{computes}"


def other_origin(continued_from: Iterable[Origin], config: Config, folder: Path) -> str:
    """From which other run a run went on, in words.

    Args:
        continued_from: The checkpoints from which it went on, as ``result.json`` has them.
        config: Its resolved configuration.
        folder: The folder of the run directories among which those lie that it may share a first stage with.

    Returns:
        Empty where the rounds before were those of the run itself: its own, or those of a first stage that it shares.
    """
    return "; ".join(
        origin_in_words([x for x in continued_from if x["differs"] and not _is_shared(x, config, folder)])
    )


def _is_shared(entry: Origin, config: Config, folder: Path) -> bool:
    """Whether a run and the one that it went on from were one run up to there."""
    try:
        source = Attempt(folder / Path(entry["checkpoint"]).parts[-3]).read_config()
        until = min(first_stage(source), first_stage(config))
        return family_of(source) == family_of(config) and entry["round"] <= until
    except (ConfigurationError, IndexError, KeyError, TypeError):  # it is no run of a study
        return False


def _entries(config: Config) -> list[str]:
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
