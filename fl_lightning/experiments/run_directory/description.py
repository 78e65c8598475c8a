"""Description of a run as nested dicts and lists, with the structure of a configuration file.

The run's hash, provenance and changed settings are computed from the description. Runs from YAML
and from Python have equal descriptions.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import EarlyStopping, ProgressBar

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

_TASK = full_name(Classification)
"""Full name of the default task."""

_PRECISIONS = {"32-true": None, "32": None, "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Lightning's aliases of precisions, such as ``"16"`` for ``"16-mixed"``.

None is the default precision.
"""

_SHOWING = (RoundCheckpoint, ProgressBar)
"""Callbacks that do not affect results and are ignored by the hash."""


def description_of(config: Config) -> Config:
    """Return the settings of a configuration that can affect results, with full class names.

    Args:
        config: A resolved configuration or a description. ``dict_kwargs`` are merged into
            ``init_args``.
    """
    return {part: _plain(node) for part, node in _parts(config).items()}


def _parts(config: Config) -> Config:
    """Return ``class_path`` and ``init_args`` of model, data and trainer.

    Settings that the hash ignores are left out.
    """
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
    evaluated = any(_evaluation_counts(class_path(entry)) for entry in entries)
    outside = OUTSIDE_THE_HASH - {"check_val_every_n_epoch"} if evaluated else OUTSIDE_THE_HASH
    trainer = {name: x for name, x in settings.items() if name not in outside}
    if str(precision := trainer.get("precision")) in _PRECISIONS:
        trainer["precision"] = _PRECISIONS[str(precision)]
    trainer["callbacks"] = [entry for entry in entries if not _shows(class_path(entry))] or None
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
    """Return the first 8 hex digits of SHA-256 over the settings that differ from the defaults.

    A file that affects results, such as initial weights or a partition, is hashed by its content.

    Args:
        config: The entries ``model``, ``data`` and ``trainer``. The order of keys has no effect.
    """
    essential = {part: _essential(node) for part, node in _parts(config).items()}
    text = json.dumps(essential, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def directory_of(config: Config) -> RunDirectory:
    """Return the directory of all attempts at a resolved configuration.

    Args:
        config: The resolved configuration, including ``name`` and ``run_root``. In ``run_root``,
            ``~`` is the user's home.
    """
    hashed = config_hash({key: config[key] for key in ("model", "data", "trainer")})
    return RunDirectory(
        folder_below(config["run_root"], config["name"]), f"{hashed}-s{config['seed_everything']}"
    )


def deciding_settings(config: Config) -> Config:
    """Return the settings that affect results, including defaults, by dotted name.

    The dotted names omit ``init_args``. A callback is named by its class, as in
    ``trainer.callbacks.FixBN.freeze_round``. A second callback of the same class is ``FixBN.2``.
    The value of an object is the full name of its class.
    """
    tree = description_of(config)
    settings = tree["trainer"]["init_args"]
    named: Config = {}
    for entry in settings.get("callbacks") or []:
        name = class_name(entry)
        same = sum(class_name(x) == name for x in named.values())
        named[name if not same else f"{name}.{same + 1}"] = entry
    seed = {"seed_everything": config.get("seed_everything")}
    trainer = {**settings, "callbacks": named}
    return _flat({**seed, "model": tree["model"], "data": tree["data"], "trainer": trainer}, "")


def class_path(entry: Any) -> str:
    """Return the full name of the class in an entry's ``class_path``.

    If the entry has no ``class_path``, the name is empty.
    """
    path = entry.get("class_path", "") if isinstance(entry, Mapping) else ""
    return _resolved(str(path))


def class_name(entry: Any) -> str:
    """Return the name of an entry's class without its module.

    If the entry has no ``class_path``, the name is empty.
    """
    return class_path(entry).rpartition(".")[2]


def _flat(node: Any, name: str) -> Config:
    if not isinstance(node, Mapping):
        return {name: node}
    flat = {name: node["class_path"]} if "class_path" in node else {}
    for key, value in node.items():
        if key == "init_args" and flat:
            files = getattr(_maker(node["class_path"]), "deciding_files", ())
            flat |= _flat({n: _with_digest(x) if n in files else x for n, x in value.items()}, name)
        elif key != "class_path":
            flat |= _flat(value, f"{name}.{key}".lstrip("."))
    return flat


def _with_digest(value: Any) -> Any:
    content = _content(value)
    return f"{value} ({content['content_digest']})" if isinstance(content, dict) else value


def _plain(node: Any) -> Any:
    """Return a copy of a description with full class names.

    ``dict_kwargs`` are merged into ``init_args``.
    """
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
    """Return a description without the arguments that equal their defaults."""
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
        # no object equals the default None: skip the slow conversion of the object to text
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
    """Return the digest of the file or of the folder's files at a path; return any other value unchanged."""
    path = Path(value).expanduser() if isinstance(value, str) else None
    if path is not None and path.is_dir():
        return {"content_digest": {x.name: file_digest(x) for x in sorted(path.iterdir()) if x.is_file()}}
    return {"content_digest": file_digest(path)} if path is not None and path.is_file() else value


def _text(value: Any) -> str:
    """Return a value as text.

    Compared as text, ``1``, ``1.0`` and ``True`` are different.
    """
    return repr(value) if type(value) in _SCALARS else json.dumps(value, sort_keys=True, default=str)


@cache
def _defaults(path: str) -> dict[str, str]:
    """Return the defaults of a class or function as text.

    Defaults in :func:`pinned` take precedence over defaults in the code.
    """
    values = defaults(_maker(path)) | pinned().get(path, {})
    return {name: _text(value) for name, value in values.items()}


def defaults(maker: Callable[..., Any] | None) -> Config:
    """Return the defaults of a class or function as numbers, strings, lists and dicts."""
    known = parameters(maker) if maker is not None else {}
    return {
        name: as_plain(x.default, x.annotation)
        for name, x in known.items()
        if x.default is not inspect.Parameter.empty
    }


@cache
def pinned() -> dict[str, Config]:
    """Return the original default of each shipped setting.

    The hash omits settings that equal their original default. If a later version changes a default,
    runs with the original value keep their hash.
    """
    values: dict[str, Config] = json.loads(Path(__file__).with_name("defaults.json").read_text())
    return values


@cache
def _maker(path: str) -> Callable[..., Any] | None:
    """Return the class or function with this full name, or None if it cannot be imported."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            value: Any = import_module(".".join(parts[:length]))
        except Exception:  # noqa: BLE001, S112  # the error is reported when the run is built
            continue
        for part in parts[length:]:
            value = getattr(value, part, None)
        return value if callable(value) else None
    return None


@cache
def _resolved(path: str) -> str:
    maker = _maker(current_name(path)) if "." in path else None
    return path if maker is None else full_name(maker)


def _hashed(path: str) -> str:
    """Return a class's name for the hash.

    A shipped class has the import path of older versions. Therefore, hashes do not depend on the
    version.
    """
    package, _, name = path.partition(".")
    if package in OLD_NAMES:  # the user's own package callbacks, datamodules or configs
        return f".{path}"
    return name if package == "fl_lightning" and name.startswith(("callbacks.", "datamodules.")) else path


@cache
def _shows(path: str) -> bool:
    maker = _maker(path) if path else None
    return isinstance(maker, type) and issubclass(maker, _SHOWING)


@cache
def _threads_only_read(path: str) -> bool:
    """Return whether the setting ``threads`` is defined by a shipped class.

    A shipped class gives the same results with any number of threads.
    """
    kinds = getattr(_maker(path), "__mro__", ()) if path else ()
    owners = (kind for kind in kinds if "threads" in inspect.signature(kind).parameters)
    # the result is False for a user's class
    return next(owners, FederatedDataModule).__module__.startswith("fl_lightning.")


@cache
def _evaluation_counts(path: str) -> bool:
    """Return whether evaluations cause traffic by a callback, or let the callback stop the run."""
    maker = _maker(path) if path else None
    stops = isinstance(maker, type) and issubclass(maker, EarlyStopping)
    return stops or bool(getattr(maker, "sends_for_evaluations", False))


def differences(before: Config, after: Config) -> dict[str, list[Any]]:
    """Return the old and the new value of each setting that has changed, by name.

    Two NaN values are equal here.
    """
    pairs = {name: [before.get(name), after.get(name)] for name in dict.fromkeys([*before, *after])}
    return {
        name: [old, new]
        for name, (old, new) in pairs.items()
        if old != new and repr(old) != repr(new) and not _is_gone(old, new)
    }


def _is_gone(old: Any, new: Any) -> bool:
    """Return whether a setting has changed only because its file is missing now.

    An example is a file with initial weights.
    """
    return isinstance(old, str) and isinstance(new, str) and old.startswith(f"{new} (")


def misfits(written: Config, made: Config) -> list[str]:
    """Describe the settings that differ between a configuration file and the built objects.

    A setting that the data determine may be missing in the file.

    Args:
        written: Content of the configuration file.
        made: Description of the built objects.
    """
    decided = [f"model.model.{name}" for name in LINKED]
    file, objects = deciding_settings(written), deciding_settings(made)
    return [
        f"{name}: {old} in the file, {new} was built"
        for name, (old, new) in differences(file, objects).items()
        if not (name in decided and old is None)
        # the configuration file gives a dataclass by its fields
        and not (old is None and any(key.startswith(f"{name}.") for key in file))
        and not _is_foreign(name, objects)
        and not _is_same(old, new)
    ]


def _is_foreign(name: str, objects: Config) -> bool:
    """Return whether a setting belongs to an object with unrecorded constructor arguments."""
    parts = name.split(".")
    around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(
        f"{place}.{digest}" in objects for place in around for digest in ("state_digest", "content_digest")
    ) or any(isinstance(objects.get(place), list) for place in around[:-1])


def _is_same(old: Any, new: Any) -> bool:
    """Return whether two descriptions mean the same value, such as a set and a sorted list."""
    if isinstance(old, list) and isinstance(new, list):
        # the description of a set is a sorted list
        return new == sorted(new, key=repr) and sorted(map(str, old)) == sorted(map(str, new))
    if isinstance(old, str) and old.startswith("range(") and isinstance(new, list):
        return True
    words = [_resolved(x) if isinstance(x, str) else str(x) for x in (old, new)]
    return words[0] == words[1]
