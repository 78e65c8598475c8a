"""Check that an executor computes what the clients' own copies of a LightningModule compute."""

from collections.abc import Mapping, Sequence
from copy import copy
from math import isfinite
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fl_lightning.batch_norm.freezing import freeze_statistics
from fl_lightning.client_data.batches import BatchStack, copied
from fl_lightning.cohort.parts import treatments
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import ConfigurationError, doing
from fl_lightning.execution.base import Executor
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor, joint_executor
from fl_lightning.optimizers.settings import GroupSettings, OptimizerCallable
from fl_lightning.round.context import RunContext
from fl_lightning.round.first_steps import (
    norm_of_difference,
    refuse_gradient_hooks,
    relative_rounding,
    sgd,
    step_rate,
)
from fl_lightning.round.policy import resolve_policy

_STEPS = 2
_OPTIMIZER_STEPS = 10
_MOST = 300_000_000  # largest number of parameters that are copied in float64
_EXACT, _ROUNDED = 1e-7, 0.02
"""Accepted differences of float64 and of the run's precision, relative to a tensor's change."""


class _Found(NamedTuple):
    """A result of the steps.

    Attributes:
        kind: The kind of result: ``"gradient"``, ``"parameter"``, ``"buffer"`` or ``"value"``.
        value: The result of all clients.
        change: Norm of the change in the steps.
    """

    kind: str
    value: Tensor
    change: float


def compare_with_copies(run: RunContext) -> None:
    """Compare two local steps of the first two clients with the steps of the clients' own copies.

    The executor and the copies use the same batches, seeds and layers, in float64 if the module
    allows it, else in the run's precision. The optimizer is that of
    :func:`~fl_lightning.round.first_steps.check_first_steps`. The clients' stacked optimizer is
    compared with the copies' own on random gradients. The check changes neither model nor attributes.

    Args:
        run: The run at the start of training.

    Raises:
        ConfigurationError: A tensor or a logged value differs by more than rounding errors, or the
            steps change something that the clients would share.
    """
    plan = run.plan.usual()
    clients, steps = plan.trained(run.round)
    clients, last = clients[:2], min(steps[:2]) - 1
    refuse_gradient_hooks(run.model)
    with isolate_rng():
        batches = [run.planned_batches(plan, clients, min(step, last)) for step in range(_STEPS)]
        alone = SequentialExecutor()
        large = sum(parameter.numel() for parameter in run.model.parameters()) > _MOST
        # compiled code of float64 is other code
        dtype = None if large or run.executor.compilation.compiled else torch.float64
        try:
            expected = _two_steps(run, [alone] * _STEPS, clients, batches, dtype)
        except Exception:
            if dtype is None:
                raise
            dtype = None
            expected = _two_steps(run, [alone] * _STEPS, clients, batches, dtype)
        executor = copy(run.executor)
        if run.chooses_executor and isinstance(executor, VectorizedExecutor):
            executor.where_possible = False  # else copies, in all steps
        first = joint_executor(run.joint_method) if run.joint_method else executor
        try:
            found = _two_steps(run, [first, *[executor] * (_STEPS - 1)], clients, batches, dtype)
        except ConfigurationError:
            raise
        except Exception as error:  # copies could compute the same steps
            name = run.joint_method or type(run.executor).__name__
            raise ConfigurationError(
                f"model: {name} cannot compute a step of {type(run.model).__name__} for several clients at once ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0].rstrip('.')}); use SequentialExecutor"
            ) from error
        _compare(run, expected, found, dtype, "a step reads or changes more than tensors of the client")
        if type(run.executor) is not SequentialExecutor:
            expected, found = (_optimizer_steps(run, clients, dtype, alone=alone) for alone in (True, False))
            _compare(run, expected, found, dtype, "its optimizer has code or settings of its own")


def _two_steps(
    run: RunContext,
    executors: Sequence[Executor],
    clients: Sequence[int],
    batches: Sequence[BatchStack],
    dtype: torch.dtype | None,
) -> dict[str, _Found]:
    """Return gradients, losses, tensors and logged values of the clients' local steps."""
    client = run.client
    found: dict[str, _Found] = {}
    with client.trying(dtype):
        cohort = _cohort(run, clients, {}, None, sgd)
        alone = type(executors[-1]) is SequentialExecutor
        client.enter(cohort, alone=alone, optimizer=sgd)
        part, before, rate = cohort.part(), _tensors(cohort), 0.0
        for step, (executor, batch) in enumerate(zip(executors, batches, strict=True)):
            client.at_step(step)
            rows = part.begin_step(step)
            with doing(f"round {run.round}, local step {step + 1}"):
                losses = executor.backward(client, part, batch.map(lambda x: _as(dtype, copied(x))), rows)
            client.refuse_traces()
            found |= _values({f"the loss of local step {step + 1}": losses})
            found |= {
                f"the gradient of {name!r} in local step {step + 1}": _Found(
                    "gradient", x.clone(), float(x.norm())
                )
                for name, x in part.grads.items()
                if name in part.trained_names
            }
            rate = rate or step_rate(part)
            for settings in part.optimizer_groups.values():
                settings["lr"] = rate
            part.take_step()
            client.end_steps(part)
        for number, told in client.logged_by_clients().items():
            logged = told.values.totals().items()
            found |= _values({f"the logged {name!r} of {run.named(number)}": value for name, value in logged})
        return found | _changes(before, _tensors(cohort))


