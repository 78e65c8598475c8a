"""FedDNA without its VAE: Duan, Li, Lu, "FedDNA: Federated Learning with Decoupled Normalization-Layer Aggregation"."""

from collections.abc import Mapping
from typing import Literal

import lightning as L
import torch
from torch import Tensor

from fl_lightning import Cohort, FederatedCallback, FederatedModule
from fl_lightning.aggregation import require_weighted_mean
from fl_lightning.batch_norm import require_batch_norm, total_variance
from fl_lightning.methods import client_statistics, set_server_statistics

_EPS = 1e-5  # default eps of BN
_TOLERANCE = 1e-7
_SMALLEST_STEP = 1e-12


class FedDNA(FederatedCallback):
    """FedDNA (lite): importance-weighted aggregation of BN statistics, without the paper's VAE.

    Parameters are averaged as in FedAvg. Statistics are averaged with one weight per client, the
    importance q_i. The importances are at least 0 and sum to 1. The server's mean is
    ``mu = sum q_i mu_i``, and the server's variance is
    ``sigma^2 = sum q_i (sigma_i^2 + mu_i^2) - mu^2``.

    The paper learns q with an adversarial variational auto-encoder (VAE). We found no code of the
    paper. Here q minimises a divergence between Gaussians, summed over all channels. The Gaussian N
    has the server's mean and variance; N_i has the mean and variance of client i. Results will
    therefore differ from the paper's.

    The clients' statistics are moving averages.
    :class:`~fl_lightning.callbacks.moment_matching.MomentMatching` explains how this affects the
    server's variance.

    Args:
        divergence: The sum that q minimises, with aggregation weights p_i. ``"kl"`` is
            ``sum p_i KL(N_i || N)``, with the minimum q = p, which is moment matching.
            ``"reverse_kl"`` is ``sum p_i KL(N || N_i)``, which gives outlying clients less weight.
            This convex problem is solved by mirror descent.

    Raises:
        ConfigurationError: The divergence is unknown, the model has no running statistics, or the
            aggregator of statistics is not the weighted mean.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[FedDNA("reverse_kl")])
        FedDNA (lite): importances minimise reverse_kl, in place of the paper's adversarial training.
    """

    paper = "Duan et al., FedDNA, ECML-PKDD 2021 (lite)"
    equalities: tuple[str, ...] = (
        "weights_of_fedavg", "fedavg_on_identical_clients", "one_client_is_plain_training",
        "one_client_is_two_of_half_its_weight",
    )  # fmt: skip
    examples = ({}, {"divergence": "reverse_kl"})

    def __init__(self, divergence: Literal["kl", "reverse_kl"] = "kl") -> None:
        self.divergence = divergence
        if divergence == "kl":
            self.equalities += ("moments_of_the_mixture",)

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that this method computes the server's running statistics (``pooled``)."""
        return {"mean": "pooled", "var": "pooled"}

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Check that running statistics exist and are aggregated by the weighted mean."""
        require_batch_norm(pl_module.model, "FedDNA")
        require_weighted_mean(
            pl_module, "FedDNA", "sums statistics with importances", ["statistics_aggregator"]
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Print the difference between this version and the paper."""
        pl_module.print(
            f"FedDNA (lite): importances minimise {self.divergence}, in place of the paper's adversarial training."
        )

    def on_round_end(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Set the server's statistics, and log the importances' maximum and entropy."""
        means, variances = client_statistics(cohort)
        importances = self.importances(means, variances, cohort.weights)
        set_server_statistics(cohort, *total_variance(means, variances, importances))
        entropy = torch.special.entr(importances).sum().item()
        pl_module.log_numbers({"feddna/max_importance": importances.max().item(), "feddna/entropy": entropy})

    def importances(self, means: Tensor, variances: Tensor, weights: Tensor) -> Tensor:
        """Return the importances q of the clients, ``[C]``, sum 1.

        Args:
            means: Means of the clients, ``[C, channels]``.
            variances: Variances of the clients, ``[C, channels]``.
            weights: Aggregation weights p, ``[C]``, sum 1.
        """
        return weights if self.divergence == "kl" else reverse_kl_importances(means, variances, weights)

    def aggregate(self, means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the server's mean and variance with computed importances, each ``[channels]``."""
        return total_variance(means, variances, self.importances(means, variances, weights))


def reverse_kl_importances(
    means: Tensor, variances: Tensor, weights: Tensor, iterations: int = 500
) -> Tensor:
    """Return the importances q that minimise ``sum p_i KL(N || N_i)``.

    N is the server's Gaussian, whose mean mu and variance sigma^2 depend on q. N_i is the Gaussian
    of client i. The divergence is averaged over the channels.

    The objective is a convex function of q. The term ``sigma^2 + (mu - mu_i)^2`` is linear in q.
    The term ``-log sigma^2`` is convex, because sigma^2 is concave.

    Mirror descent on the simplex starts from q = p. A line search halves a step until the objective
    decreases enough. The next step begins with twice this size. The descent ends once the duality
    gap ``q @ g - min g``, with the gradient g, is below 1e-7. The objective exceeds the minimum by
    at most this gap.

    Args:
        means: Means of the clients, ``[C, channels]``.
        variances: Variances of the clients, ``[C, channels]``; BN's eps of 1e-5 is added.
        weights: Aggregation weights p, ``[C]``, all positive.
        iterations: Maximum number of steps.

    Returns:
        The importances q, ``[C]``, with the dtype and device of ``weights``. If a statistic is not
        finite, the result is p.
    """
    mu, var, p = means.double().cpu(), variances.double().cpu() + _EPS, weights.double().cpu()
    squares = var + mu**2
    # up to a constant, the objective is ``linear @ q - mean(log sigma^2) / 2``
    linear = (squares @ (p @ (1 / var)) - 2 * mu @ (p @ (mu / var))) / (2 * mu.shape[1])

    def objective(q: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = total_variance(mu, var, q)
        gradient = linear - ((squares - 2 * mu * mean) / variance).mean(1) / 2
        return linear @ q - variance.log().mean() / 2, gradient

    log_q, step = p.log(), 1.0
    value, gradient = objective(p)
    if not value.isfinite():
        return weights
    for _ in range(iterations):
        q = log_q.exp()
        if q @ gradient - gradient.min() < _TOLERANCE:
            break
        step *= 2
        while step > _SMALLEST_STEP:
            new_log = torch.log_softmax(log_q - step * gradient, 0)
            new = new_log.exp()
            new_value, new_gradient = objective(new)
            if new_value <= value + gradient @ (new - q) + new @ (new_log - log_q) / step:
                log_q, value, gradient = new_log, new_value, new_gradient
                break
            step /= 2
    return log_q.exp().to(weights)
