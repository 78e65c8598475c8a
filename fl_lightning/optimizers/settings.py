"""Types of optimizer settings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Function that creates an optimizer from parameters or parameter groups.

An example is ``torch.optim.SGD``, with fixed values for all other arguments.
"""

GroupSettings = Mapping[str, Mapping[str, float]]
"""Settings of an optimizer for each parameter group or block. The keys are their names.

The setting ``lr_scale`` is a factor for ``lr``.
"""
