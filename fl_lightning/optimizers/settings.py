"""Types of optimizer settings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Function of parameters or groups, such as ``torch.optim.SGD`` with all other arguments bound."""

GroupSettings = Mapping[str, Mapping[str, float]]
"""Settings of an optimizer by parameter group (or block) name; ``lr_scale`` multiplies ``lr``."""
