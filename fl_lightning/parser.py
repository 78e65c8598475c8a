"""A LightningCLI parser whose errors are one line: the setting, the value and what would work."""

import re
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from fl_lightning.aggregation import Aggregator
from fl_lightning.datamodule import FederatedDataModule
from fl_lightning.executors import Executor
from fl_lightning.schedules import LRSchedule
from fl_lightning.suggestions import nearest

_BASES: tuple[type, ...] = (
    Callback, FederatedDataModule, Executor, Aggregator, LRSchedule, nn.Module, torch.optim.Optimizer
)  # fmt: skip
_CLASS = re.compile(r"(?:dot import path string: |Import path |Unable to import .*?)'?([\w.]+)'?")


class ConciseParser(LightningArgumentParser):
    """Prints the one line of an error that matters, without pages of usage; takes no abbreviated settings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation would make a misspelt setting (--model.local_step) pass as another one.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print a short form of a parser's message to stderr and exit with status 2."""
        print(
            f"error: {explain(message, ex, [a.dest for a in self._actions if not a.dest.endswith('.help')])}",
            file=sys.stderr,
        )
        sys.exit(2)


def explain(message: str, error: BaseException | None = None, settings: Sequence[str] = ()) -> str:
    """The line of a jsonargparse message that matters.

    Args:
        message: What the parser says.
        error: The exception behind it, from whose frames the accepted settings of a class are read.
        settings: The parser's own settings.

    Returns:
        One line that names the setting and the value, with near names where something is misspelt.
    """
    key = re.search(r'Parser key "([^"]+)"', message)
    setting = f"{key[1]}: " if key else ""
    unknown = re.search(r"[Oo]ption '([^']+)' is not accepted|does not accept option '([^']+)'", message)
    if unknown:
        return _explain_unknown(setting, unknown[1] or unknown[2], error)
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
    unrecognised = re.search(r"unrecognized arguments: --([\w.]+)", message)
    if unrecognised:
        return f"there is no setting {unrecognised[1]!r}{nearest(unrecognised[1], settings)}"
    value = re.search(r"Given value: (.*)", message, re.DOTALL)
    if value and "Subtypes: [" in message:
        listed = message.partition("Subtypes: [")[2].partition("]\n")[0]
        types = [_type_name(t) for t in re.findall(r"<class '[\w.]+'>|[\w.]+\[.*?\]|[\w.]+", listed)]
        return f"{setting}{_one_line(value[1])} is not valid; it takes {' or '.join(dict.fromkeys(types))}"
    return setting + _one_line(message.partition("Parser key")[2].partition(":")[2] if key else message)


def _explain_unknown(setting: str, option: str, error: BaseException | None) -> str:
    """Name the settings that do exist, read from the parser in whose frame the exception arose."""
    parsers = [frame.f_locals.get("self") for frame in _frames(error)]
    known = [
        action.dest
        for parser in parsers[-1:]
        if isinstance(parser, ArgumentParser)
        for action in parser._actions
    ]
    if "config" in known:
        return f"{setting}there is no setting {option!r}{nearest(option, known)}"
    known = [name for name in known if name not in ("help", "print_config")]
    return (
        f"{setting}there is no setting {option!r} among {', '.join(known) or 'none'}{nearest(option, known)}"
    )


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
