"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", arXiv 1910.06378."""

import lightning as L
import torch

from fl_lightning import Cohort, FederatedCallback, FederatedModule
from fl_lightning.cohort import SERVER, ClientMemory
from fl_lightning.round import aggregate


class SCAFFOLD(FederatedCallback):
    """SCAFFOLD: clients correct their drift with control variates.

    In each local step, client i replaces the gradient g by ``g - c_i + c``. c_i estimates the
    gradient of client i, and c estimates the mean gradient of all clients. c and all c_i start from
    0. After a round (Algorithm 1, option II):

    - c_i becomes the mean of the gradients g in the K_i local steps in which the parameters of
      client i move. K_i is the number of local steps, without those in which FedRep lets the body
      rest. Without such a step, and for a client outside the cohort, c_i does not change.
    - c becomes ``c + |S|/n mean(new c_i - old c_i)``. S is the cohort, and n is the number of
      clients. A client that the server leaves out (``on_divergence: drop``) is not in S.

    The paper computes c_i as ``c_i - c + (theta - theta_i) / (K_i eta)``, with the learning rate
    eta of the round. For SGD, this formula also gives the mean of the gradients. We compute the
    mean directly, because differences of parameters have rounding errors. The mean also suits other
    client optimizers, such as Adam or SGD with momentum, which take steps on the corrected
    gradient. c_i and c exclude weight decay. The paper's server learning rate is the learning rate
    of the server optimizer.

    Here ``mean`` is the module's aggregator, by default the weighted mean. ``|S|/n`` is the
    cohort's share of the total weight of all clients. c therefore stays the weighted mean of all
    c_i. With ``weighting: uniform``, or if all clients have the same number of samples, ``mean``
    and ``|S|/n`` are as in the paper.

    Stragglers take fewer local steps than planned. With ``weighting: samples``, their weights still
    count all planned steps; otherwise c would not be the mean of all c_i. A robust aggregator
    filters a Byzantine client's c_i like the client's update. With ``per: layer``, the aggregator
    filters each layer separately.

    The method applies to parameters that clients train and the server averages. Statistics, frozen
    parameters and local parameters (FedBN) are excluded. The method doubles the traffic of the
    parameters in both directions.

    The order of the callbacks matters. A callback before SCAFFOLD in the list, such as
    ClientGradientClipping, changes g. A callback after SCAFFOLD changes the corrected gradient.

    Example:
        >>> from fl_lightning.testing import blobs, distance, small_cnn, train
        >>> corrected = train(small_cnn("gn"), blobs(), rounds=2, callbacks=[SCAFFOLD()])
        >>> averaged = train(small_cnn("gn"), blobs(), rounds=2)
        >>> distance(corrected, averaged) < 1e-12  # with one local step the corrections cancel
        True
    """

    paper = "Karimireddy et al., arXiv 1910.06378"
    equalities: tuple[str, ...] = (
        "own_twin_without_bn", "fedavg_on_identical_clients", "one_client_is_plain_training",
        "one_client_is_two_of_half_its_weight", "server_keeps_the_mean",
    )  # fmt: skip
    takes = ("the correction of client drift",)
    saved = ("memory",)

    def __init__(self) -> None:
        self.memory = ClientMemory()

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Load c, and each client's c_i."""
        self._own, server = cohort.load_vectors(self.memory), self.memory.get(SERVER, {})
        self._correction = {}
        for block, own in self._own.items():
            c = server.get(block, own.new_zeros(own.shape[1])).to(own)
            self._correction[block] = c - own
            cohort.extra[f"SCAFFOLD {block}"] = torch.zeros_like(own)
            cohort.extra[f"SCAFFOLD steps {block}"] = own.new_zeros(len(own), 1)

    def on_after_local_backward(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Correct the gradients: ``g <- g - c_i + c``."""
        active = cohort.index(cohort.active_rows())
        self._gradients = {}
        for block, correction in self._correction.items():
            gradients = cohort.grads.blocks[block]
            self._gradients[block] = gradients[active].clone()
            gradients += correction[cohort.rows]

    def on_local_step_end(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Add g of the blocks that have moved, which callbacks before or after this one decide."""
        active = cohort.index(cohort.active_rows())
        for block in self._correction.keys() - cohort.resting:
            cohort.extra[f"SCAFFOLD {block}"][active] += self._gradients.pop(block)
            cohort.extra[f"SCAFFOLD steps {block}"][active] += 1

    def on_after_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Update the control variates: ``c_i <- mean of g`` and ``c <- c + |S|/n mean(delta c_i)``."""
        share = pl_module.weight_share(cohort)
        own, variates = {block: rows[cohort.rows] for block, rows in self._own.items()}, {}
        for block, old in own.items():
            steps = cohort.extra[f"SCAFFOLD steps {block}"]
            variates[block] = torch.where(steps > 0, cohort.extra[f"SCAFFOLD {block}"] / steps, old)
        changes = {block: (block, rows - own[block]) for block, rows in variates.items()}
        means = aggregate(cohort, changes, pl_module.aggregator, pl_module.usual_weights(cohort))
        server = dict(self.memory.get(SERVER, {}))
        for block, mean in means.items():
            server[block] = server.get(block, torch.zeros_like(mean)).to(mean) + share * mean
        self.memory[SERVER] = server
        cohort.store_vectors(self.memory, variates)

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Return the numbers of floats that a client sends (the change of c_i) and receives (c)."""
        blocks = cohort.params.blocks.items()
        floats = sum(block.shape[1] for name, block in blocks if cohort.treatment(name) == "averaged")
        return floats, floats
