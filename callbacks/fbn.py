"""FBN: Guerraoui et al., "Overcoming the Challenges of Batch Normalization in Federated Learning", arXiv 2405.14670."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Literal

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning import Cohort, FederatedCallback, FederatedModule, SwappedBatchNorm, swap_batch_norm
from fl_lightning.aggregation import LayerStatistics
from fl_lightning.batch_norm import ONE_VALUE, batch_norm_layers, merge_, moments
from fl_lightning.errors import ConfigurationError


class SharedBatchNorm(SwappedBatchNorm):
    """BN layer that normalises with the server's statistics, and records moments of the inputs.

    Four buffers ``[channels]`` describe the layer's inputs at a client in this round. ``count`` is
    the number of values, ``batch_mean`` is their mean, and ``batch_m2`` is the sum of their squared
    deviations from the mean. ``calls`` is the number of calls of the layer.
    """

    method = "FBN"
    scratch = ("count", "batch_mean", "batch_m2", "calls")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``gamma (x - m) / sqrt(v + eps) + beta`` (Algorithm 2).

        m and v are the server's running mean and variance. In training, also merge the inputs x
        into the moments of the round.
        """
        if self.training:
            count, mean, m2, calls, batches = map(self.get_buffer, (*self.scratch, "num_batches_tracked"))
            merge_(count, mean, m2, *moments(inputs.transpose(0, 1).flatten(1).to(mean.dtype)))
            calls.add_(1)
            batches.add_(1)
        return F.batch_norm(inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class FBN(FederatedCallback):
    """Federated BatchNorm: all clients normalise with the server's running mean and variance.

    Every local step normalises with the running mean m and variance v from the server's last round.
    No gradient flows through m and v. Clients send measured statistics, and the server adds the
    variance between clients. m and v therefore equal the running statistics of PyTorch's BN on the
    union of all clients' batches (the union batch). The variance is unbiased: for N values per
    channel in the union batch, it includes the factor N/(N-1).

    With one local step (E = 1), the method is Algorithm 2 of the paper. Footnote 4 of the paper
    hints at several local steps. For E local steps, we extend the algorithm as follows:

    - A client computes the exact mean and variance of all values in its E batches.
    - The server updates its moving average once per round. The weight of the new statistics is 1 -
      (1 - beta)^E, where beta is the BN layer's ``momentum`` in PyTorch's convention.
    - If clients take different numbers of local steps, E is the largest of these numbers.
    - If a layer is called several times in a local step, each call counts as a step, as in
      PyTorch's BN.

    If gradients are weighted by batch size, training equals FBN with a single client that has the
    union batch. If batch sizes differ, set ``weighting: samples``. If batch sizes are equal but the
    clients' data sets differ in size, set ``weighting: uniform``. Training does not equal training
    with ordinary BN, because ordinary BN normalises with the current batch.

    The server averages the clients' means m_i and variances v_i. The module's setting
    ``statistics_aggregator`` can replace the average by another rule.

    Args:
        wire: Statistics that clients send. ``"run"``: the moving averages m_i and v_i, as in the
            paper. ``"batch"``: mean and variance of the client's values. This variance also
            includes the factor N/(N-1). With honest clients and a mean as aggregator, both choices
            give the same results up to rounding.
        ema: Weight of the old statistics in the moving average after E local steps. ``"per_step"``
            is (1 - beta)^E, and ``"per_round"`` is 1 - beta.

    Raises:
        ConfigurationError: A setting is unknown, the model has no BN layer, a BN layer has
            ``momentum=None``, another method declares the statistics of a BN layer ``local``, or
            the union batch has only one value per channel.

    Example:
        >>> from fl_lightning.testing import blobs, centralised, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=1, callbacks=[FBN()])
        >>> union = centralised(small_cnn(), blobs(), steps=1)  # BN on the union of the clients' batches
        >>> float((state["1.running_var"] - union["1.running_var"]).abs().max()) < 1e-12
        True
    """

    paper = "Guerraoui et al., arXiv 2405.14670 (FBN)"
    equalities = ("own_twin", "union_statistics")
    examples = ({}, {"wire": "batch", "ema": "per_round"})

    def __init__(
        self, wire: Literal["run", "batch"] = "run", ema: Literal["per_step", "per_round"] = "per_step"
    ) -> None:
        self.wire, self.ema = wire, ema

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that this method computes the server's running statistics (``pooled``)."""
        return {"mean": "pooled", "var": "pooled"}

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Replace BN layers by layers that normalise with the server's statistics."""
        swap_batch_norm(pl_module.model, SharedBatchNorm, momentum=True)

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Compute the statistics that each client sends (Algorithm 2, lines 5 to 7)."""
        self._totals: dict[str, tuple[int, int]] = {}
        for layer in self._layers(pl_module.model, cohort):
            # a client that has not used the layer sends the server's statistics
            clients, weight = layer.clients, layer.weight * layer.clients.count.sign()
            clients.running_mean.lerp_(clients.batch_mean, weight)
            clients.running_var.lerp_(layer.unbias * clients.batch_m2 / clients.count.clamp(min=1), weight)

    def on_round_end(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Update the server's statistics (Algorithm 2, lines 9 and 10)."""
        layers = list(self._layers(pl_module.model, cohort))
        pairs = [(layer.clients, layer.unbias / layer.weight) for layer in layers]
        sent = [LayerStatistics(c.running_mean, c.running_var, c.shares, between) for c, between in pairs]
        for layer, (mean, variance) in zip(layers, pl_module.statistics(sent), strict=True):
            layer.server.running_mean.lerp_(mean, layer.beta / layer.weight)
            layer.server.running_var.lerp_(variance, layer.beta / layer.weight)

    def _layers(self, model: nn.Module, cohort: Cohort) -> Iterator[SimpleNamespace]:
        """Yield the tensors and factors of each BN layer that was used in this round.

        N is the number of values per channel in the batches of all clients. N and E also count
        clients that the server leaves out because of what they send: all clients have used these
        numbers. The fields are:

        - ``server``: The server's BN layer.
        - ``clients``: The clients' buffers of the layer, and ``shares``, ``[C]``: each client's
          share of the values of the clients that are not left out.
        - ``unbias``: The factor N / (N - 1).
        - ``beta``: Weight of this round in the server's moving average.
        - ``weight``: Weight of this round in the statistics that clients send: ``beta`` if
          ``wire`` is ``"run"``, otherwise 1.
        """
        for name, server in batch_norm_layers(model).items():
            if cohort.treatments[f"{name}.running_mean"] == "local":
                raise ConfigurationError(f"FBN: BN layer {name!r} is local; leave the layer out of the head")
            buffers = {key: cohort.buffers[f"{name}.{key}"] for key, _ in server.named_buffers()}
            values, calls = int(buffers["count"][:, 0].sum()), int(buffers["calls"].max())
            total, calls = self._totals.setdefault(name, (values, calls))
            if total == 1:
                raise ConfigurationError(f"FBN: BN layer {name!r} {ONE_VALUE}")
            if values:
                clients = SimpleNamespace(**buffers, shares=buffers["count"][:, 0] / values)
                # momentum is not None: swap_batch_norm has checked it
                beta = 1 - (1 - (server.momentum or 0)) ** (calls if self.ema == "per_step" else 1)
                weight, unbias = beta if self.wire == "run" else 1.0, total / (total - 1)
                yield SimpleNamespace(server=server, clients=clients, unbias=unbias, beta=beta, weight=weight)
