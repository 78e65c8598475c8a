"""Handling of non-finite updates, and of rounds with too few clients to aggregate."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.aggregation import RobustAggregator
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import ConfigurationError, Diverged
from fl_lightning.round.context import RunContext


class RoundSkipped(Exception):
    """Exception that ends a round with too few clients. The run continues with the next round.

    Args:
        reason: One line with the round, the number of clients and the required number.
        dropped: Number of clients that were left out because of a non-finite update.
    """

    def __init__(self, reason: str, dropped: int = 0) -> None:
        super().__init__(reason)
        self.dropped = dropped


def survivors(run: RunContext, cohort: RoundCohort) -> RoundCohort:
    """Return the clients to aggregate.

    If ``on_divergence`` is ``drop``, clients with a non-finite update are left out.

    Raises:
        RoundSkipped: Too few clients remain.
    """
    return _without(run, cohort, not_finite(cohort)) if run.on_divergence == "drop" else cohort


def check_updates(run: RunContext, cohort: RoundCohort) -> tuple[RoundCohort, dict[int, str]]:
    """Apply ``on_divergence`` to the clients' updates before aggregation.

    Robust rules aggregate non-finite updates in any case. For robust rules, :func:`check_aggregate`
    checks the aggregate.

    Returns:
        The clients to aggregate, and a dict. For each row with a non-finite update, the dict
        contains the name of the first non-finite layer.

    Raises:
        Diverged: A client's update is not finite.
        ConfigurationError: A client's update is not finite because its data are not finite.
        RoundSkipped: Too few clients remain.
    """
    failed = not_finite(cohort)
    if not failed:
        return cohort, {}
    if _withstood(run, cohort):
        _note(run, cohort, failed, f"{robust_rules(run)} aggregates it")
    elif run.on_divergence == "drop":
        return _without(run, cohort, failed), {}
    else:
        run.record.diverge(cohort.round)
        if run.on_divergence == "error":
            row, layer = next(iter(failed.items()))
            raise _error(run, cohort, row, layer)
        _note(run, cohort, failed, "the run continues, flagged as diverged")
    run.log_numbers({"clients/not_finite": float(len(failed))})
    return cohort, failed


def check_aggregate(run: RunContext, cohort: RoundCohort, failed: Mapping[int, str]) -> None:
    """Check that the aggregate of a robust rule is finite.

    Args:
        run: The run.
        cohort: The clients that were aggregated.
        failed: The dict of non-finite updates from :func:`check_updates`.

    Raises:
        Diverged: The aggregate is not finite, and ``on_divergence`` is not ``record``.
    """
    rules = robust_rules(run)
    if not rules:
        return
    parameters = {n: p if p.grad is None else p.grad for n, p in cohort.server_parameters.items()}
    layer = _first_layer({**parameters, **{n: cohort.server_buffers[n] for n in _statistics(cohort)}})
    if layer is None:
        return
    run.record.diverge(cohort.round)
    if run.on_divergence != "record":
        clients = ", ".join(str(cohort.client_ids[row]) for row in failed) or "none"
        raise Diverged(
            f"round {cohort.round}: the aggregate of {rules} is not finite, first in layer {layer!r} (clients whose update is "
            f"not finite: {clients}); raise {rules}'s f, lower client_optimizer lr, or set model.on_divergence: drop"
        )


def too_few(run: RunContext, reported: int, dropped: int = 0) -> RoundSkipped:
    """Return the exception that ends a round with too few clients.

    Args:
        run: The run.
        reported: Number of clients that can be aggregated.
        dropped: Number of clients that were left out because of a non-finite update.
    """
    plan = run.plan
    by_user = plan.min_clients == run.min_clients
    asks = "model.min_clients is" if by_user else f"{robust_rules(run)} needs"
    planned = f" of {plan.cohort_size}" if plan.rate is None else ""
    return RoundSkipped(
        f"round {run.round}: {reported}{planned} clients can be aggregated, and {asks} {plan.min_clients}: no update is "
        "aggregated",
        dropped,
    )


def robust_rules(run: RunContext) -> str:
    """Return the names of the run's robust aggregators as a text, which may be empty."""
    rules = (rule for rule in (run.aggregator, run.statistics.rule) if isinstance(rule, RobustAggregator))
    return " and ".join(dict.fromkeys(type(rule).__name__ for rule in rules))


