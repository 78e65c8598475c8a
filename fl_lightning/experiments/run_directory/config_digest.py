"""Name of a run: a digest of the settings that can affect its results.

The settings are numbers, strings, lists and class paths, as in the resolved configuration. Defaults
are settings, too. A file that affects results, such as a partition, is named by its content.
"""

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

from lightning.pytorch.callbacks import ProgressBar

from fl_lightning.client_data.fingerprint import digest, file_digest
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.experiments.run_directory.directory import Attempt, Config, RunDirectory
from fl_lightning.files import folder_below

MODULE = "fl_lightning.FederatedModule"

OUTSIDE_THE_HASH = frozenset(
    {
        "accelerator",
        "check_val_every_n_epoch",
        "default_root_dir",
        "devices",
        "enable_checkpointing",
        "enable_model_summary",
        "enable_progress_bar",
        "limit_predict_batches",
        "log_every_n_steps",
        "logger",
        "max_epochs",
        "max_time",
        "num_nodes",
        "profiler",
        "strategy",
    }
)
"""Trainer settings that do not affect the weights, the metrics or the traffic of a round."""

_SHOWING = (RoundCheckpoint, ProgressBar)
"""Callbacks that do not affect results and are ignored by the hash."""


def config_hash(config: Config) -> str:
    """Return the first 8 hex digits of SHA-256 over the settings that can affect results.

    Args:
        config: The entries ``model``, ``data`` and ``trainer`` of a resolved configuration. The
            order of keys has no effect. The order of callbacks has.
    """
    settings = {name: x for name, x in deciding_settings(config).items() if name != "seed_everything"}
    text = json.dumps([[*_callbacks(config)], settings], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def directory_of(config: Config) -> RunDirectory:
    """Return the directory of all attempts at a resolved configuration.

    Args:
        config: The resolved configuration, including ``name`` and ``run_root``. In ``run_root``,
            ``~`` is the user's home.
    """
    stem = f"{config_hash(config)}-s{config['seed_everything']}"
    return RunDirectory(folder_below(config["run_root"], config["name"]), stem)


def hash_of_run(attempt: Attempt, config: Config) -> str:
    """Return the hash in the name of a run's folder; compute it if a Python script made the run."""
    named = re.fullmatch(r"([0-9a-f]{8})-s\d+(\.\d+)?", attempt.path.name)
    return named[1] if named else config_hash(config)


def deciding_settings(config: Config) -> Config:
    """Return the settings that can affect results, including defaults, by dotted name.

    The dotted names omit ``init_args``. A callback is named by its class, as in
    ``trainer.callbacks.FixBN.freeze_round``. A second callback of the same class is ``FixBN.2``.
    The value of an object is the full name of its class. The value of a file that affects results
    is a digest of its content.
    """
    model, data, trainer = (config.get(part) or {} for part in ("model", "data", "trainer"))
    if "class_path" not in model:
        model = {"class_path": MODULE, "init_args": model}
    outside = {"model.seed", "model.check_first_steps"}
    if class_path(data).startswith("fl_lightning."):
        # a shipped class gives the same results with any number of threads
        outside.add("data.threads")
    callbacks = _callbacks(config)
    kinds = [_imported(class_path(entry)) for entry in callbacks.values()]
    every = {"check_val_every_n_epoch": trainer.get("check_val_every_n_epoch")}
    # evaluations cause traffic by some methods; another callback, such as EarlyStopping, may stop the run
    evaluated = any(getattr(kind, "sends_for_evaluations", True) for kind in kinds)
    trainer = {name: x for name, x in trainer.items() if name not in OUTSIDE_THE_HASH}
    trainer |= {"callbacks": callbacks} | (every if evaluated else {})
    tree = {
        "seed_everything": config.get("seed_everything"),
        "model": model,
        "data": data,
        "trainer": trainer,
    }
    return {name: x for name, x in _flat(tree, "").items() if name not in outside}


def class_path(entry: Any) -> str:
    """Return an entry's ``class_path``. If the entry has no ``class_path``, the text is empty."""
    return str(entry.get("class_path") or "") if isinstance(entry, Mapping) else ""


def full_name(maker: Any) -> str:
    """Return the shortest import path of a class or function."""
    name = getattr(maker, "__qualname__", type(maker).__qualname__)
    parts = str(maker.__module__).split(".")
    packages = (".".join(parts[:length]) for length in range(1, len(parts)))
    known = (package for package in packages if getattr(sys.modules.get(package), name, None) is maker)
    return f"{next(known, maker.__module__)}.{name}"


def changed_settings(before: Config, after: Config) -> dict[str, list[Any]]:
    """Return the old and the new value of each setting that has changed, by name.

    Two NaN values are equal here. A file that has been removed counts as unchanged, because a
    resumed run does not read its initial weights again.
    """
    pairs = {name: [before.get(name), after.get(name)] for name in dict.fromkeys([*before, *after])}
    return {
        name: [old, new]
        for name, (old, new) in pairs.items()
        if old != new and repr(old) != repr(new) and not _is_removed(old, new)
    }


def _is_removed(old: Any, new: Any) -> bool:
    old_is_file, new_is_file = (str(value).startswith("content ") for value in (old, new))
    is_path = isinstance(new, str) and not new_is_file
    return old_is_file and is_path and not Path(new).expanduser().exists()


def _callbacks(config: Config) -> dict[str, Any]:
    """Return the callbacks that can affect results, in their order, by the names of their classes."""
    entries = (config.get("trainer") or {}).get("callbacks") or []
    named: dict[str, Any] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        kind = _imported(class_path(entry))
        if isinstance(kind, type) and issubclass(kind, _SHOWING):
            continue
        name = class_path(entry).rpartition(".")[2]
        same = sum(class_path(other).rpartition(".")[2] == name for other in named.values())
        named[name if not same else f"{name}.{same + 1}"] = entry
    return named


def _flat(node: Any, name: str) -> Config:
    if isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        node = {str(number): item for number, item in enumerate(node)}
    if not isinstance(node, Mapping):
        return {name: node}
    flat: Config = {}
    if path := class_path(node):
        files = getattr(_imported(path), "deciding_files", ())
        arguments = {**(node.get("init_args") or {}), **(node.get("dict_kwargs") or {})}
        node = {key: _content(x) if key in files else x for key, x in arguments.items()}
        flat[name] = _same_name(path)
    for key, value in node.items():
        flat |= _flat(value, f"{name}.{key}".lstrip("."))
    return flat


def _content(value: Any) -> Any:
    """Return a digest of the file or of the folder's files at a path; return other values unchanged."""
    path = Path(value).expanduser() if isinstance(value, str) else Path()
    if path.is_file():
        return f"content {file_digest(path)}"
    if isinstance(value, str) and path.is_dir():
        return f"content {digest([(x.name, file_digest(x)) for x in sorted(path.iterdir()) if x.is_file()])}"
    return value


@cache
def _same_name(path: str) -> str:
    """Return the same path for all paths by which a class or function can be imported."""
    maker = _imported(path)
    return full_name(maker) if isinstance(maker, type) or inspect.isfunction(maker) else path


@cache
def _imported(path: str) -> Any:
    try:
        return locate(path)
    except ErrorDuringImport:
        return None  # the error is reported when the run is built
