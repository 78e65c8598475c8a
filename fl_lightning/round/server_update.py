"""Aggregation of the clients' parameters and statistics for the update of the server."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from fl_lightning.aggregation import Aggregator, StatisticsAggregator, sent_statistics
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.cohort.rows import split_block
from fl_lightning.errors import ConfigurationError


def update_server(
    cohort: RoundCohort, aggregator: Aggregator, statistics: StatisticsAggregator, *, strict: bool
) -> None:
    """Set the server's gradients to the pseudo-gradient, and its statistics to the aggregate.

    Args:
        cohort: The clients after their local steps.
        aggregator: Rule for the clients' parameters.
        statistics: Rule for the clients' running statistics.
        strict: Whether negative running variances are an error.

    Raises:
        ConfigurationError: A running variance is negative and ``strict`` is True.
    """
    _set_pseudo_gradient(cohort, aggregator)
    _set_local_parameters(cohort, aggregator)
    _set_statistics(cohort, aggregator, statistics)
    if strict:
        _check_variances(cohort, clients=not statistics.is_robust and statistics.domain is None)


def _set_pseudo_gradient(cohort: RoundCohort, aggregator: Aggregator) -> None:
    """Set the server's gradients to server - aggregate(clients) (Reddi et al. 2021, Algorithm 1).

    Parameters that are not averaged get the gradient None, so the optimizer skips them.
    """
    rows = {n: (n, cohort.params.blocks[n]) for n in cohort.pseudo_gradient.blocks}
    for parameter in cohort.server_parameters.values():
        parameter.grad = None
    for block, mean in aggregate(cohort, rows, aggregator).items():
        torch.sub(cohort.server_rows.blocks[block][0], mean, out=cohort.pseudo_gradient.blocks[block][0])
    for name, gradient in cohort.pseudo_gradient.row(0).items():
        cohort.server_parameters[name].grad = gradient


def aggregate(
    cohort: Cohort,
    rows: Mapping[str, tuple[str, Tensor]],
    aggregator: Aggregator,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Aggregate tensors that have one row per client.

    If the aggregator's attribute ``per`` is ``"layer"``, every layer is aggregated separately.

    Args:
        cohort: The clients.
        rows: Tensors ``[C, columns]`` under arbitrary keys, each with the name of a parameter
            block. The block determines the layer of each column.
        aggregator: The aggregation rule.
        weights: The clients' weights ``[C]``, with sum 1. Default: the round's weights.

    Returns:
        The aggregated tensors ``[columns]``, under the keys of ``rows``.
    """
    if not rows:  # clients keep all parameters
        return {}
    weights = cohort.weights if weights is None else weights
    if aggregator.per != "layer":
        blocks = aggregator.blocks([values for _, values in rows.values()], weights)
        return dict(zip(rows, blocks, strict=True))
    aggregates = {name: values.new_empty(values.shape[1]) for name, (_, values) in rows.items()}
    for parts in cohort.params.columns_by_layer(dict.fromkeys(block for block, _ in rows.values())).values():
        places = [
            (name, values, columns)
            for name, (of, values) in rows.items()
            for block, columns in parts
            if of == block
        ]
        pieces = aggregator.blocks([values[:, columns] for _, values, columns in places], weights)
        for (name, _, columns), piece in zip(places, pieces, strict=True):
            aggregates[name][columns] = piece
    return aggregates


def _set_local_parameters(cohort: RoundCohort, aggregator: Aggregator) -> None:
    """Set the server's local parameters to the aggregate of the clients.

    Only evaluations of the server model use these values.
    """
    for name, block in cohort.params.blocks.items():
        if cohort.treatment(name) == "local":
            mean = aggregator(block, cohort.weights)
            for key, value in split_block(mean, cohort.params.layout[name].shapes).items():
                cohort.server_parameters[key].detach().copy_(value)


