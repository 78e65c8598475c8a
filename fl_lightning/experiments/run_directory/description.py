"""The description of a run: what was built, as one tree of plain values, whether it was built from YAML or in Python.

The tree has the form of a configuration: ``model``, ``data`` and ``trainer``, and for each object its ``class_path`` and
``init_args``. The hash of a run, its provenance and what differs at a resume are read from it.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ProgressBar

from fl_lightning.aliases import OLD_NAMES, current_name
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.client_data.fingerprint import file_digest
from fl_lightning.experiments.run_directory.built import LINKED
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.experiments.run_directory.code import full_name
from fl_lightning.experiments.run_directory.directory import Config, RunDirectory
from fl_lightning.experiments.run_directory.values import as_plain
from fl_lightning.files import folder_below
from fl_lightning.recorded import parameters
from fl_lightning.round.tasks import Classification

MODULE = "fl_lightning.FederatedModule"
TRAINER = "lightning.Trainer"

OUTSIDE_THE_HASH = frozenset(
    {
        "accelerator",
        "check_val_every_n_epoch",
        "default_root_dir",
        "devices",
        "enable_checkpointing",
        "enable_model_summary",
        "enable_progress_bar",
        "log_every_n_steps",
        "logger",
        "max_epochs",
        "max_time",
        "num_nodes",
        "profiler",
        "strategy",
    }
)
"""Settings of the trainer that change neither weights nor bytes nor the metrics of a round."""

_TASK = full_name(Classification)
"""The task of a run without one."""

_PRECISIONS = {"32-true": None, "32": None, "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Lightning's other names of a precision."""

_SHOWING = (RoundCheckpoint, ProgressBar)
"""Callbacks that change no result either."""


def description_of(config: Config) -> Config:
    """Return the description of a configuration: full names of classes, and no settings of the run's surroundings.

    Args:
        config: A resolved configuration, or the description itself; ``dict_kwargs`` are arguments like others.
    """
    return {part: _plain(node) for part, node in _parts(config).items()}


def _parts(config: Config) -> Config:
    """Return model, data and trainer as classes with arguments, without settings of the run's surroundings."""
    model, data = config.get("model") or {}, config.get("data") or {}
    path, arguments = (
        model.get("class_path", MODULE),
        model.get("init_args", {} if "class_path" in model else model),
    )
    arguments = {
        name: x for name, x in (arguments or {}).items() if name not in ("seed", "check_first_steps")
    }
    if arguments.get("loss") is None and _essential(arguments.get("task")) == {"class_path": _TASK}:
        arguments["task"] = None
    settings = config.get("trainer") or {}
    entries = settings.get("callbacks") or []
    entries = entries if isinstance(entries, list) else [entries]
    evaluated = any(_evaluation_counts(class_path(one)) for one in entries)
    outside = OUTSIDE_THE_HASH - {"check_val_every_n_epoch"} if evaluated else OUTSIDE_THE_HASH
    trainer = {name: x for name, x in settings.items() if name not in outside}
    if str(precision := trainer.get("precision")) in _PRECISIONS:
        trainer["precision"] = _PRECISIONS[str(precision)]
    trainer["callbacks"] = [one for one in entries if not _shows(class_path(one))] or None
    if isinstance(data.get("init_args"), Mapping) and _threads_only_read(class_path(data)):
        data = {**data, "init_args": {name: x for name, x in data["init_args"].items() if name != "threads"}}
    return {
        "model": {**model, "class_path": path, "init_args": arguments}
        if "class_path" in model
        else {"class_path": path, "init_args": arguments},
        "data": data,
        "trainer": {"class_path": TRAINER, "init_args": trainer},
    }


