"""Which models and methods a run of this process has trained: a new run of them would not start where it seems to."""

from typing import Any
from weakref import WeakSet

from fl_lightning.errors import ConfigurationError

TRAINED: WeakSet[Any] = WeakSet()
"""Models and methods that have finished a round."""


def refuse_trained(module: Any) -> None:
    """Refuse a method that another run has trained, whatever it keeps of that run.

    Raises:
        ConfigurationError: A run starts from round 1 with such a method.
    """
    for method in module.federated_callbacks:
        if method in TRAINED and not module.record.samples:
            name = type(method).__name__
            raise ConfigurationError(
                f"callbacks: {name} was trained already in another run; make a new {name} for a new run"
            )
