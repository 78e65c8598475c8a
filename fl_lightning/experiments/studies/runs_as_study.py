"""Run directories as the results of a study. Runs that differ only in seed are a row of its table."""

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.config_digest import hash_of_run
from fl_lightning.experiments.run_directory.describe import origin_in_words
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.finished import metric_values, read_result
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.studies.cells import RUNS, State
from fl_lightning.experiments.studies.collecting import run_row
from fl_lightning.experiments.studies.study_frame import (
    CELL_COLUMNS,
    VALUE_COLUMNS,
    StudyFrame,
    labelled,
)
from fl_lightning.round.directions import best_is

Runs = dict[int, Attempt]
"""Attempts that have the same configuration but different seeds, keyed by seed."""


class Key(NamedTuple):
    """Key of a group of runs that differ only in the seed.

    Attributes:
        name: Name of the runs.
        hashed: Hash of the runs' configuration.
        rounds: Planned rounds; None if no file states them.
        place: Folder of the runs. It is empty if no other group has the same name, hash and number
            of rounds.
    """

    name: str
    hashed: str
    rounds: int | None
    place: str = ""


def runs_as_study(directories: Sequence[Path]) -> StudyFrame:
    """Return run directories as the results of a study. Its only axis has a label for each group.

    If a run has several attempts, the newest finished attempt is used. If no attempt is finished,
    the newest attempt is used. Runs in different folders are always different runs.

    Args:
        directories: Run directories.

    Raises:
        ConfigurationError: A configuration cannot be read.
    """
    configs: dict[Key, Config] = {}
    attempts_of: dict[Key, list[tuple[int, Attempt]]] = {}
    for attempt in map(Attempt, directories):
        config = resolved(attempt)
        key = Key(config["name"], hash_of_run(attempt, config), config["trainer"]["max_epochs"])
        configs.setdefault(key, config)
        attempts_of.setdefault(key, []).append((config["seed_everything"], attempt))
    groups = {
        key._replace(place=place): {seed: state_of(attempt) for seed, attempt in sorted(runs.items())}
        for key, attempts in attempts_of.items()
        for place, runs in _apart(attempts).items()
    }
    results = [state.result for states in groups.values() for state in states.values() if state.result]
    metrics, rows, values = _metrics(map(metric_values, results)), [], []
    names = _names(groups)
    for name, (key, states) in zip(names, groups.items(), strict=True):
        rate = _learning_rate(configs[key._replace(place="")])
        for seed, state in states.items():
            assert state.attempt is not None
            row = run_row(seed, state, state.attempt.path)
            origin = _origin(state, state.attempt)
            rows.append({"labels": {"run": name}, "learning_rate": rate, "origin": origin, **row})
            values += [
                {"labels": {"run": name}, "seed": seed, "metric": metric, "value": value}
                for metric, value in (metric_values(state.result) if state.result else {}).items()
                if metric in metrics
            ]
    methods = dict.fromkeys(str(result["method"]) for result in results)
    parts = [*names, *methods] if len(names) == 1 else names
    return StudyFrame(
        name="runs",
        title=textwrap.shorten(", ".join(dict.fromkeys(parts)), 90, placeholder=" …"),
        axes={"run": names},
        known={"run": names},
        metrics=metrics,
        best={name: best for result in results for name, best in result.get("best", {}).items()},
        cells=labelled(rows, ["run"], CELL_COLUMNS),
        values=labelled(values, ["run"], VALUE_COLUMNS),
    )


def state_of(attempt: Attempt) -> State:
    """Return the state of an attempt: ``done``, ``failed``, ``running`` or ``stopped``."""
    try:
        return State("done", attempt, read_result(attempt.result))
    except ConfigurationError as error:
        if attempt.result.is_file():
            return State("failed", attempt, why=str(error))
        rounds = read_metrics(attempt.metrics)[-1:] if attempt.metrics.is_file() else []
    why = f"no result.json; the last logged round is {rounds[0]['round']}" if rounds else "no round is logged"
    if attempt.error.is_file():
        return State("failed", attempt, why=attempt.last_error())
    return State("running" if attempt.is_locked() else "stopped", attempt, why=why)


