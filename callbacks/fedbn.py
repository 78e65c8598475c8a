"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", arXiv 2102.07623."""

from fl_lightning.methods import LocalState


class FedBN(LocalState):
    """Clients keep their whole Batch Normalization state: gamma, beta, statistics and counter; only the rest is averaged.

    There is no global model: each client's is the averaged weights with its own BN state. BN layers are found by type, so
    that ``downsample.1`` is one; the authors' code looks for "bn" in the name. Their code averages with 1/n for every
    client, whatever its size: that is ``weighting: uniform`` of the federated module.

    A server's test set under label skew is not what the paper measures, and personal accuracy is low on it: a client's BN
    state fits its own classes (see :class:`~fl_lightning.methods.local_state.LocalState` for the two accuracies).
    """

    paper = "Li et al., arXiv 2102.07623"
    claims = ("fedavg_on_identical_clients", "one_client_is_plain_training")
    kinds = ("affine", "mean", "var", "counter")
