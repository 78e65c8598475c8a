"""Moment matching: the server's variance includes the variance between the clients."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import lightning as L
import torch

from fl_lightning import FederatedCallback
from fl_lightning.aggregation import sent_statistics
from fl_lightning.batch_norm import require_batch_norm
from fl_lightning.methods import set_server_statistics

if TYPE_CHECKING:
    from fl_lightning import Cohort, FederatedModule


class MomentMatching(FederatedCallback):
    """Aggregate running statistics by the law of total variance, an ablation of FedAvg that no paper names.

    ``mu = sum p_i mu_i`` and ``sigma^2 = sum p_i sigma_i^2 + sum p_i (mu_i - mu)^2``; FedAvg leaves the last sum out. Two
    clients with means 0 and 10 and variance 1 have variance 26 together, where FedAvg says 1. Parameters train as in
    FedAvg: only evaluation sees the difference. The module's
    ``statistics_aggregator`` takes the place of the three sums.

    Caution: clients send moving averages, ``mu_i = (1 - b) mu + b (their own)`` with b = 1 - (1 - beta)^E, so their means
    lie b times as far apart as those of their batches. The last sum is b^2 of what it should be where the moving average
    asks for b: after many rounds the server's variance holds the fraction b of the variance between the clients, which is
    a tenth of it with PyTorch's momentum beta = 0.1 and E = 1 (hence the division by beta in FBN), and nearly all with
    E = 50. It holds all of it with ``bn_momentum: 1``, where clients send the statistics of their last batch, and for
    layers with ``momentum=None`` in the first round, where they send averages over their local steps.
    """

    paper = "total variance in FedAvg (ablation, no paper)"
    claims = (
        "weights_of_fedavg", "fedavg_on_identical_clients", "one_client_is_plain_training",
        "one_client_is_two_of_half_its_weight", "moments_of_the_mixture",
    )  # fmt: skip

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Statistics are pooled."""
        return {"mean": "pooled", "var": "pooled"}

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Check that there are statistics to aggregate."""
        require_batch_norm(pl_module.model, "MomentMatching")

    def on_round_end(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """The server's statistics."""
        sent = sent_statistics(cohort.buffers, cohort.buffer_kinds, cohort.weights, between=1.0)
        means, variances = zip(*pl_module.statistics([*sent.values()]), strict=True)
        set_server_statistics(cohort, torch.cat(means), torch.cat(variances))
