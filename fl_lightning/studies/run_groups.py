"""Run directories as if they were a study: seeds of one configuration are a combination."""

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import ConfigurationError
from fl_lightning.round.directions import best_is
from fl_lightning.run_directory.description import config_hash
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.metrics import read_metrics
from fl_lightning.studies.cells import RUNS, State
from fl_lightning.studies.findings import run_found

Runs = dict[int, Attempt]
"""Attempts of one configuration by seed."""


def found_in(directories: Sequence[Path]) -> dict[str, Any]:
    """What runs have found, in the form of :func:`fl_lightning.studies.findings.findings`.

    Of several attempts at one configuration and seed the newest finished one counts, else the newest.

    Args:
        directories: Run directories.

    Raises:
        ConfigurationError: The configuration of one cannot be read.
    """
    grouped: dict[tuple[Any, ...], tuple[dict[str, Any], Runs]] = {}
    for attempt in map(Attempt, directories):
        config = _config(attempt)
        hashed = config_hash({key: config[key] for key in ("model", "data", "trainer")})
        key = (config["name"], hashed, config["trainer"].get("max_epochs"))
        _, runs = grouped.setdefault(key, (config, {}))
        seed = config["seed_everything"]
        runs[seed] = max(runs.get(seed, attempt), attempt, key=_number)
    states = [{seed: state_of(attempt) for seed, attempt in runs.items()} for _, runs in grouped.values()]
    names = _names([*grouped], states)
    metrics = _metrics(state.result for own in states for state in own.values() if state.result)
    groups: list[dict[str, Any]] = []
    for name, (config, runs), own in zip(names, grouped.values(), states, strict=True):
        results = {str(seed): own[seed].result or {} for seed in sorted(runs)}
        groups.append(
            {
                "labels": {"run": name},
                "published": None,
                "learning_rate": (config["model"]["client_optimizer"].get("init_args") or {}).get("lr"),
                "values": {
                    metric: {seed: float(found[metric]) for seed, found in results.items() if metric in found}
                    for metric in metrics
                },
                "runs": [run_found(seed, own[seed], runs[seed].path) for seed in sorted(runs)],
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
        return State("done", attempt, json.loads(attempt.result.read_text()))
    except (OSError, ValueError):
        rounds = read_metrics(attempt.metrics)[-1:] if attempt.metrics.is_file() else []
    why = f"no result.json; the last logged round is {rounds[0]['round']}" if rounds else "no round is logged"
    if attempt.error.is_file():
        lines = attempt.error.read_text(errors="replace").strip().splitlines()
        return State("failed", attempt, why=(lines or ["no message"])[-1])
    return State("running" if attempt.is_locked() else "stopped", attempt, why=why)


def _config(attempt: Attempt) -> dict[str, Any]:
    try:
        config: dict[str, Any] = yaml.safe_load(attempt.config.read_text())
        config["name"], config["seed_everything"], config["trainer"]["max_epochs"]
        config["model"]["client_optimizer"]["class_path"], config["data"]["class_path"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"report: {attempt.config} is no resolved configuration of a run; leave its folder out"
        ) from error
    return config


def _number(attempt: Attempt) -> tuple[bool, int]:
    number = attempt.path.suffix[1:]
    return attempt.result.is_file(), int(number) if number.isdigit() else 1


def _names(keys: Sequence[tuple[Any, ...]], states: Sequence[Mapping[int, State]]) -> list[str]:
    """The shortest names that tell configurations apart: their own, those of methods, both with what is needed."""
    methods = [
        next((str(state.result["method"]) for state in own.values() if state.result), "") for own in states
    ]
    own = [str(name) for name, _, _ in keys]
    either = [f"{method or name} ({hashed}" for method, (name, hashed, _) in zip(methods, keys, strict=True)]
    choices = (
        *([own] if RUNS not in own else []),
        *([methods] if all(methods) else []),
        [f"{text})" for text in either],
        [f"{text}, {name}, {rounds} rounds)" for text, (name, _, rounds) in zip(either, keys, strict=True)],
    )
    return next((names for names in choices if len({*names}) == len(keys)), choices[-1])


def _metrics(results: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The metrics of the test data, else of the validation data, in words; losses come last, what the most runs have first."""
    counts = Counter(name for result in results for name in result)
    for split, words in {"test/": "test ", "val/": "validation "}.items():
        own = [name for name in counts if name.startswith(split)]
        if own:
            own.sort(key=lambda name: (best_is(name) == "min", -counts[name]))
            return {name: words + name.removeprefix(split).replace("_", " ") for name in own}
    return {"test/accuracy": "test accuracy"}
