"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", arXiv 1812.06127."""

import lightning as L

from fl_lightning import Cohort, FederatedCallback, FederatedModule
from fl_lightning.errors import check_number


class FedProx(FederatedCallback):
    """FedProx: a proximal term pulls each client towards the server's parameters.

    Each client adds ``mu / 2 |theta_i - theta|^2`` to its loss. theta are the server's parameters,
    and theta_i are the parameters of client i. Only the gradient of the term, ``mu (theta_i -
    theta)``, is computed. The logged loss excludes the term.

    The term includes all parameters that the server averages, but not local parameters (FedBN) or
    statistics. The first local step equals FedAvg's, because theta_i still equals theta.

    Args:
        mu: Weight of the proximal term, at least 0. With 0, the method is FedAvg.

    Raises:
        ConfigurationError: ``mu`` is negative.

    Example:
        >>> from fl_lightning.testing import blobs, distance, small_cnn, train
        >>> near, free = (
        ...     train(small_cnn("gn"), blobs(), rounds=1, callbacks=[FedProx(mu)], local_steps=4)
        ...     for mu in (1, 0)
        ... )
        >>> start = small_cnn("gn").state_dict()
        >>> distance(start, near) < distance(start, free)
        True
    """

    paper = "Li et al., arXiv 1812.06127"
    equalities = ("own_twin_without_bn", "proximal_term")
    takes = ("the correction of client drift",)
    examples = ({}, {"mu": 0.5})

    def __init__(self, mu: float = 0.01) -> None:
        check_number("FedProx.mu", mu, " (0 is FedAvg)", least=0)
        self.mu = mu

    def on_after_local_backward(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Add the gradient of the proximal term."""
        for block, gradients in cohort.grads.blocks.items():
            if cohort.treatment(block) == "averaged":
                gradients += self.mu * cohort.updates(block)
