"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021."""

import lightning as L

from fl_lightning import Cohort, FederatedCallback, FederatedModule
from fl_lightning.cohort import SERVER, ClientMemory
from fl_lightning.errors import check_number
from fl_lightning.round import aggregate


class FedDyn(FederatedCallback):
    """FedDyn: dynamic regularisation of the clients' losses, and a correction at the server.

    Client i adds ``alpha / 2 |x_i - x|^2 - <g_i, x_i>`` to its loss (Algorithm 1). x are the
    server's parameters, and x_i are the parameters of client i. Client i keeps g_i, an estimate of
    the gradient of its loss at x_i. At first, g_i is 0. After each round in which client i trains,
    the client updates ``g_i <- g_i - alpha (x_i - x)``.

    The server keeps h, the weighted mean of all g_i. After each round, the server updates
    ``h <- h - alpha |S|/n mean(x_i - x)``. S is the cohort, and n is the number of clients. If the
    server leaves a client out (``on_divergence: drop``), the client is not in S, and its g_i does
    not change. The server's new parameters are ``mean(x_i) - h / alpha``. Clients send only
    parameters. The logged loss excludes the added terms.

    Here ``mean`` is the module's aggregator, by default the weighted mean. ``|S|/n`` is the
    cohort's share of the total weight of all clients. With ``weighting: uniform``, ``mean`` and
    ``|S|/n`` are as in the paper. The server optimizer gets the pseudo-gradient ``x - mean(x_i) + h
    / alpha``. With the server optimizer ``SGD(lr=1)``, the result is the paper's update.

    The method applies to parameters that clients train and the server averages. Statistics, frozen
    parameters and local parameters (FedBN) are excluded.

    Args:
        alpha: Weight of the regularisation, above 0. The paper uses 0.001 to 0.1.

    Raises:
        ConfigurationError: ``alpha`` is not above 0.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> method = FedDyn(alpha=0.1)
        >>> state = train(small_cnn("gn"), blobs(), rounds=3, callbacks=[method], local_steps=3)
        >>> sorted(method.memory)  # h of the server, g_i of the clients
        [-1, 0, 1, 2]
    """

    paper = "Acar et al., arXiv 2111.04263"
    equalities = ("own_twin_without_bn", "one_client_is_two_of_half_its_weight", "server_keeps_the_mean")
    takes = ("the correction of client drift",)
    saved = ("memory",)
    examples = ({}, {"alpha": 0.5})

    def __init__(self, alpha: float = 0.01) -> None:
        check_number("FedDyn.alpha", alpha, above=0)
        self.alpha = alpha
        self.memory = ClientMemory()

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Load each client's gradient estimate g_i."""
        self._own = cohort.load_vectors(self.memory)

    def on_after_local_backward(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Add ``alpha (x_i - x) - g_i`` to the gradients."""
        for block, own in self._own.items():
            cohort.grads.blocks[block] += self.alpha * cohort.updates(block) - own[cohort.rows]

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Compute the clients' new ``g_i <- g_i - alpha (x_i - x)``."""
        for block, old in self._own.items():
            cohort.extra[f"FedDyn {block}"] = old[cohort.rows] - self.alpha * cohort.updates(block)

    def on_after_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Store each ``g_i``, update ``h``, and subtract ``h / alpha`` from the server's parameters."""
        cohort.store_vectors(self.memory, {block: cohort.extra[f"FedDyn {block}"] for block in self._own})
        updates = {block: (block, -cohort.updates(block)) for block in self._own}
        weights, share = pl_module.usual_weights(cohort), pl_module.weight_share(cohort)
        server = dict(self.memory.get(SERVER, {}))
        for block, mean in aggregate(cohort, updates, pl_module.aggregator, weights).items():
            server[block] = server.get(block, mean.new_zeros(mean.shape)).to(mean) + self.alpha * share * mean
            cohort.pseudo_gradient.blocks[block] += server[block] / self.alpha
        self.memory[SERVER] = server
