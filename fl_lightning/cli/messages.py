"""The wording of the command line's errors: one line with the setting, the value and what would work."""

import re
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import nn

from fl_lightning.aggregation import Aggregator, PreAggregator
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.executors.base import Executor
from fl_lightning.optimizers.schedules import LRSchedule

_BASES: tuple[type, ...] = (
    Callback, FederatedDataModule, Executor, Aggregator, PreAggregator, LRSchedule, nn.Module,
    torch.optim.Optimizer,
)  # fmt: skip


_CLASS = re.compile(r"(?:dot import path string: |Import path |Unable to import .*?)'?([\w.]+)'?")


def explain(
    message: str, error: BaseException | None = None, settings: Sequence[str] = (), owner: str = ""
) -> str:
    """The line of a jsonargparse message that matters.

    Args:
        message: What the parser says.
        error: The exception behind it, from whose frames the accepted settings and the file are read.
        settings: The parser's own settings.
        owner: The class whose settings the parser reads, empty where they are of several.

    Returns:
        One line that names the setting and the value, with near names where something is misspelt.
    """
    key = re.search(r'Parser key "([^"]+)"', message)
    setting = ".".join(filter(None, (owner, key[1] if key else "")))
    setting = f"{setting}: " if setting else ""
    unknown = re.search(r"[Oo]ption '([^']+)' is not accepted|does not accept option '([^']+)'", message)
    if unknown:
        return _explain_unknown(setting, unknown[1] or unknown[2], error, bool(owner))
    missing_class = _CLASS.search(message)
    if missing_class:
        name = missing_class[1]
        return f"{setting}there is no class {name!r}{nearest(name.rpartition('.')[2], _class_names())}"
    broken = re.search(r"class_path '([^']+)':\s*(.*)", message)
    if broken:
        return f"{setting}class {broken[1]!r} cannot be imported: {broken[2]}"
    literal = re.search(r"Expected a typing.Literal\[(.*)\]\. Got value: (.*)", message)
    if literal:
        return f"{setting}{literal[2]} is not valid; it takes {literal[1]}"
    plain = re.search(r"Expected a (<class '[\w.]+'>)\. Got value: (.*)", message)
    if plain:
        return f"{setting}{plain[2]} is not valid; it takes {_type_name(plain[1])}"
    unrecognised = re.search(r"unrecognized arguments: --([\w.]+)", message)
    if unrecognised:
        return f"there is no setting {unrecognised[1]!r}{_near_setting(unrecognised[1], settings)}"
    unreadable = re.match(r"(Problems parsing|Unexpected) config: (.*)", message, re.DOTALL)
    if unreadable:
        path = next((f.f_locals["path"] for f in _frames(error) if "path" in f.f_locals), "")
        wrong = (
            "is not YAML" if unreadable[1] == "Problems parsing" else "holds no settings such as 'model: ...'"
        )
        return f"config {path} {wrong}: {_one_line(unreadable[2])}"
    if "'linked_targets'" in message:
        # jsonargparse cannot give a function the settings that the data set decides
        given = [f.f_locals["orig_val"] for f in _frames(error) if "orig_val" in f.f_locals]
        path = next(
            (value.get("class_path") if isinstance(value, dict | Namespace) else value for value in given), ""
        )
        return (
            f"{setting}{path} is a function, not a class; name a class, such as a torch.nn.Module of your own that "
            "calls it"
        )
    value = re.search(r"Given value: (.*)", message, re.DOTALL)
    if value and "Subtypes: [" in message:
        listed = message.partition("Subtypes: [")[2].partition("]\n")[0]
        types = [_type_name(t) for t in re.findall(r"<class '[\w.]+'>|[\w.]+\[.*?\]|[\w.]+", listed)]
        found = _one_line(value[1])
        if re.fullmatch(r"\w+", found):
            types = [f"a list such as [{found}]" if name == "Sequence[str]" else name for name in types]
        return f"{setting}{found} is not valid; it takes {' or '.join(dict.fromkeys(types))}"
    return setting + _one_line(message.partition("Parser key")[2].partition(":")[2] if key else message)


def told(error: BaseException) -> str | None:
    """The line of an exception that a user can act on; None where it is a defect that needs its traceback."""
    for one in behind(error):
        if isinstance(one, ConfigurationError | MisconfigurationException):
            return " ".join(str(one).split())
        # not imported for this: only a logger of the user's own lets an exception of W&B through
        if isinstance(one, getattr(sys.modules.get("wandb"), "Error", ())):
            wrong = str(one).partition("\n")[0].partition(". ")[0].rstrip(".")
            return f"W&B: {wrong}; store a key with wandb login, or set the environment variable WANDB_MODE=offline"
        missing = re.search(r"conditioned on metric `(.*?)` which is not available", str(one))
        if missing:
            logged = re.findall(r"`([^`]+)`", str(one))[2:]
            among = ", ".join(logged) or "nothing yet"
            return f"EarlyStopping.monitor: {missing[1]!r} is not logged; logged are {among}{nearest(missing[1], logged)}"
    return None


def _explain_unknown(setting: str, option: str, error: BaseException | None, list_all: bool) -> str:
    """Name the settings that do exist, read from the parser in whose frame the exception arose."""
    parsers = [frame.f_locals.get("self") for frame in _frames(error)]
    known = [
        name for parser in parsers[-1:] if isinstance(parser, ArgumentParser) for name in _settings(parser)
    ]
    among = f" among {', '.join(known) or 'none'}" if list_all else ""
    return f"{setting}there is no setting {option!r}{among}{_near_setting(option, known)}"


def _settings(parser: ArgumentParser) -> list[str]:
    """The settings that a parser and its subcommands take."""
    names: dict[str, None] = {}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for subparser in action.choices.values():
                names |= dict.fromkeys(_settings(subparser))
        elif action.dest not in ("help", "print_config", "print_shtab") and not action.dest.endswith(".help"):
            names[action.dest] = None
    return list(names)


def _near_setting(name: str, known: Sequence[str]) -> str:
    longer = [candidate for candidate in known if candidate.startswith(name)][:3]
    return f"; did you mean {' or '.join(longer)}?" if longer else nearest(name, known)


def behind(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, those that it was raised from, and those that a failed choice between types collected."""
    while error is not None:
        yield error
        for frame in _frames(error):
            collected = frame.f_locals.get("vals")
            if isinstance(collected, list):
                yield from (
                    other for other in collected if isinstance(other, BaseException) and other is not error
                )
        error = error.__cause__ or error.__context__


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    trace = error.__traceback__ if error is not None else None
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _class_names() -> set[str]:
    from datamodules.partitions import (
        Partition,
    )  # the command line knows the data sets, this package does not

    names: set[str] = set()
    pending: list[type] = [*_BASES, Partition]
    while pending:
        subclasses: list[type] = type.__subclasses__(pending.pop())
        pending += subclasses
        names |= {c.__name__ for c in subclasses if not c.__name__.startswith("_")}
    return names


def _type_name(text: str) -> str:
    name = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    name = re.sub(r"[\w.]+\.(\w+)", r"\1", name)
    return {"NoneType": "null", "str": "text", "int": "a whole number", "float": "a number"}.get(name, name)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) < 300 else line[:297] + "..."
