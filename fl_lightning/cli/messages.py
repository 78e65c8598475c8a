"""The wording of the command line's errors: one line with the setting, the value and what would work."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import nn

from fl_lightning.aggregation import Aggregator, PreAggregator
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.executors.base import Executor
from fl_lightning.optimizers.schedules import LRSchedule
from fl_lightning.round.callback import FederatedCallback

_KEPT = "the traceback is"

SHAPES = {
    "setting": r'Parser key "(.+?)":',
    "unknown setting": r"(?:[Oo]ption '(?P<name>[^']+)' is not accepted|does not accept option '(?P<of_command>[^']+)'"
    r"|unrecognized arguments: --(?P<argument>[\w.]+))",
    "unknown class": r"(?:dot import path string: |Import path |Unable to import .*?)'?([\w.]+(?:[, ]+[A-Z][\w.]*)*)'?",
    "broken class": r"class_path '([^']+)':\s*(.*)",
    "value": r"Expected a (<class '[\w.]+'>|typing\.Literal\[.*\])\. Got value: (.*)",
    "value of several types": r"(?s)Subtypes: \[(.*?)\]\n.*Given value: (.*)",
    "what a class says": r"(?m)^ +- (?!Expected |Import path does |Not a|Not of|Problem with |Does not |a class path|a dict )(.+)",
}
"""What of jsonargparse's messages is read, as regular expressions: ``tests/cli/test_jsonargparse.py`` holds it to them."""


def explain(message: str, settings: Sequence[str] = (), owner: str = "") -> str:
    """The line of a parser's message that matters.

    Args:
        message: What the parser says.
        settings: The parser's own settings.
        owner: The class whose settings the parser reads, empty where they are of several.

    Returns:
        One line that names the setting and the value, with near names where something is misspelt.
    """
    found = {shape: re.search(pattern, message) for shape, pattern in SHAPES.items()}
    key = found["setting"][1] if found["setting"] else ""
    name = ".".join(filter(None, (owner, key)))
    setting = f"{name}: " if name else ""
    if unknown := found["unknown setting"]:
        option = str(unknown[unknown.lastgroup or 0])
        among = f" among {', '.join(settings) or 'none'}" if owner else ""
        return f"{setting}there is no setting {option!r}{among}{_near_setting(option, settings)}"
    if said := found["what a class says"]:
        return setting + said[1]
    if broken := found["broken class"]:
        return f"{setting}class {broken[1]!r} cannot be imported: {broken[2]}"
    value = found["value of several types"] or found["value"]
    if value and ("import path" not in message or re.search(r"<class '(int|float|bool)'>", value[1])):
        return (
            f"{setting}{_one_line(value[2])} is not valid; it takes {_types(value[1], _one_line(value[2]))}"
        )
    if missing := found["unknown class"]:
        name, kinds = missing[1], _kinds(key.rpartition(".")[2])
        known, parts = _class_names(kinds), re.split(r"[, ]+", name)
        remedy = f"write [{','.join(parts)}]" if key.endswith("callbacks") else "give one of them"
        if len(parts) > 1 and known.issuperset(parts):
            return f"{setting}{name!r} is no class but {len(parts)}; {remedy}"
        if name in _class_names(_kinds("")):
            return f"{setting}the class {name!r} is of another kind; it takes {kinds[0].__name__.strip('_')}"
        near = nearest(name.rpartition(".")[2], known)
        few = "" if near or len(known) > 12 else f"; there are {', '.join(sorted(known))}"
        return f"{setting}there is no class {name!r}{near}{few}"
    return setting + _one_line(message.partition(f'"{key}":')[2] if key else message)


def fail(error: Exception) -> NoReturn:
    """Print the one line of an error that ends a command, and exit: with status 2, or 1 where nobody foresaw it.

    The traceback is printed too where the environment variable ``FL_LIGHTNING_TRACEBACK`` is set.
    """
    keep_traceback(error, Path())
    if os.environ.get("FL_LIGHTNING_TRACEBACK"):
        traceback.print_exception(error)
    line = told(error)
    print(f"error: {line or _unforeseen(error)}", file=sys.stderr)
    sys.exit(2 if line else 1)


