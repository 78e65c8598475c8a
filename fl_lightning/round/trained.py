"""Marks on trained models and methods. A new run refuses marked objects."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from fl_lightning.errors import ConfigurationError

MARK = "_trained_by_a_run"
"""Name of the attribute that marks a model or a method as trained. Copies keep the mark."""


def mark_trained(objects: Iterable[Any]) -> None:
    """Mark models and methods as trained."""
    for trained in objects:
        # use object.__setattr__, because nn.Module and frozen classes override __setattr__
        object.__setattr__(trained, MARK, True)


def refuse_trained(methods: Iterable[Any], model: nn.Module | None = None) -> None:
    """Check that the model and the methods are not marked as trained. Observers are not checked.

    Raises:
        ConfigurationError: The model or a method is marked as trained.
    """
    for method in methods:
        if getattr(method, MARK, False) and getattr(method, "role", "method") != "observer":
            name = type(method).__name__
            raise ConfigurationError(
                f"callbacks: {name} holds the state of an earlier run; make a new {name} for a new run"
            )
    if getattr(model, MARK, False):
        raise ConfigurationError(
            "fit: the model is trained already; make a new model and module for a new run, which may start from a "
            "checkpoint by initial_weights, or resume with fit(resume=True)"
        )
