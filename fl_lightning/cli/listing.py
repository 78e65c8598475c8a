"""``python -m fl_lightning list``: names that a configuration can use, with a line about each."""

import re
from collections.abc import Sequence
from inspect import isabstract, isfunction
from typing import get_type_hints

from fl_lightning import aggregation, attacks, callbacks, datamodules, models
from fl_lightning.cli.messages import base_classes, command, kinds_of_settings
from fl_lightning.console import print_table
from fl_lightning.errors import check_choice
from fl_lightning.models.norm import NORMS

KINDS = {
    "methods": "trainer.callbacks",
    "models": "model.model",
    "data": "data",
    "partitions": "data.partition",
    "norms": "model.model.norm",
    "aggregators": "model.aggregator",
    "attacks": "trainer.callbacks.attack",
}
"""Kinds of names, each with the setting that takes it."""


@command()
def main(args: Sequence[str]) -> None:
    """Print the names of some kinds, each with the first line of its docstring.

    Args:
        args: Arguments after ``list``: kinds; empty for all kinds.
    """
    for kind in args:
        check_choice("list", kind, KINDS)
    for kind in args or KINDS:
        print_table(f"{kind.capitalize()} ({KINDS[kind]})", named(kind))


def named(kind: str) -> dict[str, str]:
    """Return the names of a kind, each with the first line of its docstring.

    Args:
        kind: Key of :data:`KINDS`.
    """
    if kind == "norms":
        return dict(NORMS)
    modules = {"methods": callbacks, "models": models, "aggregators": aggregation, "attacks": attacks}
    module, base = modules.get(kind, datamodules), kinds_of_settings()[KINDS[kind].rpartition(".")[2]]
    lines = {}
    for name in sorted(module.__all__, key=str.lower):
        thing = getattr(module, name)
        made = get_type_hints(thing).get("return") if isfunction(thing) else thing
        is_base = thing in base_classes() or isabstract(thing)
        if isinstance(made, type) and issubclass(made, base) and not is_base:
            name = f"{module.__name__}.{name}" if isfunction(thing) else name  # the name on the command line
            line = (thing.__doc__ or "").partition("\n")[0]
            lines[name] = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", line).replace("``", "")
    return lines