def keep_traceback(error: Exception, folder: Path) -> None:
    """Write the traceback of an error that nobody foresaw into ``error.txt`` of a folder; the first folder keeps it."""
    if told(error) is not None or any(note.startswith(_KEPT) for note in getattr(error, "__notes__", ())):
        return
    path = folder / "error.txt"
    text = "".join(traceback.format_exception(error))
    try:
        if path.is_file() and not path.read_bytes().startswith(b"Traceback"):
            raise FileExistsError(errno.EEXIST, "a file of another kind is there")
        path.write_text(text, errors="backslashreplace")
        error.add_note(f"{_KEPT} in {path}")
    except OSError as unwritable:
        print(text, file=sys.stderr)
        error.add_note(f"{_KEPT} above, since {path} cannot be written: {unwritable.strerror}")


def _unforeseen(error: BaseException) -> str:
    *notes, kept = error.__notes__
    cause = error.__cause__
    if not notes and cause is not None and hasattr(cause, "__notes__"):
        error, notes = cause, cause.__notes__  # jsonargparse's, around that of a class
    said = f"{type(error).__name__}: {_one_line(str(error))}".rstrip(": ")
    return f"{said} ({'; '.join([*notes, kept])})"


def told(error: BaseException | None) -> str | None:
    """The line of an exception that a user can act on; None where it is one that nobody foresaw."""
    while error is not None:
        if isinstance(error, ConfigurationError | MisconfigurationException):
            return " ".join(str(error).split())
        # not imported for this: only a logger of the user's own lets an exception of W&B through
        if isinstance(error, getattr(sys.modules.get("wandb"), "Error", ())):
            wrong = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
            return f"W&B: {wrong}; store a key with wandb login, or set the environment variable WANDB_MODE=offline"
        missing = re.search(r"conditioned on metric `(.*?)` which is not available", str(error))
        if missing:
            logged = re.findall(r"`([^`]+)`", str(error))[2:]
            among = ", ".join(logged) or "nothing yet"
            return f"EarlyStopping.monitor: {missing[1]!r} is not logged; logged are {among}{nearest(missing[1], logged)}"
        twice = re.search(r"more than one stateful callback of type `(\w+)`", str(error))
        if twice:
            remedy = (
                "every run has one: set checkpoint.* instead" if twice[1] == "RoundCheckpoint" else "keep one"
            )
            return f"trainer.callbacks: {twice[1]} is given twice; {remedy}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _near_setting(name: str, known: Sequence[str]) -> str:
    longer = [candidate for candidate in known if candidate.startswith(name)][:3]
    sections = (candidate.partition(".")[0] for candidate in known)
    return f"; did you mean {' or '.join(longer)}?" if longer else nearest(name, [*known, *sections])


def _kinds(setting: str) -> tuple[type, ...]:
    """Of which kind the class is that a setting names, by the last part of its name; all kinds for another setting."""
    # not before main() has found out whose package this is
    from datamodules.partitions import Partition

    kinds: dict[str, type] = {
        "callback": FederatedCallback, "callbacks": Callback, "data": FederatedDataModule, "executor": Executor,
        "aggregator": Aggregator, "client_lr_schedule": LRSchedule, "partition": Partition, "loss": nn.modules.loss._Loss,
        "model": nn.Module, "client_optimizer": torch.optim.Optimizer, "server_optimizer": torch.optim.Optimizer,
    }  # fmt: skip
    return (kinds[setting],) if setting in kinds else (*kinds.values(), PreAggregator)


def _class_names(kinds: Sequence[type]) -> set[str]:
    """The names of shipped classes of some kinds; those of one's own go by their dotted path."""
    shipped = ("fl_lightning", "callbacks", "datamodules", "torch", "torchvision", "lightning")
    names: set[str] = set()
    pending = list(kinds)
    while pending:
        subclasses: list[type] = type.__subclasses__(pending.pop())
        pending += subclasses
        own = [c for c in subclasses if c.__module__.partition(".")[0] in shipped]
        names |= {c.__name__ for c in own if not c.__name__.startswith("_")}
    return names


def _types(listed: str, found: str) -> str:
    """Types as jsonargparse lists them, in words that a user of YAML knows."""
    plain = {
        "NoneType": "null", "str": "text", "int": "a whole number", "PositiveInt": "a whole number above 0", "bool": "true or false", "float": "a number", "Sequence": "a list"
    }  # fmt: skip
    if re.fullmatch(r"\w+", found):
        plain["Sequence"] = f"a list such as [{found}]"
    words = []
    for choices, name, inner in re.findall(r"Literal\[(.*?)\]|(\w+)(\[.*?\])?(?:'>|, |$)", listed):
        words.append(choices or plain.get(name, name + inner))
    return " or ".join(dict.fromkeys(words))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) < 300 else line[:297] + "..."
