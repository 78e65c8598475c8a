"""FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization"."""

import lightning as L
import torch

from fl_lightning import Cohort, ConfigurationError, FederatedCallback, FederatedModule


class FedNova(FederatedCallback):
    """FedNova: normalised updates, so that more local steps give a client no more weight.

    Client i sends ``d_i = (x - x_i) / a_i``. x are the server's parameters, and x_i are the
    client's parameters. :func:`step_length` computes a_i. The server's update is ``(sum p_i a_i)
    sum p_i d_i``, with the aggregation weights p_i. The server optimizer gets this update as its
    pseudo-gradient. If all clients take the same number of local steps, FedNova equals FedAvg.
    FedNova does not change the treatment of statistics and local parameters (FedBN).

    The formula of a_i holds for SGD without momentum, and for SGD whose momentum starts from zeros
    in each round. All other cases raise an error: other client optimizers, dampening, Nesterov
    momentum, methods that keep or restart momentum, and methods that correct client drift. With
    FedProx, for example, a_i would depend on mu.

    Example:
        >>> from fl_lightning.testing import blobs, distance, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[FedNova()], local_steps=3)
        >>> averaged = train(small_cnn(), blobs(), rounds=2, local_steps=3)
        >>> distance(state, averaged) < 1e-12  # equal numbers of local steps
        True
    """

    paper = "Wang et al., arXiv 2007.07481"
    equalities = (
        "own_twin_without_bn",
        "one_client_is_plain_training",
        "one_client_is_two_of_half_its_weight",
    )
    takes = ("the client optimizer's state", "the correction of client drift")

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Raise an error if the client optimizer is not SGD, or has dampening or Nesterov momentum."""
        kind = type(cohort.optimizer)
        for group in cohort.optimizer.param_groups:
            if kind is not torch.optim.SGD or group["dampening"] or group["nesterov"]:
                raise ConfigurationError(
                    f"FedNova: client_optimizer {kind.__name__} must be SGD without dampening and nesterov; the length of other steps is unknown"
                )

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Normalise the updates: ``x_i <- x - d_i``."""
        for block, lengths in self._lengths(cohort).items():
            updates, server = cohort.updates(block), cohort.server_rows.blocks[block]
            cohort.params.blocks[block].copy_(server + updates / lengths.unsqueeze(1))

    def on_after_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Multiply the mean of the normalised updates by the weighted mean of all a_i."""
        for block, lengths in self._lengths(cohort).items():
            cohort.pseudo_gradient.blocks[block] *= cohort.mean(lengths)

    @staticmethod
    def _lengths(cohort: Cohort) -> dict[str, torch.Tensor]:
        """Return the a_i of all clients, ``[C]``, for each block that the server averages."""
        return {
            block: step_length(cohort.local_steps, cohort.optimizer_groups[block]["momentum"]).to(gradient)
            for block, gradient in cohort.pseudo_gradient.blocks.items()
        }


def step_length(steps: list[int], momentum: float) -> torch.Tensor:
    """Return ``a_i = [tau_i - m (1 - m^tau_i) / (1 - m)] / (1 - m)``, float64 ``[C]``.

    The update of client i is a weighted sum of its gradients in tau_i local steps. a_i is the sum
    of these weights. Without momentum, a_i is tau_i.

    Args:
        steps: Local steps tau_i of each client.
        momentum: Momentum m of SGD, in [0, 1].
    """
    tau, m = torch.tensor(steps, dtype=torch.float64), momentum
    return tau * (tau + 1) / 2 if m == 1 else (tau - m * (1 - m**tau) / (1 - m)) / (1 - m)
