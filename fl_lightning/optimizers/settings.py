"""The forms of optimizers in settings: functions that make them, and settings by parameter group."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer from parameters or parameter groups: ``torch.optim.SGD`` with everything but ``params`` bound."""

GroupSettings = Mapping[str, Mapping[str, float]]
"""Settings of an optimizer that differ by parameter group (or block), by its name; ``lr_scale`` multiplies ``lr``."""
