"""Client and server optimizers, learning-rate schedules, and which optimizers are refused."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer from parameters or parameter groups: ``torch.optim.SGD`` with everything but ``params`` bound."""
