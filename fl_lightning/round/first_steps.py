"""Check that two local steps of an executor agree with plain PyTorch."""

import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection

from fl_lightning.batch_norm.freezing import freeze_statistics
from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.client_data.batches import BatchStack, copied
from fl_lightning.cohort.parts import treatments
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import ConfigurationError, doing
from fl_lightning.execution.vectorized import joint_executor
from fl_lightning.models.dropout import Dropout, dropout_keys
from fl_lightning.randomness import derive_seed, python_states, seed_global
from fl_lightning.round.context import RunContext
from fl_lightning.round.policy import resolve_policy

_MOVE = 0.1  # norm of the first local step, divided by the norm of the parameters
_TOLERANCE = 0.01  # allowed error of a tensor, relative to the change in two steps
_NOISE = 20  # additional allowed error, relative to the measured effect of rounding
_DRAWS = 8  # most measurements of this effect: in a trained model, few roundings turn a ReLU on or off


def check_first_steps(run: RunContext) -> None:
    """Compare two local steps of the first two clients with plain PyTorch.

    The executor and PyTorch use the same batches, seeds, precision and layers. The layers include
    BN layers of methods, but hooks of methods are not called. The check does not change the model.

    The optimizer is SGD with momentum and weight decay. The norm of the first step is about a tenth
    of the parameters' norm. The tolerance depends on the effect of rounding, which is measured with
    slightly changed parameters.

    Args:
        run: The run at the start of training.

    Raises:
        ConfigurationError: A tensor differs by more than rounding errors, or a client's forward
            pass has changed a tensor of the server.
    """
    plan = run.plan.usual()
    clients, steps = plan.trained(run.round)
    policy = resolve_policy(run.federated_callbacks, run.round, run.planned_rounds)
    refuse_gradient_hooks(run.model)
    with isolate_rng(), _restored(run):
        freeze_statistics(run.model, run.tracking_layers, treatments(run.model, policy))
        before, attributes = _tensors(run.model), _attributes(run)
        clients, last = clients[:2], min(steps[:2]) - 1
        cohort = RoundCohort(run.model, len(clients), parts=run.parts)
        cohort.broadcast(
            round_number=run.round,
            client_ids=clients,
            weights=torch.ones(len(clients), dtype=torch.float64, device=run.device),
            local_steps=[2] * len(clients),
            policy=policy,
            optimizer=sgd,
            seed=run.seed,
        )
        if not cohort.trained_names:
            return
        batches = [run.planned_batches(plan, clients, min(step, last)) for step in range(2)]
        if not all(size for batch in batches for size in batch.sizes()):  # Poisson samples may be empty
            return
        with _restored(run):
            rate = _by_executor(run, cohort, batches)
            _refuse_changed(run.model, before)
        for row in range(len(clients)):
            with _restored(run):
                _by_torch(run, cohort, row, batches, rate)
                torchs = _tensors(run.model)
                written = [*_differing(run, attributes, _attributes(run))]
            if row == 0:
                _note_repeated_updates(run, before, torchs, len(batches))
            if written:
                _refuse_memory(run, written, [x for batch in batches for x in batch.batches()][:2])
            noise = dict.fromkeys(torchs, 0.0)
            executors = {**cohort.params.row(row), **cohort.buffers.row(row)}
            for draw in range(_DRAWS):
                with _restored(run):
                    _change_by_rounding(run, draw)
                    _by_torch(run, cohort, row, batches, rate)
                    rounded = _tensors(run.model)
                for name, x in rounded.items():
                    if x.shape == torchs[name].shape:
                        noise[name] = max(noise[name], norm_of_difference(x, torchs[name]))
                if not (off := _too_far(run, before, torchs, executors, noise)):
                    break
            else:
                _refuse_side_effects(run, off)


