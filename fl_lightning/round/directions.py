"""Which values of a metric are best."""

from typing import Literal

from fl_lightning.round.tasks import SHIPPED

_SHOWN = tuple(name for task in SHIPPED for name in task.shown)


def best_is(metric: str, quality: str = "") -> Literal["max", "min"] | None:
    """Say whether the largest or the smallest value of a metric is best.

    Args:
        metric: The metric's name, such as ``"val/accuracy"``, or ``"test/loss_silobn"`` of a variant of the server.
        quality: A further quality: that of the run's task.

    Returns:
        ``"min"`` for a loss, ``"max"`` for a quality, None for a metric that is neither.
    """
    name = metric.rpartition("/")[2]

    def is_one(known: str) -> bool:
        return bool(known) and (name == known or name.startswith(f"{known}_"))

    if name.endswith("loss") or is_one("loss"):
        return "min"
    return "max" if any(map(is_one, (*_SHOWN, quality))) else None