def _set_statistics(cohort: RoundCohort, aggregator: Aggregator, statistics: StatisticsAggregator) -> None:
    """Set the server's buffers to the clients' aggregate, without the server optimizer.

    Integer buffers become the maximum over the clients. Frozen, pooled and discarded buffers do
    not change.
    """
    for name, block in cohort.buffers.blocks.items():
        treatment, names = cohort.treatment(name), cohort.buffers.layout[name].shapes
        is_statistic = cohort.buffers.layout[name].kind in ("mean", "var")
        if treatment not in ("averaged", "local", "max") or (is_statistic and not statistics.is_mean):
            continue
        if treatment == "max" or not block.is_floating_point():
            row = block.amax(0)
        elif is_statistic:
            row = statistics.rule(block, cohort.weights)
        else:
            row = _aggregate_changed(block, cohort.weights, aggregator)
        cohort.buffer_aggregate.blocks[name][0].copy_(row)
        aggregates = cohort.buffer_aggregate.row(0)
        torch._foreach_copy_(
            [cohort.server_buffers[key] for key in names], [aggregates[key] for key in names]
        )
    if statistics.is_mean:
        return
    combined = {name for name, treatment in cohort.treatments.items() if treatment in ("averaged", "local")}
    sent = {
        layer: statistics_of
        for layer, statistics_of in sent_statistics(
            cohort.buffers, cohort.buffer_kinds, cohort.weights
        ).items()
        if combined & {f"{layer}running_mean", f"{layer}running_var"}
    }
    for layer, (mean, variance) in zip(sent, statistics([*sent.values()]) if sent else [], strict=True):
        for name, value in ((f"{layer}running_mean", mean), (f"{layer}running_var", variance)):
            if name in combined:
                cohort.server_buffers[name].copy_(value)


def _aggregate_changed(rows: Tensor, weights: Tensor, rule: Aggregator) -> Tensor:
    """Aggregate the columns of ``rows [C, d]`` in which clients differ, and keep all other values.

    Constants may be infinite, such as attention masks. A robust rule would make them NaN.
    """
    result, changed = rows[0].clone(), (rows != rows[0]).any(0)
    if changed.any():
        result[changed] = rule(rows[:, changed], weights)
    return result


def converge_spectral_norm(cohort: RoundCohort, model: nn.Module) -> None:
    """Let the singular vectors of spectral norm follow the mean of several clients' weights.

    In evaluation, a layer would otherwise divide its weight by less than the largest singular value.
    Layers in eval mode keep their vectors.
    """
    with torch.no_grad():
        for module in model.modules() if len(cohort) > 1 else ():
            for hook in module._forward_pre_hooks.values():
                for _ in range(15 if isinstance(hook, SpectralNorm) else 0):  # as in torch's initialisation
                    hook(module, None)
            is_list = isinstance(module, ParametrizationList)
            if is_list and any(isinstance(part, _SpectralNorm) for part in module.children()):
                for _ in range(15):
                    module()


def _check_variances(cohort: RoundCohort, *, clients: bool) -> None:
    """Check that the server, and optionally every client, has no negative running variance."""
    names = [name for name, kind in cohort.buffer_kinds.items() if kind == "var"]
    everyone = [f"client {client}" for client in cohort.client_ids] if clients else []
    of_a_client = (
        "set model.statistics_domain: variance, which leaves it out, a robust model.statistics_aggregator such as Median, "
        "stay_valid: true of Byzantine, or model.on_divergence: record"
    )
    of_the_rule = "its rule makes variances below 0; set model.statistics_domain: log_variance, or another model.statistics_aggregator"
    for owners, buffers, remedy in (
        (everyone, cohort.buffers, of_a_client),
        (["the server"], cohort.server_buffers, of_the_rule),
    ):
        variances = {name: buffers[name].reshape(len(owners), -1) for name in names} if owners else {}
        if not variances or bool(torch.cat([*variances.values()], 1).amin() >= 0):
            continue
        for name, rows in variances.items():
            negative = (rows < 0).any(1).tolist()
            if any(negative):  # if the minimum above is NaN, no variance need be negative
                raise ConfigurationError(
                    f"round {cohort.round}: {owners[negative.index(True)]} holds a negative running variance in BN layer "
                    f"{name.rpartition('.')[0]!r}; {remedy}"
                )
