"""Marks on models and methods that a run has trained: a new run of them would start from trained state."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from fl_lightning.errors import ConfigurationError

MARK = "_trained_by_a_run"
"""The attribute of a model or method that a run has begun to change; a copy has it too."""


def mark_trained(things: Iterable[Any]) -> None:
    """Mark models and methods as trained."""
    for thing in things:
        object.__setattr__(thing, MARK, True)  # bypass nn.Module and frozen classes


def refuse_trained(methods: Iterable[Any], model: nn.Module | None = None) -> None:
    """Refuse methods, and a model, that another run has trained; observers begin anew with each run.

    Raises:
        ConfigurationError: There is such a method or model.
    """
    for method in methods:
        if getattr(method, MARK, False) and getattr(method, "role", "method") != "observer":
            name = type(method).__name__
            raise ConfigurationError(
                f"callbacks: {name} was trained already in another run; make a new {name} for a new run"
            )
    if getattr(model, MARK, False):
        raise ConfigurationError(
            "fit: the model is trained already; make a new model and module for a new run, which may start from a "
            "checkpoint by initial_weights, or resume with fit(resume=True)"
        )
