"""Direction of a metric: whether large or small values are best."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from fl_lightning.round.tasks import SHIPPED

_SHOWN = tuple(name for task in SHIPPED for name in task.shown)


def best_is(metric: str, known: Mapping[str, str] = MappingProxyType({})) -> Literal["max", "min"] | None:
    """Return whether large or small values of a metric are best.

    Args:
        metric: The metric's name, such as ``"val/accuracy"`` or ``"test/loss_silobn"``.
        known: Directions of the task's metrics by name, each ``"max"`` or ``"min"``.

    Returns:
        ``"min"`` for a loss, ``"max"`` for a quality such as accuracy, None for other metrics. A
        metric of personal models or of clients has the direction of the server model's metric. A
        variance has no direction.
    """
    name = re.sub("^(personal|own|client)_", "", metric.rpartition("/")[2])
    if name.endswith("_variance"):
        return None

    def is_one(of: str) -> bool:
        return name == of or name.startswith(f"{of}_")

    smallest = ("loss", *(metric for metric, best in known.items() if best == "min"))
    if name.endswith("loss") or any(map(is_one, smallest)):
        return "min"
    return "max" if any(map(is_one, (*_SHOWN, *known))) else None
