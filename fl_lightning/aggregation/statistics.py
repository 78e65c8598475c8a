"""How the server combines the clients' running statistics, which are no vectors like others: variances are positive."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fl_lightning.aggregation.mean import Aggregator, WeightedMean
from fl_lightning.aggregation.robust import RobustAggregator
from fl_lightning.errors import ConfigurationError, check_choice

Domain = Literal["variance", "log_variance", "second_moment"]


class LayerStatistics(NamedTuple):
    """What the clients send of a BN layer.

    Attributes:
        means: Their means, shape ``[n, channels]``.
        variances: Their variances, likewise.
        weights: Their weights, shape ``[n]``, sum 1.
        between: Factor b on the variance between the clients, which is added to their variances: 0 where a method has none (FedAvg),
            1 for the law of total variance, N / ((N - 1) beta) for FBN. A number, or one for each channel.
    """

    means: Tensor
    variances: Tensor
    weights: Tensor
    between: float | Tensor = 0.0


def sent_statistics(
    buffers: Mapping[str, Tensor], kinds: Mapping[str, str], weights: Tensor, between: float = 0.0
) -> dict[str, LayerStatistics]:
    """The running statistics of all BN layers by the layer's name.

    Args:
        buffers: The clients' buffers, ``[n, *shape]`` by name.
        kinds: Their kinds, from ``fl_lightning.batch_norm.kinds.buffer_kinds``.
        weights: The clients' weights, shape ``[n]``, sum 1.
        between: Factor on the variance between the clients.
    """
    layers = [name.removesuffix("running_mean") for name, kind in kinds.items() if kind == "mean"]
    return {
        layer: LayerStatistics(
            buffers[f"{layer}running_mean"], buffers[f"{layer}running_var"], weights, between
        )
        for layer in layers
    }


class StatisticsAggregator:
    """Combine the clients' statistics by a rule: ``m = F(m_i)``, ``v = F(v_i) + b F((m_i - m)^2)``.

    With the weighted mean these are FedAvg's means (b = 0), the law of total variance (b = 1), or lines 9 and 10 of FBN
    (Guerraoui et al., arXiv 2405.14670), whose robust form puts a rule F in the place of all averages. Each layer's means are a
    vector, and its variances another, unless the rule's ``per`` is ``"model"``.

    Nothing forces what a robust rule gives to be a variance: a negative one becomes 0 and is counted.

    Args:
        rule: The rule F.
        domain: None takes what clients send as it is. Otherwise a client's statistics of a layer that cannot be any (not finite, a
            variance below 0) count as NaN, which robust rules leave out, and F is taken of ``"variance"``: (m, v);
            ``"log_variance"``: (m, ln v), so that v is positive, and of a mean the geometric one; ``"second_moment"``: (m, v + b (m - c)^2) as
            one vector, c the median of the clients' means, so that a median or trimmed mean of statistics is one, and that of a mean is
            exact; b must not be 0.

    Raises:
        ConfigurationError: An unknown domain.

    Attributes:
        invalid: Clients' statistics of a layer that were none, counted since the last :meth:`counts`.
        clamped: Channels whose variance was negative, likewise.
    """

    def __init__(self, rule: Aggregator, domain: Domain | None = None) -> None:
        if domain is not None:
            check_choice("model.statistics_domain", domain, ("variance", "log_variance", "second_moment"))
        self.rule, self.domain = rule, domain
        self.is_robust = isinstance(rule, RobustAggregator)
        self.invalid = self.clamped = 0

    @property
    def is_mean(self) -> bool:
        """Whether it does nothing but average."""
        return isinstance(self.rule, WeightedMean) and self.domain is None

    def __call__(self, layers: Sequence[LayerStatistics]) -> list[tuple[Tensor, Tensor]]:
        """Aggregate the statistics of some layers: mean and variance of each, ``[channels]``."""
        if self.rule.per != "model" or len(layers) < 2:
            return [self._aggregate(*layer) for layer in layers]
        widths = [layer.means.shape[1] for layer in layers]
        means, variances = (
            torch.cat([x.means for x in layers], 1),
            torch.cat([x.variances for x in layers], 1),
        )
        between = torch.cat(
            [torch.as_tensor(x.between).to(means).expand(w) for w, x in zip(widths, layers, strict=True)]
        )
        mean, variance = self._aggregate(means, variances, layers[0].weights, between)
        return list(zip(torch.split(mean, widths), torch.split(variance, widths), strict=True))

    def counts(self) -> dict[str, float]:
        """What had to be left out or clamped since the last call, as metrics."""
        found = {"statistics/invalid": float(self.invalid), "statistics/clamped": float(self.clamped)}
        self.invalid = self.clamped = 0
        return found

    def _aggregate(
        self, means: Tensor, variances: Tensor, weights: Tensor, between: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.domain is not None:
            invalid = ~(means.isfinite() & variances.isfinite() & (variances >= 0)).all(1, keepdim=True)
            self.invalid += int(invalid.sum())
            means, variances = (
                means.masked_fill(invalid, torch.nan),
                variances.masked_fill(invalid, torch.nan),
            )
            if not self.is_robust:  # a mean leaves out what has no weight
                means, variances = (rows.masked_fill(invalid, 0) for rows in (means, variances))
                weights = weights * ~invalid[:, 0]
                weights = weights / weights.sum()
        added = isinstance(between, Tensor) or between != 0
        if self.domain == "second_moment":
            if not added:
                raise ConfigurationError(
                    "model.statistics_domain: second_moment needs a method that adds the variance between clients, such as FBN; use "
                    "variance or log_variance"
                )
            centre = means.nanmedian(
                0
            ).values  # or a mean of many deviations takes the digits of both squares
            mean, second = self.rule.blocks([means, variances + between * (means - centre) ** 2], weights)
            variance = second - between * (mean - centre) ** 2
        else:
            mean = self.rule(means, weights)
            if self.domain == "log_variance":
                tiny = torch.finfo(variances.dtype).tiny
                variance = self.rule(variances.clamp(min=tiny).log(), weights).exp()
            else:
                variance = self.rule(variances, weights)
            if added:
                variance = variance + between * self.rule((means - mean) ** 2, weights)
        if self.is_robust:
            self.clamped += int((variance < 0).sum())
            variance = variance.clamp(min=0)
        return mean, variance


class Aggregates(Protocol):
    """A module with aggregators, such as :class:`~fl_lightning.round.module.FederatedModule`."""

    aggregator: Aggregator
    statistics: StatisticsAggregator


def require_weighted_mean(
    module: Aggregates,
    method: str,
    doing: str,
    settings: Sequence[str] = ("aggregator", "statistics_aggregator"),
) -> None:
    """Raise an error if a robust aggregator is configured that the method would bypass.

    Args:
        module: The federated module.
        method: The method, for the message.
        doing: What the method does with every client, for the message.
        settings: Which of ``aggregator`` and ``statistics_aggregator`` the method bypasses.

    Raises:
        ConfigurationError: One of these aggregators is not the weighted mean.
    """
    rules = {"aggregator": module.aggregator, "statistics_aggregator": module.statistics.rule}
    for setting in settings:
        if not isinstance(rules[setting], WeightedMean):
            raise ConfigurationError(
                f"model.{setting}: {type(rules[setting]).__name__} cannot protect {method}, which {doing}; use WeightedMean"
            )
