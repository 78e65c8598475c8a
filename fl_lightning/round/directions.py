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
    if metric in known:
        return "min" if known[metric] == "min" else "max"
    name = re.sub("^(personal|own|client)_", "", metric.rpartition("/")[2])
    if name.endswith("_variance"):
        return None

    directions: dict[str, Literal["max", "min"]] = {**dict.fromkeys(_SHOWN, "max"), "loss": "min"}
    directions |= {of: "min" if best == "min" else "max" for of, best in known.items()}
    # the longest name counts: error_free is not the metric error with the source free
    of = max((x for x in directions if name == x or name.startswith(f"{x}_")), key=len, default="")
    return "min" if name.endswith("loss") else directions.get(of)
