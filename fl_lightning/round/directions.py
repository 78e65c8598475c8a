"""Which values of a metric are best."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from fl_lightning.round.tasks import SHIPPED

_SHOWN = tuple(name for task in SHIPPED for name in task.shown)


def best_is(metric: str, known: Mapping[str, str] = MappingProxyType({})) -> Literal["max", "min"] | None:
    """Say whether the largest or the smallest value of a metric is best.

    Args:
        metric: The metric's name, such as ``"val/accuracy"``, or ``"test/loss_silobn"`` of a variant of the server.
        known: ``"max"`` or ``"min"`` of the metrics of the run's task by name.

    Returns:
        ``"min"`` for a loss, ``"max"`` for a quality, None for a metric that is neither.
    """
    name = metric.rpartition("/")[2]

    def is_one(known: str) -> bool:
        return bool(known) and (name == known or name.startswith(f"{known}_"))

    if name.endswith("loss") or is_one("loss") or any(map(is_one, (x for x in known if known[x] == "min"))):
        return "min"
    return "max" if any(map(is_one, (*_SHOWN, *known))) else None