def _note_repeated_updates(
    run: RunContext, before: Mapping[str, Tensor], after: Mapping[str, Tensor], steps: int
) -> None:
    """Print how often a local step updates running statistics, if a layer does so more than once."""
    counts = {
        name: int(after[counter] - before[counter]) // steps
        for name in batch_norm_layers(run.model)
        if (counter := f"{name}.num_batches_tracked") in before
    }
    most = max(counts, key=counts.__getitem__, default="")
    if counts.get(most, 0) > 1:
        times, momentum = counts[most], batch_norm_layers(run.model)[most].momentum
        words = f": a momentum of {momentum} acts as {1 - (1 - momentum) ** times:.3g}" if momentum else ""
        run.print(
            f"BN: {most!r} and {sum(x > 1 for x in counts.values()) - 1} other layers update running statistics {times} times in a local step, "
            f"as by activation checkpointing or several forward passes{words}"
        )


def sgd(parameters: Any, lr: float = 1.0) -> torch.optim.Optimizer:
    """Return the optimizer of the check."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01)


def _by_executor(run: RunContext, cohort: RoundCohort, batches: Sequence[BatchStack]) -> float:
    """Take the local steps with the run's executor, and return the learning rate."""
    part, rate = cohort.part(), 0.0
    for step, batch in enumerate(batches):
        joint = run.joint_method if step == 0 else None
        executor = run.executor if joint is None else joint_executor(joint)
        rows = part.begin_step(step)
        with doing(f"round {cohort.round}, local step {step + 1}"):
            executor.backward(run.client, part, batch.map(copied), rows)
        rate = rate or step_rate(part)
        for group in part.optimizer.param_groups:
            group["lr"] = rate
        part.take_step()
    return rate


def step_rate(cohort: RoundCohort) -> float:
    """Return the learning rate for which the norm of a step is a tenth of the parameters' norm."""
    length, slope = (
        float(get_total_norm([rows.blocks[name].double() for name in cohort.trained_blocks]))
        for rows in (cohort.params, cohort.grads)
    )
    rate = _MOVE * max(length, 1.0) / slope if slope else 0.0
    return rate if 0 < rate < float("inf") else _MOVE


def _by_torch(
    run: RunContext, cohort: RoundCohort, row: int, batches: Sequence[BatchStack], rate: float
) -> None:
    """Take a client's local steps in plain PyTorch, on the server's model itself."""
    model, client = run.model, cohort.client_ids[row]
    optimizer = sgd([model.get_parameter(name) for name in cohort.trained_names], rate)
    model.zero_grad()
    for step, batch in enumerate(batches):
        key = dropout_keys(run.seed, cohort.round, [client], step)[0]
        for layer in model.modules():
            if isinstance(layer, Dropout):
                layer.key.copy_(key)
        seed_global(derive_seed(run.seed, "model", cohort.round, client, step), run.device)
        drawn = python_states()
        with doing("plain PyTorch, in the check of the first steps"):
            run.client.losses(copied(batch.batches()[row]))[1].backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        draws = python_states() != drawn
        if draws and (executor := run.joint_method or type(run.executor).__name__) != "SequentialExecutor":
            raise ConfigurationError(
                f"model: {type(model).__name__} draws random numbers of NumPy or Python, which {executor} cannot draw per client; use "
                "SequentialExecutor, and no method that needs a joint forward pass (FedTAN)"
            )
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore a module's attributes and tensors at the end of the ``with`` block."""
    parts = list(module.modules())
    tensors = [*module.parameters(), *module.buffers()]
    values = [(x, x.data, x.detach().clone(), x.grad) for x in tensors]
    held_by_parts = [x for part in parts for x in (vars(part), *vars(part).values())]
    entries = [(x, copy(x)) for x in held_by_parts if type(x) in (dict, list, set, deque)]
    try:
        yield
    finally:
        for store, held in entries:
            store.clear()
            (store.update if isinstance(store, dict | set) else store.extend)(held)
        for tensor, place, value, gradient in values:
            place.copy_(value)
            tensor.data, tensor.grad = place, gradient


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in (*model.named_parameters(), *model.named_buffers())}


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients, which may act only on gradients that the first steps do not have."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"model: {name!r} has a gradient hook, which clients' copies of the parameter do not call; change gradients in a "
                "method's on_after_local_backward"
            )


