"""Run directories as if they were a study: seeds of one configuration are a combination."""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.describe import origin_in_words
from fl_lightning.experiments.run_directory.description import config_hash
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.finished import metric_values, read_result
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.studies.cells import RUNS, State
from fl_lightning.experiments.studies.findings import run_found
from fl_lightning.experiments.studies.found import Found, Group
from fl_lightning.round.directions import best_is

Runs = dict[int, Attempt]
"""Attempts of one configuration by seed."""


class Key(NamedTuple):
    """What runs have in common that differ in nothing but their seed.

    Attributes:
        name: Their name.
        hashed: The hash of their configuration.
        rounds: Their planned rounds, None where no file has them.
        place: The folder of the runs, where equal ones lie in another folder.
    """

    name: str
    hashed: str
    rounds: int | None
    place: str = ""


def found_in(directories: Sequence[Path]) -> Found:
    """What runs have found, in the form of :class:`~fl_lightning.experiments.studies.found.Found`.

    Of several attempts at one configuration and seed the newest finished one counts, else the newest. Runs of one configuration and seed
    in different folders are different runs.

    Args:
        directories: Run directories.

    Raises:
        ConfigurationError: The configuration of one cannot be read.
    """
    configs: dict[Key, Config] = {}
    found: dict[Key, list[tuple[int, Attempt]]] = {}
    for attempt in map(Attempt, directories):
        config = resolved(attempt)
        key = Key(config["name"], _hash_of(attempt, config), config["trainer"]["max_epochs"])
        configs.setdefault(key, config)
        found.setdefault(key, []).append((config["seed_everything"], attempt))
    grouped = {
        key._replace(place=place): (configs[key], runs)
        for key, attempts in found.items()
        for place, runs in _apart(attempts).items()
    }
    states = [{seed: state_of(attempt) for seed, attempt in runs.items()} for _, runs in grouped.values()]
    names = _names([*grouped], states)
    metrics = _metrics(
        metric_values(state.result) for own in states for state in own.values() if state.result
    )
    groups: list[Group] = []
    for name, (config, runs), own in zip(names, grouped.values(), states, strict=True):
        results = {
            str(seed): metric_values(result) if (result := own[seed].result) else {} for seed in sorted(runs)
        }
        groups.append(
            {
                "labels": {"run": name},
                "published": None,
                "learning_rate": _learning_rate(config),
                "values": {
                    metric: {seed: found[metric] for seed, found in results.items() if metric in found}
                    for metric in metrics
                },
                "runs": [
                    {**run_found(seed, own[seed], runs[seed].path), "origin": _origin(own[seed], runs[seed])}
                    for seed in sorted(runs)
                ],
            }
        )
    methods = dict.fromkeys(run["method"] for group in groups for run in group["runs"] if "method" in run)
    parts = [*names, *methods] if len(names) == 1 else names
    return {
        "name": "runs",
        "title": textwrap.shorten(", ".join(dict.fromkeys(parts)), 90, placeholder=" …"),
        "paper": "",
        "scale": "",
        "axes": {"run": names},
        "choose": [],
        "spread": None,
        "metrics": metrics,
        "groups": groups,
        "choices": [],
        "known": {"run": names},
        "claims": [],
    }


def state_of(attempt: Attempt) -> State:
    """Where a run stands: ``done`` with a result, ``failed`` with an error, ``running``, or ``stopped``."""
    try:
        return State("done", attempt, read_result(attempt.result))
    except ConfigurationError as error:
        if attempt.result.is_file():
            return State("failed", attempt, why=str(error))
        rounds = read_metrics(attempt.metrics)[-1:] if attempt.metrics.is_file() else []
    why = f"no result.json; the last logged round is {rounds[0]['round']}" if rounds else "no round is logged"
    if attempt.error.is_file():
        lines = attempt.error.read_text(errors="replace").strip().splitlines()
        return State("failed", attempt, why=(lines or ["no message"])[-1])
    return State("running" if attempt.is_locked() else "stopped", attempt, why=why)