def _optimizer_steps(
    run: RunContext, clients: Sequence[int], dtype: torch.dtype | None, *, alone: bool
) -> dict[str, _Found]:
    """Return the tensors after steps of the client optimizer on random gradients."""
    client = run.client
    with client.trying(dtype):
        cohort = _cohort(run, clients, client.parameter_groups, client.group_of, client.optimizer)
        client.enter(cohort, alone=alone)
        part, before = cohort.part(), _tensors(cohort)
        for settings in part.optimizer_groups.values():
            if settings.get("lr") == 0:  # a schedule may start from 0
                settings["lr"] = 0.1
        torch.manual_seed(0)
        for step in range(_OPTIMIZER_STEPS):
            part.begin_step(step)
            for block in part.trained_blocks:
                part.grads.blocks[block].normal_()
            part.take_step()
        return _changes(before, _tensors(cohort))


def _cohort(
    run: RunContext,
    clients: Sequence[int],
    settings: GroupSettings,
    groups: Mapping[str, str] | None,
    optimizer: OptimizerCallable,
) -> RoundCohort:
    """Return the clients after a broadcast of the model that stands for the server's."""
    names = {layer: name for name, layer in run.model.named_modules()}
    model = run.client.model
    policy = resolve_policy(run.federated_callbacks, run.round, run.planned_rounds)
    layers = [model.get_submodule(names[layer]) for layer in run.tracking_layers]
    freeze_statistics(model, layers, treatments(model, policy))
    cohort = RoundCohort(model, len(clients), settings, parts=run.parts, groups=groups)
    cohort.broadcast(
        round_number=run.round,
        client_ids=clients,
        weights=torch.ones(len(clients), dtype=torch.float64, device=run.device),
        local_steps=[_OPTIMIZER_STEPS] * len(clients),
        policy=policy,
        optimizer=optimizer,
        seed=run.seed,
    )
    return cohort


def _as(dtype: torch.dtype | None, batch: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(dtype) if dtype and x.is_floating_point() else x, batch)


def _tensors(cohort: RoundCohort) -> dict[str, tuple[str, Tensor]]:
    kinds = {"parameter": cohort.params, "buffer": cohort.buffers}
    return {name: (kind, x.clone()) for kind, rows in kinds.items() for name, x in rows.items()}


def _changes(
    before: Mapping[str, tuple[str, Tensor]], after: Mapping[str, tuple[str, Tensor]]
) -> dict[str, _Found]:
    return {repr(n): _Found(kind, x, norm_of_difference(x, before[n][1])) for n, (kind, x) in after.items()}


def _values(values: Mapping[str, Tensor]) -> dict[str, _Found]:
    return {name: _Found("value", x.clone(), float(x.double().norm())) for name, x in values.items()}


def _compare(
    run: RunContext,
    expected: Mapping[str, _Found],
    found: Mapping[str, _Found],
    dtype: torch.dtype | None,
    reason: str,
) -> None:
    """Refuse results that differ by more than rounding.

    Raises:
        ConfigurationError: A result differs.
    """
    error = relative_rounding(run) if dtype is None else torch.finfo(dtype).eps
    allowed = _EXACT if dtype else max(_ROUNDED, 20 * error)
    most: dict[str, float] = {}
    for kind, _, change in expected.values():
        most[kind] = max(most.get(kind, 0.0), change) if change < float("inf") else most.get(kind, 0.0)
    for name, (kind, value, change) in expected.items():
        size = float(value.double().nan_to_num(posinf=0.0, neginf=0.0).norm())
        off = norm_of_difference(value, found[name].value) if name in found else float("inf")
        # tensors that change only by rounding, such as a bias before BN, need the second and third term
        if off > allowed * (change + most[kind] / 100) + 10 * error * size:
            at_once = run.joint_method or type(run.executor).__name__
            share = f" by {off / change:.2g} of its change" if change and isfinite(off / change) else ""
            remedy = "use SequentialExecutor" if run.joint_method is None else f"leave out {run.joint_method}"
            if run.executor.compilation.compiled:
                remedy = "set compile: false"
            raise ConfigurationError(
                f"model: {name} differs{share} between {at_once} and a client's own copy of {type(run.model).__name__}, as {reason}; {remedy} "
                "(model.check_first_steps: false trains without this check)"
            )
