"""Types of optimizer settings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Function that creates an optimizer from parameters or parameter groups.

An example is ``torch.optim.SGD`` with fixed values of all other arguments.
"""

GroupSettings = Mapping[str, Mapping[str, float]]
"""Settings of an optimizer, with names of parameter groups or blocks as keys.

The setting ``lr_scale`` multiplies ``lr``.
"""