def _origin(state: State, attempt: Attempt) -> list[str]:
    """From which other runs a run went on, in words."""
    if state.result is not None:
        return origin_in_words(state.result.get("continued_from", []))
    with suppress(OSError, ValueError, AttributeError, TypeError):
        return [*json.loads(attempt.identity.read_text()).get("continued_from", [])]
    return []


def resolved(attempt: Attempt) -> Config:
    """A run's configuration; that of a script does not say how many rounds were planned, which other files do.

    Raises:
        ConfigurationError: It cannot be read.
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
    """The client optimizer's learning rate, None where a script made it in a way that does not say."""
    try:
        return float(config["model"]["client_optimizer"]["init_args"]["lr"])
    except (KeyError, TypeError, ValueError):
        return None


def _hash_of(attempt: Attempt, config: Config) -> str:
    """The hash that runs of one configuration share: that of the folder, but for weights of a script, which each seed may draw anew."""
    model = config["model"].get("init_args", config["model"])
    weights = "weights_digest" in model["model"]
    named = re.fullmatch(r"([0-9a-f]{8})-s\d+(\.\d+)?", attempt.path.name)
    if named and not weights:
        return named[1]
    node = {name: x for name, x in model["model"].items() if name != "weights_digest"}
    settings = {**model, "model": node}
    own = {**config["model"], "init_args": settings} if "init_args" in config["model"] else settings
    return config_hash({"model": own, "data": config["data"], "trainer": config["trainer"]})


def _apart(attempts: Sequence[tuple[int, Attempt]]) -> dict[str, Runs]:
    """Runs of one configuration, with their seeds, by place: together where the seeds differ, else by folder, else each by itself."""
    newest: dict[Path, tuple[int, Attempt]] = {}
    for seed, attempt in attempts:
        run = _first_attempt(attempt.path.resolve())
        newest[run] = max(newest.get(run, (seed, attempt)), (seed, attempt), key=lambda x: _number(x[1]))
    every = [*newest.values()]
    places = ["" for _ in every], [str(attempt.path.parent) for _, attempt in every]
    for own in places:
        if len({*zip(own, (seed for seed, _ in every), strict=True)}) == len(every):
            break
    else:
        own = [str(_first_attempt(attempt.path)) for _, attempt in every]
    found: dict[str, Runs] = {}
    for place, (seed, attempt) in zip(own, every, strict=True):
        found.setdefault(place, {})[seed] = attempt
    return found


def _first_attempt(path: Path) -> Path:
    """The folder of a run's first attempt."""
    return path.with_suffix("") if path.suffix[1:].isdigit() else path


def _number(attempt: Attempt) -> tuple[bool, int]:
    number = attempt.path.suffix[1:]
    return attempt.result.is_file(), int(number) if number.isdigit() else 1


def _names(keys: Sequence[Key], states: Sequence[Mapping[int, State]]) -> list[str]:
    """The shortest names that tell runs apart: their own, those of methods, both with what is needed."""
    methods = [
        next((str(state.result["method"]) for state in own.values() if state.result), "") for own in states
    ]
    own = [key.name for key in keys]
    either = [method or key.name for method, key in zip(methods, keys, strict=True)]
    whole = [
        f"{text} ({key.hashed}, {key.name}, {key.rounds} rounds)"
        for text, key in zip(either, keys, strict=True)
    ]
    choices = (
        *([own] if RUNS not in own else []),
        *([methods] if all(methods) else []),
        [f"{text} ({key.hashed})" for text, key in zip(either, keys, strict=True)],
        whole,
        [f"{text} ({key.place})" if key.place else text for text, key in zip(either, keys, strict=True)],
        [f"{text[:-1]}, {key.place})" if key.place else text for text, key in zip(whole, keys, strict=True)],
    )
    return next((names for names in choices if len({*names}) == len(keys)), choices[-1])


def _metrics(results: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """The metrics of the test data, else of the validation data, in words; losses come last, what the most runs have first."""
    counts = Counter(name for result in results for name in result)
    for split, words in {"test/": "test ", "val/": "validation "}.items():
        own = [name for name in counts if name.startswith(split)]
        if own:
            own.sort(key=lambda name: (best_is(name) == "min", -counts[name]))
            return {name: words + name.removeprefix(split).replace("_", " ") for name in own}
    return {"test/accuracy": "test accuracy"}
