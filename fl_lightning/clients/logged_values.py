"""Values that a LightningModule logs, reduced over steps and clients as Lightning reduces steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.clients.metrics import defined_value
from fl_lightning.errors import ConfigurationError

_JOIN: dict[str, Any] = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass(frozen=True)
class Logged:
    """A logged value.

    Attributes:
        total: For a mean, the sum of the values times their batch sizes. Otherwise the sum, largest
            or smallest value, a scalar. None if the value is a metric object.
        weight: Sum of the batch sizes.
        reduce: Name of the reduction: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
        prog_bar: Whether progress bars show the value.
        forked: Whether the value was logged both by step and by epoch.
        metric: The metric object, by its name in the module.
    """

    total: Tensor | None = None
    weight: float = 1.0
    reduce: str = "mean"
    prog_bar: bool = False
    forked: bool = False
    metric: str | None = None

    def joined(self, later: "Logged") -> "Logged":
        """Return the value of two logs of the same name."""
        if self.total is None or later.total is None:
            return later
        total = _JOIN[self.reduce](self.total, later.total.to(self.total.device))
        return replace(later, total=total, weight=self.weight + later.weight)

    def value(self, metrics: Mapping[str, Metric]) -> float:
        """Return the value as a number."""
        if self.metric is not None:
            return float(defined_value(metrics[self.metric]))
        assert self.total is not None
        return float(self.total / self.weight if self.reduce == "mean" else self.total)


class LoggedValues(dict[str, Logged]):
    """Logged values by name."""

    def add(self, name: str, logged: Logged) -> None:
        """Add a value to the earlier values of this name.

        Raises:
            ConfigurationError: The values differ in the reduction or the metric object.
        """
        earlier = self.get(name, logged)
        if (earlier.reduce, earlier.metric) != (logged.reduce, logged.metric):
            raise ConfigurationError(
                f"self.log({name!r}): logged with two reductions or metric objects; give each a name of its own"
            )
        self[name] = earlier.joined(logged) if name in self else logged

    def add_all(self, others: Mapping[str, Logged]) -> None:
        """Add the values of other steps or clients."""
        for name, logged in others.items():
            self.add(name, logged)

    def totals(self) -> dict[str, Tensor]:
        """Return the totals of all values that are not metric objects."""
        return {name: logged.total for name, logged in self.items() if logged.total is not None}

    def with_totals(self, totals: Mapping[str, Tensor]) -> "LoggedValues":
        """Return the same values with the totals of one client."""
        return LoggedValues({n: replace(x, total=totals[n]) if n in totals else x for n, x in self.items()})

    def numbers(self, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Return all values as numbers.

        A value that was logged both by step and by epoch has two names, as in Lightning.
        """
        numbers: dict[str, float] = {}
        for name, logged in self.items():
            numbers[name] = logged.value(metrics)
            if logged.forked:
                numbers[f"{name}_epoch"] = numbers[name]
        return numbers


def reduction(name: str, given: Any) -> str:
    """Return the name of a reduction that ``self.log(reduce_fx=...)`` was given.

    Raises:
        ConfigurationError: The reduction is unknown.
    """
    known = given if isinstance(given, str) else getattr(given, "__name__", "")
    known = {"amax": "max", "amin": "min"}.get(known, known)
    if known not in _JOIN:
        raise ConfigurationError(
            f"self.log({name!r}, reduce_fx={given}): use mean, sum, max or min, or log a torchmetrics object"
        )
    return known