def _origin(state: State, attempt: Attempt) -> list[str]:
    """Return descriptions of the other runs that a run continues."""
    if state.result is not None:
        return origin_in_words(state.result.get("continued_from", []))
    with suppress(OSError, ValueError, AttributeError, TypeError):
        return [*json.loads(attempt.identity.read_text()).get("continued_from", [])]
    return []


def resolved(attempt: Attempt) -> Config:
    """Return a run's configuration, with its planned number of rounds.

    If a Python script has started the run, the configuration lacks this number. The number is then
    read from the run's other files.

    Raises:
        ConfigurationError: The configuration cannot be read.
    """
    try:
        config = attempt.read_config()
        config["name"], config["seed_everything"], config["data"]["class_path"], config["model"].items()
        config["trainer"].setdefault("max_epochs", _planned_rounds(attempt))
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{attempt.config} is no resolved configuration of a run; restore the file or leave its folder out"
        ) from error
    return config


def _planned_rounds(attempt: Attempt) -> int | None:
    for path in (attempt.result, attempt.identity):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(path.read_text())["planned_rounds"])
    return None


def _learning_rate(config: Config) -> float | None:
    try:
        return float(config["model"]["client_optimizer"]["init_args"]["lr"])
    except (KeyError, TypeError, ValueError):
        return None


def _apart(attempts: Sequence[tuple[int, Attempt]]) -> dict[str, Runs]:
    """Group the runs of a configuration, so that the seeds in a group differ.

    - If all seeds differ, all runs form one group.
    - If seeds repeat, but differ within each folder, the runs in each folder form a group.
    - Otherwise, each of the runs forms a separate group.
    """
    newest: dict[Path, tuple[int, Attempt]] = {}
    for seed, attempt in attempts:
        run = _first_attempt(attempt.path.resolve())
        newest[run] = max(newest.get(run, (seed, attempt)), (seed, attempt), key=lambda x: _number(x[1]))
    every = [*newest.values()]
    together, by_folder = ["" for _ in every], [str(attempt.path.parent) for _, attempt in every]
    for places in (together, by_folder):
        if len({*zip(places, (seed for seed, _ in every), strict=True)}) == len(every):
            break
    else:
        places = [str(_first_attempt(attempt.path)) for _, attempt in every]
    runs: dict[str, Runs] = {}
    for place, (seed, attempt) in zip(places, every, strict=True):
        runs.setdefault(place, {})[seed] = attempt
    return runs


def _first_attempt(path: Path) -> Path:
    return path.with_suffix("") if path.suffix[1:].isdigit() else path


def _number(attempt: Attempt) -> tuple[bool, int]:
    number = attempt.path.suffix[1:]
    return attempt.result.is_file(), int(number) if number.isdigit() else 1


def _names(groups: Mapping["Key", Mapping[int, State]]) -> list[str]:
    """Return distinct names that are as short as possible.

    A name can contain a run's name, method, hash, number of rounds and folder.
    """
    finished = [[state.result for state in states.values() if state.result] for states in groups.values()]
    methods = [str(results[0]["method"]) if results else "" for results in finished]
    names = [key.name for key in groups]
    texts = [method or name for method, name in zip(methods, names, strict=True)]
    details = [[f"{key.hashed}", key.name, f"{key.rounds} rounds"] for key in groups]
    places = [[key.place] * bool(key.place) for key in groups]
    choices = [names] * (RUNS not in names) + [methods] * all(methods)
    for parts in (
        [part[:1] for part in details],
        details,
        places,
        [[*part, *place] for part, place in zip(details, places, strict=True)],
    ):
        pairs = zip(texts, parts, strict=True)
        choices.append([f"{text} ({', '.join(part)})" if part else text for text, part in pairs])
    return next((names for names in choices if len({*names}) == len(groups)), choices[-1])


def _metrics(results: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """Return the names of the test metrics. Without test metrics, use validation metrics.

    Frequent metrics come first, and losses come last.
    """
    counts = Counter(name for result in results for name in result)
    for split, words in {"test/": "test ", "val/": "validation "}.items():
        names = [name for name in counts if name.startswith(split)]
        if names:
            names.sort(key=lambda name: (best_is(name) == "min", -counts[name]))
            return {name: words + name.removeprefix(split).replace("_", " ") for name in names}
    return {"test/accuracy": "test accuracy"}
