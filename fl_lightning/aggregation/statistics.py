"""Aggregation of running statistics. Aggregated variances are never negative."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fl_lightning.aggregation.mean import Aggregator, WeightedMean
from fl_lightning.aggregation.robust import RobustAggregator
from fl_lightning.errors import ConfigurationError
from fl_lightning.recorded import Recorded

Domain = Literal["variance", "log_variance", "second_moment"]


class LayerStatistics(NamedTuple):
    """The clients' running statistics of a BN layer.

    Attributes:
        means: Running means, shape ``[n, channels]``.
        variances: Running variances, shape ``[n, channels]``.
        weights: Aggregation weights, shape ``[n]``, with sum 1.
        between: Factor b, a number or ``[channels]``. The aggregated variance includes b times the
            variance of the clients' means. In FedAvg, b is 0. In the law of total variance, b is 1.
            In FBN, b is N / ((N - 1) beta), with N values per channel and BN momentum beta.
    """

    means: Tensor
    variances: Tensor
    weights: Tensor
    between: float | Tensor = 0.0


def sent_statistics(
    buffers: Mapping[str, Tensor], kinds: Mapping[str, str], weights: Tensor, between: float = 0.0
) -> dict[str, LayerStatistics]:
    """Return the clients' running statistics of each BN layer, with layer names as keys.

    Args:
        buffers: The clients' buffers, ``[n, *shape]`` by name.
        kinds: Kind of each buffer, from ``fl_lightning.batch_norm.kinds.buffer_kinds``.
        weights: The clients' weights, shape ``[n]``, with sum 1.
        between: Factor b of the variance of the clients' means, see :class:`LayerStatistics`.
    """
    sent = {}
    for layer in (name.removesuffix("running_mean") for name, kind in kinds.items() if kind == "mean"):
        mean, variance = buffers[f"{layer}running_mean"], buffers[f"{layer}running_var"]
        sent[layer] = LayerStatistics(mean, variance, weights, between)
    return sent


class StatisticsAggregator(Recorded):
    """Aggregator of BN statistics by a rule F: ``m = F(m_i)``, ``v = F(v_i) + b F((m_i - m)^2)``.

    Client i has the running mean m_i and the running variance v_i. If F is the weighted mean, the
    result depends on b:

    - b = 0 gives FedAvg's statistics.
    - b = 1 gives the law of total variance.
    - b = N / ((N - 1) beta), with N values in a channel and BN momentum beta, gives lines 9 and 10
      of FBN (Guerraoui et al., arXiv 2405.14670). The robust form of FBN replaces all means by F.

    By default, F aggregates the means and the variances of each layer as separate vectors. With
    ``per="model"``, a vector spans all layers. A robust F can give a negative variance, which is
    clamped to 0 and counted.

    The domain decides which quantities F aggregates:

    - None and ``"variance"``: (m, v).
    - ``"log_variance"``: (m, ln v). The variance stays positive. With the mean as F, the result is
      the geometric mean of the variances.
    - ``"second_moment"``: the vector (m, v + b (m - c)^2), where c is the median of the clients'
      means. This domain requires that b is not 0. In this domain, medians and trimmed means give
      valid statistics, and the weighted mean is exact.

    With any domain except None, a client's layer is invalid if it has a non-finite value or a
    negative variance. An invalid layer counts as NaN in robust rules, and has weight 0 in a mean.

    Args:
        rule: The rule F.
        domain: Name of the quantities that F aggregates, from the list above.

    Attributes:
        invalid: Number of clients' invalid layers since the last call of :meth:`counts`.
        clamped: Number of clamped variances since the last call of :meth:`counts`.
    """

    def __init__(self, rule: Aggregator, domain: Domain | None = None) -> None:
        self.rule, self.domain = rule, domain
        self.is_robust = isinstance(rule, RobustAggregator)
        self.invalid = self.clamped = 0

    @property
    def is_mean(self) -> bool:
        """Whether the rule is a weighted mean, and the domain is None."""
        return isinstance(self.rule, WeightedMean) and self.domain is None

    def __call__(self, layers: Sequence[LayerStatistics]) -> list[tuple[Tensor, Tensor]]:
        """Aggregate each layer's statistics to a mean and a variance, each ``[channels]``."""
        if self.rule.per != "model" or len(layers) < 2:
            return [self._aggregate(*layer) for layer in layers]
        widths = [layer.means.shape[1] for layer in layers]
        means = torch.cat([x.means for x in layers], 1)
        variances = torch.cat([x.variances for x in layers], 1)
        between = torch.cat(
            [torch.as_tensor(x.between).to(means).expand(w) for w, x in zip(widths, layers, strict=True)]
        )
        mean, variance = self._aggregate(means, variances, layers[0].weights, between)
        return list(zip(torch.split(mean, widths), torch.split(variance, widths), strict=True))

    def counts(self) -> dict[str, float]:
        """Return the counts ``invalid`` and ``clamped`` as metrics, and set both counts to 0."""
        metrics = {"statistics/invalid": float(self.invalid), "statistics/clamped": float(self.clamped)}
        self.invalid = self.clamped = 0
        return metrics

    def _aggregate(
        self, means: Tensor, variances: Tensor, weights: Tensor, between: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.domain is not None:
            invalid = ~(means.isfinite() & variances.isfinite() & (variances >= 0)).all(1, keepdim=True)
            self.invalid += int(invalid.sum())
            blank = torch.nan if self.is_robust else 0  # 0 for a mean, because NaN times 0 is NaN
            means, variances = means.masked_fill(invalid, blank), variances.masked_fill(invalid, blank)
            if not self.is_robust:
                weights = weights * ~invalid[:, 0]
                weights = weights / weights.sum()
        added = isinstance(between, Tensor) or between != 0
        if self.domain == "second_moment":
            if not added:
                raise ConfigurationError(
                    "model.statistics_domain: second_moment needs a method that adds the variance between clients, such as FBN; use "
                    "variance or log_variance"
                )
            centre = means.nanmedian(0).values  # subtracting a centre avoids cancellation
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
    """Module that has aggregators, such as :class:`~fl_lightning.round.module.FederatedModule`."""

    aggregator: Aggregator
    statistics: StatisticsAggregator


def require_weighted_mean(
    module: Aggregates,
    method: str,
    doing: str,
    settings: Sequence[str] = ("aggregator", "statistics_aggregator"),
) -> None:
    """Check that a method does not bypass a robust aggregator.

    Args:
        module: The federated module.
        method: Name of the method, for the error message.
        doing: Verb phrase for the error message: the method's operation on all clients.
        settings: Names of the aggregator settings that the method bypasses.

    Raises:
        ConfigurationError: One of the settings is not ``WeightedMean``.
    """
    rules = {"aggregator": module.aggregator, "statistics_aggregator": module.statistics.rule}
    for setting in settings:
        if not isinstance(rules[setting], WeightedMean):
            raise ConfigurationError(
                f"model.{setting}: {type(rules[setting]).__name__} cannot protect {method}, which {doing}; use WeightedMean"
            )