def config_hash(config: Config) -> str:
    """Name a configuration by 8 hex digits of SHA-256 over what of its description differs from the defaults.

    Files that decide results, such as initial weights and partitions, count by their content.

    Args:
        config: Model, data and trainer; the order of keys is ignored.
    """
    essential = {part: _essential(node) for part, node in _parts(config).items()}
    text = json.dumps(essential, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def directory_of(config: Config) -> RunDirectory:
    """Return the directory of all attempts at a resolved configuration.

    Args:
        config: The resolved configuration with its name; ``~`` is the user's home.
    """
    hashed = config_hash({key: config[key] for key in ("model", "data", "trainer")})
    return RunDirectory(
        folder_below(config["run_root"], config["name"]), f"{hashed}-s{config['seed_everything']}"
    )


def deciding_settings(config: Config) -> Config:
    """Return the settings that decide results by dotted name without ``init_args``, defaults included; a class by its full name.

    Callbacks are named by their class, such as ``trainer.callbacks.FixBN.freeze_round``; the second of a class is ``FixBN.2``.
    """
    found = description_of(config)
    settings = found["trainer"]["init_args"]
    named: Config = {}
    for entry in settings.get("callbacks") or []:
        name = class_name(entry)
        same = sum(class_name(one) == name for one in named.values())
        named[name if not same else f"{name}.{same + 1}"] = entry
    seed = {"seed_everything": config.get("seed_everything")}
    trainer = {**settings, "callbacks": named}
    return _flat({**seed, "model": found["model"], "data": found["data"], "trainer": trainer}, "")


def class_path(entry: Any) -> str:
    """Return the full name of an entry's class, empty if it names none."""
    path = entry.get("class_path", "") if isinstance(entry, Mapping) else ""
    return _resolved(str(path))


def class_name(entry: Any) -> str:
    """Return the bare name of an entry's class, empty if it names none."""
    return class_path(entry).rpartition(".")[2]


def _flat(node: Any, name: str) -> Config:
    if not isinstance(node, Mapping):
        return {name: node}
    found = {name: node["class_path"]} if "class_path" in node else {}
    for key, value in node.items():
        if key == "init_args" and found:
            files = getattr(_maker(node["class_path"]), "deciding_files", ())
            found |= _flat({one: _with_digest(x) if one in files else x for one, x in value.items()}, name)
        elif key != "class_path":
            found |= _flat(value, f"{name}.{key}".lstrip("."))
    return found


def _with_digest(value: Any) -> Any:
    content = _content(value)
    return f"{value} ({content['content_digest']})" if isinstance(content, dict) else value


def _plain(node: Any) -> Any:
    """Copy a tree with full names of classes, ``dict_kwargs`` among the ``init_args``."""
    if type(node) in _SCALARS:
        return node
    if isinstance(node, Mapping):
        if not isinstance(node.get("class_path"), str):
            return {
                str(name): value if type(value) in _SCALARS else _plain(value) for name, value in node.items()
            }
        rest = {name: x for name, x in node.items() if name not in _OF_A_CLASS}
        return {
            "class_path": _resolved(node["class_path"]),
            "init_args": _plain(dict(_arguments(node))),
            **rest,
        }
    return [_plain(value) for value in node] if isinstance(node, list | tuple) else node


def _essential(node: Any) -> Any:
    """Return a description without the arguments that are at their defaults."""
    if type(node) in _SCALARS:
        return node
    if isinstance(node, list | tuple):
        return [_essential(value) for value in node]
    if not isinstance(node, Mapping):
        return node
    if not isinstance(node.get("class_path"), str):
        return {str(name): _essential(value) for name, value in node.items()}
    path = _resolved(node["class_path"])
    known, files = _defaults(path), getattr(_maker(path), "deciding_files", ())
    given = {}
    for name, x in _arguments(node).items():
        scalar = type(x) in _SCALARS
        usual = known.get(name)
        # None is the default of most objects: they need not be written to differ from it
        if usual != repr(x) if scalar else usual in (None, "None") or usual != _text(_plain(x)):
            given[name] = _content(x) if name in files else x if scalar else _essential(x)
    rest = {name: x for name, x in node.items() if name not in _OF_A_CLASS}
    return {"class_path": _hashed(path), **({"init_args": given} if given else {}), **rest}


def _arguments(node: Mapping[str, Any]) -> Mapping[str, Any]:
    given = node.get("init_args") or {}
    return {**given, **node["dict_kwargs"]} if node.get("dict_kwargs") else given


_OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")
_SCALARS = frozenset({type(None), bool, int, float, str})


def _content(value: Any) -> Any:
    """Return a file's digest; the value itself if there is no such file."""
    path = Path(value).expanduser() if isinstance(value, str) else None
    return {"content_digest": file_digest(path)} if path is not None and path.is_file() else value


def _text(value: Any) -> str:
    """Write a value for a comparison by type and content: ``1``, ``1.0`` and ``True`` differ."""
    return repr(value) if type(value) in _SCALARS else json.dumps(value, sort_keys=True, default=str)


@cache
def _defaults(path: str) -> dict[str, str]:
    """Return the defaults of a class or function as text: of shipped ones those that are pinned, of others today's."""
    found = defaults(_maker(path))
    return {name: _text(value) for name, value in (found | pinned().get(path, {})).items()}


def defaults(maker: Callable[..., Any] | None) -> Config:
    """Return the defaults of a class or function as plain values."""
    known = parameters(maker) if maker is not None else {}
    return {
        name: as_plain(one.default, one.annotation)
        for name, one in known.items()
        if one.default is not inspect.Parameter.empty
    }


@cache
def pinned() -> dict[str, Config]:
    """Return the defaults of shipped classes as they were when each setting came: only they stay outside the hash."""
    found: dict[str, Config] = json.loads(Path(__file__).with_name("defaults.json").read_text())
    return found


@cache
def _maker(path: str) -> Callable[..., Any] | None:
    """Return the class or function of a full name, None if it cannot be imported."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except Exception:  # noqa: BLE001, S112  # no module, or one that fails: building the run reports it
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found if callable(found) else None
    return None


@cache
def _resolved(path: str) -> str:
    maker = _maker(current_name(path)) if "." in path else None
    return path if maker is None else full_name(maker)


def _hashed(path: str) -> str:
    """Return the name of a class in the hash: of a shipped one the old dotted path, so that runs keep their names."""
    package, _, name = path.partition(".")
    if package in OLD_NAMES:  # the user's own package
        return f".{path}"
    return name if package == "fl_lightning" and name.startswith(("callbacks.", "datamodules.")) else path


@cache
def _shows(path: str) -> bool:
    maker = _maker(path) if path else None
    return isinstance(maker, type) and issubclass(maker, _SHOWING)


@cache
def _threads_only_read(path: str) -> bool:
    """Whether ``threads`` of a data module is the shipped setting, on which no number depends; a user's own class may use it otherwise."""
    kinds = getattr(_maker(path), "__mro__", ()) if path else ()
    own = (kind for kind in kinds if "threads" in inspect.signature(kind).parameters)
    return next(own, FederatedDataModule).__module__.startswith("fl_lightning.")


@cache
def _evaluation_counts(path: str) -> bool:
    """Whether what a method sends depends on how often the server evaluates."""
    return bool(getattr(_maker(path), "sends_for_evaluations", False)) if path else False


def differences(before: Config, after: Config) -> dict[str, list[Any]]:
    """Return the old and the new value of each setting that differs, by name; NaN does not differ from NaN."""
    pairs = {name: [before.get(name), after.get(name)] for name in dict.fromkeys([*before, *after])}
    return {
        name: [old, new]
        for name, (old, new) in pairs.items()
        if old != new and repr(old) != repr(new) and not _is_gone(old, new)
    }


def _is_gone(old: Any, new: Any) -> bool:
    """Whether a file that decided a run, such as its initial weights, is no longer there."""
    return isinstance(old, str) and isinstance(new, str) and old.startswith(f"{new} (")


def misfits(written: Config, made: Config) -> list[str]:
    """Say in which settings a configuration is not what was built; what the data decide it need not hold.

    Args:
        written: The configuration, as it is read from its file.
        made: What was built.
    """
    decided = [f"model.model.{name}" for name in LINKED]
    file, objects = deciding_settings(written), deciding_settings(made)
    return [
        f"{name}: {old} in the file, {new} was built"
        for name, (old, new) in differences(file, objects).items()
        if not (name in decided and old is None)
        and not (
            old is None and any(one.startswith(f"{name}.") for one in file)
        )  # a dataclass: its fields are
        and not _is_foreign(name, objects)
        and not _is_same(old, new)
    ]


def _is_foreign(name: str, objects: Config) -> bool:
    """Whether a setting is, or lies in, a value without a record of its arguments, such as a dataclass or a named tuple."""
    parts = name.split(".")
    around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(
        f"{one}.{digest}" in objects for one in around for digest in ("state_digest", "content_digest")
    ) or any(isinstance(objects.get(one), list) for one in around[:-1])


def _is_same(old: Any, new: Any) -> bool:
    """Whether a file and an object write one value in two ways: NaN, a set, a decimal number, a function's other name."""
    if isinstance(old, list) and isinstance(new, list):
        return new == sorted(new, key=repr) and sorted(map(str, old)) == sorted(
            map(str, new)
        )  # a set is sorted
    if isinstance(old, str) and old.startswith("range(") and isinstance(new, list):
        return True
    words = [_resolved(x) if isinstance(x, str) else str(x) for x in (old, new)]
    return words[0] == words[1]