def _refuse_memory(run: Any, written: Sequence[str], batches: Sequence[Any]) -> None:
    """Refuse attributes by which a client's batch may affect another client.

    Each of two batches is computed first, and after the other batch. Both times, attributes and loss
    must be equal. Caches pass this test, but counters and generators do not.

    Args:
        run: The run.
        written: Names of the attributes that a forward pass writes.
        batches: Two batches, if possible of two clients.
    """
    tensors = [*run.model.named_parameters(), *run.model.named_buffers()]
    left = []
    for order in (batches, batches[::-1]):
        with _restored(run):
            for batch in order:
                state = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in tensors}
                seed_global(derive_seed(run.seed, "attributes"), run.device)
                with run.client.slots.filled(state):
                    objective = run.client.losses(copied(batch))[1]
                    objective.backward()
                left.append({"": _values([objective]), **_attributes(run)})
    pairs = ((left[0], left[3]), (left[2], left[1]))
    for name in (name for pair in pairs for name in _differing(run, *pair, caches=True)):
        raise ConfigurationError(
            f"model: a forward pass of {type(run.model).__name__} writes the attribute {name or written[0]!r}, which all clients share and "
            "no checkpoint contains; keep it in a buffer (register_buffer), and draw random numbers from torch's global generator"
        )


def _attributes(run: RunContext) -> dict[str, tuple[list[Any], list[Tensor]]]:
    """Return the values in attributes of the model, the loss and the task, by name."""
    parts = {n: vars(x) for n, x in run.named_modules() if not isinstance(x, Metric | MetricCollection)}
    parts |= {"loss": {**getattr(run.loss, "__dict__", {}), "state": run.loss}, "task": vars(run.task)}
    return {
        f"{part}.{name}": _values(tree_leaves(value))
        for part, attributes in parts.items()
        for name, value in attributes.items()
        if name not in ("_parameters", "_buffers", "_modules", "_made_with") and (part or name not in parts)
    }


