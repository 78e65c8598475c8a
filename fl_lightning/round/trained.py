"""Which models and methods a run of this process has trained: a new run of them would not start where it seems to."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from fl_lightning.errors import ConfigurationError

TRAINED: WeakSet[Any] = WeakSet()
"""Models and methods that have finished a round."""


def refuse_trained(methods: Iterable[Any]) -> None:
    """Refuse methods that another run has trained; observers begin anew with each run.

    Raises:
        ConfigurationError: There is such a method.
    """
    for method in methods:
        if method in TRAINED and getattr(method, "role", "method") != "observer":
            name = type(method).__name__
            raise ConfigurationError(
                f"callbacks: {name} was trained already in another run; make a new {name} for a new run"
            )
