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
    """Moment matching: running statistics are aggregated by the law of total variance (no paper names it).

    ``mu = sum p_i mu_i`` and ``sigma^2 = sum p_i sigma_i^2 + sum p_i (mu_i - mu)^2``; FedAvg omits
    the last sum. Two clients with means 0 and 10 and variance 1 have a joint variance of 26, where
    FedAvg gives 1. Parameters train as in FedAvg; only evaluation differs. The module's
    ``statistics_aggregator`` replaces the three sums.

    Caution: clients send moving averages, ``mu_i = (1 - b) mu + b (client's mean)`` with b = 1 - (1
    - beta)^E, so the sent means are b times as far apart as the batch means. The last sum then has
    the factor b^2, although the moving average requires b. After many rounds the server's variance
    holds the fraction b of the variance between clients: a tenth with PyTorch's momentum beta = 0.1
    and E = 1 (hence FBN's division by beta), nearly all with E = 50. It holds all of that variance
    in two cases: with ``bn_momentum: 1``, where clients send the statistics of their last batch,
    and in the first round for layers with ``momentum=None``, where clients send averages over their
    local steps.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> matched = train(small_cnn(), blobs(), rounds=2, callbacks=[MomentMatching()])
        >>> averaged = train(small_cnn(), blobs(), rounds=2)
        >>> bool((matched["1.running_var"] > averaged["1.running_var"]).all())
        True
    """

    paper = "total variance in FedAvg (ablation, no paper)"
    claims = (
        "weights_of_fedavg", "fedavg_on_identical_clients", "one_client_is_plain_training",
        "one_client_is_two_of_half_its_weight", "moments_of_the_mixture",
    )  # fmt: skip

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare running statistics pooled."""
        return {"mean": "pooled", "var": "pooled"}

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Check that the model has running statistics."""
        require_batch_norm(pl_module.model, "MomentMatching")

    def on_round_end(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Set the server's statistics."""
        sent = sent_statistics(cohort.buffers, cohort.buffer_kinds, cohort.weights, between=1.0)
        means, variances = zip(*pl_module.statistics([*sent.values()]), strict=True)
        set_server_statistics(cohort, torch.cat(means), torch.cat(variances))
