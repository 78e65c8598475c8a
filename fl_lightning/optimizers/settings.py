"""Types of optimizer settings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Function of parameters or groups, such as ``torch.optim.SGD`` with all arguments but ``params`` bound."""

GroupSettings = Mapping[str, Mapping[str, float]]
"""Settings of an optimizer by the name of a parameter group (or block); ``lr_scale`` multiplies ``lr``."""