def not_finite(cohort: RoundCohort) -> dict[int, str]:
    """Return the first non-finite layer of each client with a non-finite update, by row.

    Only parameters and BN statistics are checked. Other buffers, such as attention masks, may
    contain infinities.
    """
    layout = cohort.buffers.layout
    statistics = [x for name, x in cohort.buffers.blocks.items() if layout[name].kind in ("mean", "var")]
    blocks = [*cohort.params.blocks.values(), *statistics]
    # fast check: if the sum of all values is finite, all values are finite
    if bool(torch.stack([block.sum() for block in blocks]).sum().isfinite()):
        return {}
    finite = torch.stack([block.isfinite().all(1) for block in blocks]).all(0).tolist()
    failed = {}
    for row in (row for row, fine in enumerate(finite) if not fine):
        parameters = {name: cohort.params[name][row] for name in cohort.parameter_kinds}
        layer = _first_layer({**parameters, **{n: cohort.buffers[n][row] for n in _statistics(cohort)}})
        assert layer is not None
        failed[row] = layer
    return failed


def _without(run: RunContext, cohort: RoundCohort, failed: Mapping[int, str]) -> RoundCohort:
    if not failed:
        return cohort
    _note(run, cohort, failed, "such updates are left out of their rounds")
    rows = [row for row in range(len(cohort)) if row not in failed]
    if len(rows) < (1 if run.centralised else run.plan.min_clients):
        raise too_few(run, len(rows), len(run.plan.trained(cohort.round)[0]) - len(rows))
    weights = run.plan.weights([cohort.client_ids[row] for row in rows], cohort.round).to(run.device)
    return cohort.subset(rows, None if run.weighting == "samples" else weights)


def _withstood(run: RunContext, cohort: RoundCohort) -> bool:
    """Return whether robust rules aggregate all non-finite values."""
    parameters = isinstance(run.aggregator, RobustAggregator)
    if not parameters and not all(bool(block.isfinite().all()) for block in cohort.params.blocks.values()):
        return False
    statistics = (cohort.buffers[name] for name in _statistics(cohort))
    return run.statistics.is_robust or all(bool(rows.isfinite().all()) for rows in statistics)


def _statistics(cohort: RoundCohort) -> list[str]:
    return [name for name, kind in cohort.buffer_kinds.items() if kind in ("mean", "var")]


def _first_layer(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the layer with the first non-finite tensor; None if all are finite."""
    return next((n.rpartition(".")[0] for n, value in tensors.items() if not value.isfinite().all()), None)


def _note(run: RunContext, cohort: RoundCohort, failed: Mapping[int, str], consequence: str) -> None:
    """Count each client's non-finite updates, and print a message about the first one."""
    for row, layer in failed.items():
        client, counted = cohort.client_ids[row], run.record.not_finite
        if client not in counted:
            run.print(
                f"round {cohort.round}: the update of {run.data.named(client)} is not finite, first in layer {layer!r}; {consequence} "
                f"(model.on_divergence: {run.on_divergence})"
            )
        counted[client] = counted.get(client, 0) + 1


def _error(run: RunContext, cohort: RoundCohort, row: int, layer: str) -> ConfigurationError:
    client = run.data.named(cohort.client_ids[row])
    for step in range(cohort.local_steps[row]):
        if not run.client_batches(cohort, [row], step).is_finite():
            return ConfigurationError(
                f"round {cohort.round}: the update of {client} is not finite, since its data are not: its batch of "
                f"local step {step + 1} has NaN or infinity; mend the data of {client}"
            )
    return Diverged(
        f"round {cohort.round}: the update of {client} is not finite, first in layer {layer!r}; lower {run.client.rate} (now "
        f"{cohort.optimizer.param_groups[0]['lr']:g}), or set model.on_divergence: drop to leave such updates out, or record "
        "to aggregate them"
    )
