"""Detection of the user's methods that change nothing; a fit names them at its end."""

from typing import Any

import lightning as L
from torch import Tensor

from fl_lightning.batch_norm.swapping import SwappedBatchNorm
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.round.context import RunContext


def versions(run: RunContext, cohort: RoundCohort) -> tuple[float, ...]:
    """Return version counters of clients' and server tensors; in-place writes increase them."""
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
    """Return the user's methods that cannot have changed the run; the run must begin in this fit.

    Such a method has FedAvg's policy, and its hooks wrote to no tensor of the run. It overrides no
    hook in which a method may change the model, the optimizer or the evaluation.
    """
    if any(isinstance(module, SwappedBatchNorm) for module in run.model.modules()):
        return []
    names = [type(method).__name__ for method in run.federated_callbacks if _only_rounds(method)]
    return [name for name in names if name not in run.record.acting]


def _only_rounds(method: Any) -> bool:
    """Return whether a user's method can act only through its policy and the hooks of a round."""
    elsewhere = [name for name in vars(L.Callback) if name.startswith(("on_", "setup"))]
    base = next(cls for cls in type(method).__mro__ if cls.__module__.startswith("fl_lightning."))
    changed = [name for name in (*elsewhere, "configure_batch_norm") if name not in _STATE]
    return (
        not type(method).__module__.startswith("fl_lightning.")
        and base.__name__ == "FederatedCallback"
        and method.role == "method"
        and all(getattr(type(method), name, None) is getattr(base, name, None) for name in changed)
    )


_STATE = frozenset({"on_save_checkpoint", "on_load_checkpoint"})