def _values(leaves: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Return the values that are exact, and the values that may be rounded."""
    leaves = [leaf.get_state() if isinstance(leaf, torch.Generator) else leaf for leaf in leaves]
    rounded = [leaf for leaf in leaves if isinstance(leaf, float) or _is_dense(leaf)]
    numbers = [torch.as_tensor(x, dtype=torch.float64).detach().flatten().cpu().clone() for x in rounded]
    return [_exact(leaf) for leaf in leaves if not (isinstance(leaf, float) or _is_dense(leaf))], numbers


def _exact(leaf: Any) -> Any:
    """Return the state of an object as bytes, or the type of an object that has no such form.

    Only the type counts of modules, whose tensors each client has, and of objects of the framework.
    """
    leaf = getattr(leaf, "__self__", leaf)  # of a bound method
    home = type(leaf).__module__.partition(".")[0]
    if isinstance(leaf, nn.Module) or home in ("fl_lightning", "lightning", "torch", "torchmetrics"):
        return type(leaf)
    try:
        return pickle.dumps(leaf)
    except Exception:  # noqa: BLE001  # pickle calls the object's own code
        return type(leaf)


def _is_dense(leaf: Any) -> bool:
    # a failed run may have left a tensor of vmap, which cannot be read
    if not isinstance(leaf, Tensor) or is_batchedtensor(leaf):
        return False
    return leaf.layout == torch.strided and leaf.device.type != "meta" and not leaf.is_complex()


def _differing(
    run: RunContext, first: Mapping[str, Any], second: Mapping[str, Any], *, caches: bool = False
) -> Iterator[str]:
    """Yield the names of the attributes that differ. A GPU may round differently in each pass.

    Args:
        run: The run.
        first: Values by name.
        second: Values by name.
        caches: Whether to leave out attributes with another number or shape of tensors. Caches of
            masks and positions grow with the lengths of batches.
    """
    allowed = 1e-6 if run.device.type == "cpu" else 100 * relative_rounding(run)
    for name in {**first, **second}:
        (exact, one), (others, other) = (x.get(name, ([], [])) for x in (first, second))
        alike = [x.shape for x in one] == [x.shape for x in other]
        far = alike and any(
            norm_of_difference(x, y) > allowed * float(y.nan_to_num().norm())
            for x, y in zip(one, other, strict=True)
        )
        if exact != others or far or not (alike or caches):
            yield name


def _refuse_changed(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    for name, now in _tensors(model).items():
        if now.shape != before[name].shape or norm_of_difference(now, before[name]):
            raise ConfigurationError(
                f"model: a client's forward pass changes {name!r} of the server's model, as a parameter without gradient is shared; "
                "make it a buffer (register_buffer), which every client has a copy of"
            )


def _change_by_rounding(run: RunContext, draw: int) -> None:
    """Change all parameters randomly, by about twice the rounding error of one operation.

    Further draws change them by five times as much, as sums of many values are rounded.
    """
    seed_global(derive_seed(run.seed, "rounding", draw), run.device)
    size = (10 if draw else 2) * relative_rounding(run)
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + size * torch.randn_like(parameter))


def _too_far(
    run: RunContext,
    before: Mapping[str, Tensor],
    torchs: Mapping[str, Tensor],
    executors: Mapping[str, Tensor],
    noise: Mapping[str, float],
) -> dict[str, float]:
    """Return the distances of tensors that differ by more than rounding, relative to their change."""
    error = relative_rounding(run)
    # a forward pass may have replaced a buffer by a single number
    fits = [
        name for name, x in executors.items() if torchs[name].numel() == 1 or torchs[name].shape == x.shape
    ]
    moved = {name: norm_of_difference(torchs[name], before[name]) for name in fits}
    parameters = {name for name, _ in run.model.named_parameters()}
    most = dict.fromkeys((True, False), 0.0)
    for name, length in moved.items():
        if executors[name].is_floating_point() and length < float("inf"):
            most[name in parameters] = max(most[name in parameters], length)
    off = {}
    for name, value in executors.items():
        if name not in moved:
            off[name] = float("inf")
            continue
        # tolerance for tensors that change only by rounding, such as a bias before BN
        floor = max(1e-4 if name in parameters else 1e-5, 10 * error) * most[name in parameters]
        size = float(value.double().nan_to_num(posinf=0.0, neginf=0.0).norm())
        far = norm_of_difference(torchs[name], value)
        least = max(_TOLERANCE, 20 * error) * moved[name] + floor + 10 * error * size
        if far > least + _NOISE * noise.get(name, 0.0):
            off[name] = far / moved[name] if moved[name] else float("inf")
    return off


def _refuse_side_effects(run: RunContext, off: Mapping[str, float]) -> None:
    name, executor = max(off, key=lambda tensor: off[tensor]), type(run.executor).__name__
    share = f" by {off[name]:.0%} of its change" if off[name] < float("inf") else ""
    remedy = "keep what a forward pass changes in buffers, and change them in place"
    if executor != "SequentialExecutor":
        remedy = "use SequentialExecutor"
    elif run.executor.compilation.compiled:
        remedy = "set compile: false"
    raise ConfigurationError(
        f"model: after two local steps {name!r} differs from plain PyTorch{share} under {executor}, as the forward pass of "
        f"{type(run.model).__name__} has side effects: {remedy} (model.check_first_steps: false trains without this check)"
    )


def relative_rounding(run: RunContext) -> float:
    """Return the relative rounding error of one operation in the run's precision."""
    precision = str(run.trainer.precision)
    if "bf16" in precision:
        return 2.0**-8
    if precision.startswith("16") or (run.tf32 and run.device.type == "cuda"):
        return 2.0**-11
    return float(torch.finfo(next(run.model.parameters()).dtype).eps)


def norm_of_difference(first: Tensor, second: Tensor) -> float:
    """Return the norm of the difference between two tensors.

    Elements that are NaN in both tensors add 0. NaN in only one tensor makes the norm infinite.
    """
    first, second = first.double(), second.double()
    same = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(same, 0.0, first - second).norm().nan_to_num(nan=float("inf")))
