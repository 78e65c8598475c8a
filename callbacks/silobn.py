"""SiloBN: Andreux et al., "Siloed Federated Learning for Multi-Centric Histopathology Datasets", arXiv 2008.07424."""

from collections.abc import Mapping

import lightning as L
from torch import Tensor

from fl_lightning import FederatedModule
from fl_lightning.methods import LocalState


class SiloBN(LocalState):
    """SiloBN: clients keep their running statistics; weights, gamma and beta are averaged.

    Training does not read running statistics. All parameters are therefore bit for bit the same as
    in FedAvg with BN. Only the clients' statistics differ. A client that has not taken part yet is
    evaluated with the server's statistics: the mean over the clients of the last round.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[SiloBN()])
        >>> averaged = train(small_cnn(), blobs(), rounds=2)
        >>> bool((state["8.weight"] == averaged["8.weight"]).all())  # as FedAvg
        True
    """

    paper = "Andreux et al., arXiv 2008.07424"
    equalities = ("weights_of_fedavg", "fedavg_on_identical_clients", "one_client_is_plain_training")
    examples = ({}, {"evaluate_clients": 2})
    kinds = ("mean", "var", "counter")

    def variants(self, trainer: L.Trainer, pl_module: FederatedModule) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the statistics of each evaluated client, by client id.

        The statistics of a client that has not taken part yet are left out: the server's apply.
        """
        models = super().variants(trainer, pl_module)
        return {client: state if int(client) in self.memory else {} for client, state in models.items()}
