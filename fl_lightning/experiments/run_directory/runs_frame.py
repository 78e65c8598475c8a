"""All runs below a folder as a table of pandas. This module does not import PyTorch."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.files import restored

COLUMNS = (
    "name", "method", "data", "seed", "rounds", "planned", "state", "metric", "value", "best", "best_round", "directory",
)  # fmt: skip
"""Columns of each table of runs.

- ``rounds``: Last logged round. ``planned`` is the planned number of rounds.
- ``state``: ``finished``, ``diverged``, ``failed``, ``running`` or ``stopped``.
- ``metric``: Main metric of the evaluations after a round, such as ``val/accuracy``.
- ``value``: The metric's last value. ``best`` is its best value, in the round ``best_round``."""

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # written in C, ten times as fast


def runs_frame(folder: Path, settings: Sequence[str] = ()) -> pd.DataFrame:
    """Return one row for each run below a folder, also behind links; no row if there is no run.

    Args:
        folder: Folder such as ``runs``.
        settings: Dotted names of settings, such as ``model.local_steps``. Each is a further column.

    Returns:
        The table with the columns :data:`COLUMNS`, the settings, and the metrics of finished runs,
        such as ``test/accuracy``. A value that is not known is missing.
    """
    rows = [_row(attempt, config, settings) for attempt, config in _runs(folder)]
    metrics = dict.fromkeys(name for row in rows for name in row if name not in (*COLUMNS, *settings))
    columns = [*dict.fromkeys([*COLUMNS, *settings, *metrics])]
    return pd.DataFrame(rows, columns=columns, dtype=object).infer_objects()


def settings_of(tree: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of each setting of a configuration.

    The value of an object is the name of its class. A callback is named by its class, as in
    ``trainer.callbacks.FixBN.freeze_round``.
    """
    if isinstance(tree, list) and all(isinstance(entry, Mapping) for entry in tree):
        for entry in tree:
            yield from settings_of(entry, f"{name}.{_class(entry)}")
    elif isinstance(tree, Mapping):
        if "class_path" in tree:
            yield name, _class(tree)
            tree = tree.get("init_args") or {}
        for key, value in tree.items():
            yield from settings_of(value, f"{name}.{key}" if name else key)
    else:
        yield name, tree


def _runs(folder: Path) -> Iterator[tuple[Attempt, Config]]:
    seen = set[str]()
    for place, folders, files in os.walk(folder, followlinks=True):
        # a run that has links to it is shown once, if possible under its own name
        folders.sort(key=lambda name: (os.path.islink(os.path.join(place, name)), name))
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        if "config.yaml" in files:
            attempt = Attempt(Path(place))
            with suppress(OSError, ValueError, yaml.YAMLError):
                config = yaml.load(attempt.config.read_text(), _Loader)
                if isinstance(config, dict) and {"model", "data", "trainer"} <= config.keys():
                    folders.clear()
                    yield attempt, config


def _row(attempt: Attempt, config: Config, settings: Sequence[str]) -> dict[str, object]:
    facts, result = _content(attempt.identity), _content(attempt.result)
    every, trainer = dict(settings_of(config) if settings else ()), config["trainer"] or {}
    metrics = {name: str(shown.get("best")) for name, shown in (facts.get("metrics") or {}).items()}
    main, direction = next(iter(metrics.items()), ("accuracy", "max"))
    rows = _rows(attempt.metrics)
    logged = {
        name: {
            row["round"]: float(row[name])
            for row in rows
            if isinstance(row.get(name), int | float) and row["round"] > 0
        }
        for name in (f"val/{main}", f"test/{main}", main)
    }
    metric = next((name for name, values in logged.items() if values), None)
    values = logged.get(metric or "", {})
    finite = {number: value for number, value in values.items() if isfinite(value)}
    best = (min if direction == "min" else max)(finite, key=finite.__getitem__, default=None)
    callbacks = trainer.get("callbacks") or []
    names = " + ".join(_class(entry) for entry in callbacks if isinstance(entry, Mapping))
    return {
        "name": config.get("name"),
        "method": facts.get("method") or result.get("method") or names or None,
        "data": _class(config["data"]),
        "seed": config.get("seed_everything"),
        "rounds": result.get("rounds", rows[-1]["round"] if rows else 0),
        "planned": facts.get("planned_rounds", result.get("planned_rounds", trainer.get("max_epochs"))),
        "state": _state(attempt, result),
        "metric": metric,
        "value": next(reversed(values.values()), None),
        "best": finite.get(best) if best is not None else None,
        "best_round": best,
        "directory": str(attempt.path),
        **{name: every.get(name) for name in settings},
        **{name: value for name, value in result.items() if "/" in name or name in result.get("metrics", ())},
    }


def _state(attempt: Attempt, result: Mapping[str, Any]) -> str:
    if result:
        return "diverged" if result.get("diverged") else "finished"
    if attempt.is_locked():
        return "running"
    if attempt.error.is_file():
        return "diverged" if attempt.last_error().startswith("Diverged: ") else "failed"
    return "stopped"


def _content(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = restored(json.loads(path.read_text()))
        return content if isinstance(content, dict) else {}
    return {}


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``. A damaged line is left out, so that other runs are shown."""
    rows: list[dict[str, Any]] = []
    content = b""
    with suppress(OSError):
        content = path.read_bytes()
    for line in content.split(b"\n")[:-1]:  # the last line of a killed run may be incomplete
        with suppress(ValueError, KeyError, TypeError):
            row = restored(json.loads(line))
            rows.append({**row, "round": int(row["round"])})
    return rows


def _class(node: Any) -> str:
    path = node.get("class_path") if isinstance(node, Mapping) else node
    return str(path or "").rpartition(".")[2]
