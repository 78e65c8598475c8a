"""Updates that are not finite: whose they are, and what becomes of the round."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation.base import RobustAggregator
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import ConfigurationError, Diverged
from fl_lightning.round.reports import robust_rules, too_few


def leave_out(module: Any, cohort: RoundCohort) -> RoundCohort:
    """The cohort without the clients whose update is not finite, where ``on_divergence`` is ``drop``.

    Raises:
        RoundSkipped: Too few are left.
    """
    failed = not_finite(cohort) if module.on_divergence == "drop" else {}
    if not failed:
        return cohort
    _note(module, cohort, failed, "it is left out of this round and of others like it")
    kept = [row for row in range(len(cohort)) if row not in failed]
    if len(kept) < (1 if module.centralised else module.plan.min_clients):
        raise too_few(module, len(kept), len(module.plan.trained(cohort.round)[0]) - len(kept))
    weights = module.plan.weights([cohort.client_ids[row] for row in kept], cohort.round).to(module.device)
    return cohort.subset(kept, None if module.weighting == "samples" else weights)


def check_updates(module: Any, cohort: RoundCohort) -> RoundCohort:
    """What the clients send, before it is aggregated: what ``on_divergence`` says of an update that is not finite.

    A robust rule goes on with it whatever that says; then :func:`check_aggregate` has a look at what it makes of it.

    Returns:
        The clients that are aggregated.

    Raises:
        Diverged: A client's update is not finite.
        ConfigurationError: It is not, since the client's data are not.
        RoundSkipped: Too few are left.
    """
    failed = not_finite(cohort)
    if not failed:
        return cohort
    if _withstood(module, cohort):
        _note(module, cohort, failed, f"{robust_rules(module)} goes on with it")
    elif module.on_divergence == "drop":
        return leave_out(module, cohort)
    else:
        module.record.diverge(cohort.round)
        if module.on_divergence == "error":
            row, layer = next(iter(failed.items()))
            raise _error(module, cohort, row, layer)
        _note(module, cohort, failed, "the run goes on, flagged as diverged")
    module.log_numbers({"clients/not_finite": float(len(failed))})
    return cohort


def check_aggregate(module: Any, cohort: RoundCohort) -> None:
    """Refuse, or record, what a robust rule has made of the clients if it is not finite.

    Raises:
        Diverged: It is not, and ``on_divergence`` does not say ``record``.
    """
    rules = robust_rules(module)
    if not rules:
        return
    parameters = {n: p if p.grad is None else p.grad for n, p in cohort.server_parameters.items()}
    layer = _first_layer({**parameters, **{n: cohort.server_buffers[n] for n in _statistics(cohort)}})
    if layer is None:
        return
    module.record.diverge(cohort.round)
    if module.on_divergence != "record":
        clients = ", ".join(str(cohort.client_ids[row]) for row in not_finite(cohort)) or "none"
        raise Diverged(
            f"round {cohort.round}: what {rules} makes of the clients is not finite, first in layer {layer!r} (clients whose update is "
            f"not finite: {clients}); raise {rules}'s f, lower client_optimizer lr, or set model.on_divergence: drop"
        )


def not_finite(cohort: RoundCohort) -> dict[int, str]:
    """The rows whose parameters or BN statistics are not all finite, with the model's first layer where they are not.

    A model's other buffers are not looked at: an attention mask, say, may well hold infinities.
    """
    kinds = {name: block.kind for name, block in cohort.buffers.layout.items()}
    statistics = [block for name, block in cohort.buffers.blocks.items() if kinds[name] in ("mean", "var")]
    blocks = [*cohort.params.blocks.values(), *statistics]
    # a finite sum has finite terms
    if bool(torch.stack([block.sum() for block in blocks]).sum().isfinite()):
        return {}
    finite = torch.stack([block.isfinite().all(1) for block in blocks]).all(0).tolist()
    found = {}
    for row in (row for row, fine in enumerate(finite) if not fine):
        parameters = {name: cohort.params[name][row] for name in cohort.server_parameters}
        layer = _first_layer({**parameters, **{n: cohort.buffers[n][row] for n in _statistics(cohort)}})
        assert layer is not None
        found[row] = layer
    return found


def _withstood(module: Any, cohort: RoundCohort) -> bool:
    """Whether robust rules combine all that is not finite."""
    parameters = isinstance(module.aggregator, RobustAggregator)
    if not parameters and not all(bool(block.isfinite().all()) for block in cohort.params.blocks.values()):
        return False
    statistics = (cohort.buffers[name] for name in _statistics(cohort))
    return module.statistics.is_robust or all(bool(rows.isfinite().all()) for rows in statistics)


def _statistics(cohort: RoundCohort) -> list[str]:
    return [name for name, kind in cohort.buffer_kinds.items() if kind in ("mean", "var")]


def _first_layer(tensors: Mapping[str, Tensor]) -> str | None:
    """The layer of the first tensor that is not finite, None where all are."""
    return next((n.rpartition(".")[0] for n, value in tensors.items() if not value.isfinite().all()), None)


def _note(module: Any, cohort: RoundCohort, failed: Mapping[int, str], consequence: str) -> None:
    """Count clients whose update is not finite, and name each of them the first time."""
    for row, layer in failed.items():
        client, counted = cohort.client_ids[row], module.record.not_finite
        if client not in counted:
            module.print(
                f"round {cohort.round}: the update of client {client} is not finite, first in layer {layer!r}; {consequence} "
                f"(model.on_divergence: {module.on_divergence})"
            )
        counted[client] = counted.get(client, 0) + 1


def _error(module: Any, cohort: RoundCohort, row: int, layer: str) -> ConfigurationError:
    client = cohort.client_ids[row]
    for step in range(cohort.local_steps[row]):
        if not module.client_batches(cohort, [row], step).is_finite():
            return ConfigurationError(
                f"round {cohort.round}: the update of client {client} is not finite, since its data are not: its batch of "
                f"local step {step + 1} has NaN or infinity; mend the data of client {client}"
            )
    return Diverged(
        f"round {cohort.round}: the update of client {client} is not finite, first in layer {layer!r}; lower client_optimizer lr (now "
        f"{cohort.optimizer.param_groups[0]['lr']:g}), or set model.on_divergence: drop to go on without such updates, or record "
        "to go on with them"
    )
