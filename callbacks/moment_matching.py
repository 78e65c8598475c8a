"""Moment matching: the server's variance includes the variance between the clients."""

from collections.abc import Mapping

import lightning as L
import torch

from fl_lightning import Cohort, FederatedCallback, FederatedModule
from fl_lightning.aggregation import sent_statistics
from fl_lightning.batch_norm import require_batch_norm
from fl_lightning.methods import sent_kinds, set_server_statistics


class MomentMatching(FederatedCallback):
    """Moment matching: running statistics are aggregated by the law of total variance.

    This method does not come from a paper.

    With aggregation weights p, the server's mean is ``mu = sum p_i mu_i``. The server's variance is
    ``sigma^2 = sum p_i sigma_i^2 + sum p_i (mu_i - mu)^2``. FedAvg omits the last sum. For example,
    if two clients have the means 0 and 10 and the variance 1, the joint variance is 26, but FedAvg
    gives 1. Parameters train as in FedAvg; only evaluation differs. The module's setting
    ``statistics_aggregator`` can replace the three sums by another rule.

    Caution: the server's variance usually contains only a part of the variance between clients.
    Clients send moving averages ``mu_i = (1 - b) mu + b (client's mean)``. Here b is
    ``1 - (1 - beta)^E``, for E local steps and PyTorch's momentum beta. The last sum is therefore
    b^2 times the variance between the clients' means; a correct moving average would add b times
    this variance. After many rounds, the server's variance contains only the fraction b of the
    variance between clients. With beta = 0.1, this fraction is a tenth for E = 1, and nearly 1 for
    E = 50. FBN divides the last sum by b, which corrects the variance.

    In two cases, the server's variance contains all of the variance between clients:

    - ``bn_momentum: 1``: Clients send the statistics of their last batch.
    - The first round of layers with ``momentum=None``: Clients send averages over their local
      steps.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> matched = train(small_cnn(), blobs(), rounds=2, callbacks=[MomentMatching()])
        >>> averaged = train(small_cnn(), blobs(), rounds=2)
        >>> bool((matched["1.running_var"] > averaged["1.running_var"]).all())
        True
    """

    paper = "total variance in FedAvg (ablation, no paper)"
    equalities = (
        "weights_of_fedavg", "fedavg_on_identical_clients", "one_client_is_plain_training",
        "one_client_is_two_of_half_its_weight", "moments_of_the_mixture",
    )  # fmt: skip

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that this method computes the server's running statistics (``pooled``)."""
        return {"mean": "pooled", "var": "pooled"}

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Raise an error if the model has no running statistics."""
        require_batch_norm(pl_module.model, "MomentMatching")

    def on_round_end(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Aggregate the clients' statistics by the law of total variance."""
        sent = sent_statistics(cohort.buffers, sent_kinds(cohort), cohort.weights, between=1.0)
        means, variances = zip(*pl_module.statistics([*sent.values()]), strict=True)
        set_server_statistics(cohort, torch.cat(means), torch.cat(variances))
