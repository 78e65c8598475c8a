"""FBN: Guerraoui et al., "Overcoming the Challenges of Batch Normalization in Federated Learning", arXiv 2405.14670."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning import ConfigurationError, FederatedCallback, SwappedBatchNorm, swap_batch_norm
from fl_lightning.aggregation import LayerStatistics
from fl_lightning.batch_norm import ONE_VALUE, batch_norm_layers, merge_, moments
from fl_lightning.errors import check_choice

if TYPE_CHECKING:
    from fl_lightning import Cohort, FederatedModule


class SharedBatchNorm(SwappedBatchNorm):
    """BN layer that normalises with the server's statistics and pools the moments of its batches.

    Scratch buffers, each ``[channels]``: the number of values that the client has seen in this
    round, their mean, and their sum of squared deviations from it.
    """

    method = "FBN"
    scratch = ("count", "batch_mean", "batch_m2")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``gamma (x - m) / sqrt(v + eps) + beta`` (Algorithm 2) and pool the moments of x."""
        if self.training:
            count, mean, m2, batches = map(self.get_buffer, (*self.scratch, "num_batches_tracked"))
            merge_(count, mean, m2, *moments(inputs.transpose(0, 1).flatten(1).to(mean.dtype)))
            batches.add_(1)
        return F.batch_norm(inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class FBN(FederatedCallback):
    """Federated BatchNorm: all clients normalise with the moving average of the union batches' statistics.

    The server's (m, v) of the last round normalise every local step; no gradient flows through
    them. Clients send measured statistics, and the server adds the variance between clients. So (m,
    v) are what PyTorch's BN would track on the union batch: unbiased, with N/(N-1) of all N values
    per channel. With E = 1 this is Algorithm 2 of the paper. Several local steps are our extension
    (footnote 4 hints at them): a client pools its E batches exactly, and the moving average takes
    one step with weight 1 - (1 - beta)^E. E is the largest number of local steps in the round, also
    for a client with fewer steps. The weight of a batch is its number of values.

    Training equals that of one client with the union batch and this callback. It differs from
    ordinary BN, which normalises with the present batch. Each gradient must have the weight of its
    values. Equal clients need no setting; set ``weighting: samples`` if batch sizes differ, and
    ``uniform`` if only the clients' data set sizes differ. beta is each BN layer's ``momentum``
    (PyTorch's convention). The module's ``statistics_aggregator`` replaces the server's means of
    m_i and v_i.

    Args:
        wire: Sent statistics. ``"run"``: moving averages m_i, v_i (the paper); ``"batch"``: mean
            and variance of a client's values, with the same N/(N-1). Both are equal up to rounding
            if clients are honest and the aggregator is a mean.
        ema: ``"per_step"``: a round of E local steps keeps (1 - beta)^E of the old statistics;
            ``"per_round"``: it keeps 1 - beta.

    Raises:
        ConfigurationError: Unknown setting, no BN, BN without momentum, or a single value per
            channel in all batches together.

    Example:
        >>> from fl_lightning.testing import blobs, centralised, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=1, callbacks=[FBN()])
        >>> union = centralised(small_cnn(), blobs(), steps=1)  # BN on the union of the clients' batches
        >>> float((state["1.running_var"] - union["1.running_var"]).abs().max()) < 1e-12
        True
    """

    paper = "Guerraoui et al., arXiv 2405.14670 (FBN)"
    claims = ("own_twin", "union_statistics")
    examples = ({}, {"wire": "batch", "ema": "per_round"})

    def __init__(
        self, wire: Literal["run", "batch"] = "run", ema: Literal["per_step", "per_round"] = "per_step"
    ) -> None:
        check_choice("FBN.wire", wire, ("run", "batch"))
        check_choice("FBN.ema", ema, ("per_step", "per_round"))
        self.wire, self.ema = wire, ema

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare running statistics pooled."""
        return {"mean": "pooled", "var": "pooled"}

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Let BN layers normalise with the shared statistics."""
        swap_batch_norm(pl_module.model, SharedBatchNorm, momentum=True)

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Replace clients' running statistics by the sent ones (Algorithm 2, lines 5 to 7)."""
        for layer in self._layers(pl_module.model, cohort):
            clients, weight = layer.clients, layer.weight
            clients.running_mean.lerp_(clients.batch_mean, weight)
            clients.running_var.lerp_(layer.unbias * clients.batch_m2 / clients.count.clamp(min=1), weight)

    def on_round_end(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Update the server's statistics (Algorithm 2, lines 9 and 10)."""
        layers = list(self._layers(pl_module.model, cohort))
        pairs = [(layer.clients, layer.unbias / layer.weight) for layer in layers]
        sent = [LayerStatistics(c.running_mean, c.running_var, c.shares, between) for c, between in pairs]
        for layer, (mean, variance) in zip(layers, pl_module.statistics(sent), strict=True):
            layer.server.running_mean.lerp_(mean, layer.beta / layer.weight)
            layer.server.running_var.lerp_(variance, layer.beta / layer.weight)

    def _layers(self, model: nn.Module, cohort: "Cohort") -> Iterator[SimpleNamespace]:
        """Yield each BN layer that saw values.

        ``server`` is the server's layer, ``clients`` holds the clients' buffers and their ``shares``
        ``[C]`` of the N values per channel, ``unbias`` is N / (N - 1). ``weight`` is the weight of
        this round in the sent statistics; the server multiplies their change by ``beta / weight``.
        """
        steps = max(cohort.local_steps) if self.ema == "per_step" else 1
        for name, server in batch_norm_layers(model).items():
            buffers = {key: cohort.buffers[f"{name}.{key}"] for key, _ in server.named_buffers()}
            total = int(buffers["count"][:, 0].sum())
            if total == 1:
                raise ConfigurationError(f"FBN: BN layer {name!r} {ONE_VALUE}")
            if total:
                clients = SimpleNamespace(**buffers, shares=buffers["count"][:, 0] / total)
                beta = 1 - (1 - (server.momentum or 0)) ** steps  # swap_batch_norm refuses momentum None
                weight, unbias = beta if self.wire == "run" else 1.0, total / (total - 1)
                yield SimpleNamespace(server=server, clients=clients, unbias=unbias, beta=beta, weight=weight)
