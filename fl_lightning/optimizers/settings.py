"""Types of optimizer settings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Function that creates an optimizer from parameters or parameter groups.

An example is ``functools.partial(torch.optim.SGD, lr=0.1)``.
"""

GroupSettings = Mapping[str, Mapping[str, float]]
"""Optimizer settings by the name of a parameter group, such as ``{"bias": {"lr_scale": 2.0}}``.

The setting ``lr_scale`` multiplies the learning rate.
"""
