"""Types of optimizer settings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Function that creates an optimizer from parameters or parameter groups.

An example is ``torch.optim.SGD`` with all other arguments bound.
"""

GroupSettings = Mapping[str, Mapping[str, float]]
"""Settings of an optimizer by name of the parameter group or block.

The setting ``lr_scale`` multiplies ``lr``.
"""
