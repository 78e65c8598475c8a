"""Checks that a run logs the metrics that its task and its callbacks need."""

from collections.abc import Mapping

import lightning as L
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
)

from fl_lightning.errors import ConfigurationError
from fl_lightning.round.declarations import Declarations
from fl_lightning.round.tasks import Task

_ROUND = ("client/", "clients/", "comm/", "server/", "statistics/", "time/")
"""Prefixes of metrics that every run may log in a round, apart from ``train/loss``."""

_COUNTERS = ("epoch", "step")
"""Counters that ``ModelCheckpoint`` can monitor like metrics."""


def check_monitors(
    trainer: L.Trainer, module: L.LightningModule, row: Mapping[str, float], split: str
) -> None:
    """Check before round 1 that the run can log the metrics that callbacks monitor.

    The metrics of evaluations are known from the evaluation before round 1. The metrics of rounds
    are known from the callbacks' ``logs``. A user-defined module or callback may log any metric. In
    this case, the check is skipped.

    Args:
        trainer: The trainer with its callbacks.
        module: The module.
        row: The metrics of the evaluation before round 1; may be empty.
        split: Name of the evaluation data in ``fit``, ``"val"`` or ``"test"``.

    Raises:
        ConfigurationError: A callback monitors a metric that the run does not log.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # the trainer's helpers set it
    if not all(map(_is_known, (module, *callbacks))):
        return
    methods = [callback for callback in callbacks if isinstance(callback, Declarations)]
    evaluated = [name for name in row if name.startswith(f"{split}/")]
    names = ["train/loss", *evaluated]
    starts = {*_ROUND, *(start for method in methods for start in method.logs)}
    starts |= set() if evaluated else {f"{split}/"}
    # metrics of model variants, such as val/loss_silobn, do not exist before round 1
    variants = [f"{name}_" for name in evaluated if methods]
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        asks = isinstance(callback, Checkpoint) or (isinstance(callback, EarlyStopping) and callback.strict)
        if not asks or monitor is None or monitor in (*names, *_COUNTERS):
            continue
        if not monitor.startswith((*starts, *variants)):
            logged = ", ".join([*names, *(f"{start}..." for start in sorted(starts))])
            owner = type(callback).__name__.replace("RoundCheckpoint", "checkpoint")
            raise ConfigurationError(
                f"{owner}.monitor: nothing in this run logs {monitor!r}; logged are: {logged}"
            )


def check_quality(task: Task, row: Mapping[str, float], split: str) -> None:
    """Check that the first evaluation has measured the main metric of a user-defined task.

    Raises:
        ConfigurationError: The task's ``quality`` is not a metric of the run.
    """
    evaluated = [name.partition("/")[2] for name in row if name.startswith(f"{split}/")]
    if evaluated and task.quality not in evaluated and not type(task).__module__.startswith("fl_lightning."):
        raise ConfigurationError(
            f"model.task: the quality {task.quality!r} of {type(task).__name__} is no metric of this run; add it to "
            f"model.metrics, or set quality to one of {', '.join(evaluated)}"
        )


def _is_known(thing: object) -> bool:
    """Return whether an object logs only known metrics. User-defined objects may log any metric."""
    if isinstance(thing, LambdaCallback | LearningRateMonitor):
        return False
    return type(thing).__module__.partition(".")[0] in ("fl_lightning", "lightning")
