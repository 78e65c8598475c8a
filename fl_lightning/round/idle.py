"""Detection of user-defined methods that had no effect on a run."""

from functools import cache
from typing import Any

import lightning as L
from torch import Tensor

from fl_lightning.batch_norm.swapping import SwappedBatchNorm
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.round.context import RunContext
from fl_lightning.round.declarations import Declarations


def is_watched(run: RunContext, method: Declarations) -> bool:
    """Return whether a user-defined method has had no effect so far.

    The result is False for a method that can act outside of rounds.
    """
    kind: Any = type(method)
    return kind.__name__ not in run.record.acting and _only_rounds(kind)


def versions(run: RunContext, cohort: RoundCohort) -> tuple[float, ...]:
    """Return numbers that change if a hook changes a tensor or a learning rate of the run.

    PyTorch increases the version counter of a tensor at each in-place change.
    """
    rows = (cohort.params, cohort.grads, cohort.buffers)
    blocks = [block for state in rows for block in state.blocks.values()]
    kept = [x for state in cohort.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    parameters = [*run.model.parameters()]
    gradients = [x.grad for x in parameters if x.grad is not None]
    tensors = (*blocks, *kept, *parameters, *gradients, *run.model.buffers(), cohort.weights)
    optimizers = (cohort.optimizer, *run.trainer.optimizers)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    return (*(x._version for x in tensors), id(cohort.weights), *rates)


def idle_methods(run: RunContext) -> list[str]:
    """Return the names of user-defined methods that seem to have had no effect on the run.

    These methods declared no treatment, and their hooks changed no tensor and no learning rate. The
    result is valid only for a run that was not resumed.
    """
    if any(isinstance(module, SwappedBatchNorm) for module in run.model.modules()):
        return []
    return [type(method).__name__ for method in run.federated_callbacks if is_watched(run, method)]


@cache
def _only_rounds(kind: Any) -> bool:
    """Return whether a user-defined method overrides only ``policy`` and hooks of rounds."""
    base = next(cls for cls in kind.__mro__ if cls.__module__.startswith("fl_lightning."))
    state = ("on_save_checkpoint", "on_load_checkpoint")
    hooks = [name for name in vars(L.Callback) if name.startswith(("on_", "setup")) and name not in state]
    elsewhere = [*hooks, "extend_model", "configure_batch_norm"]
    return (
        base.__name__ == "FederatedCallback"
        and kind is not base
        and kind.role == "method"
        and all(getattr(kind, name) is getattr(base, name) for name in elsewhere)
    )
