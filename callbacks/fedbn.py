"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", arXiv 2102.07623."""

from fl_lightning.methods import LocalState


class FedBN(LocalState):
    """FedBN: clients keep gamma, beta, statistics and counter of BN; the other parameters are averaged.

    There is no global model: each client combines the averaged weights with its own BN state. BN
    layers are found by type, also ResNet's ``downsample.1``; the authors' code looks for "bn" in
    the name. The authors' code weights every client with 1/n, as ``weighting: uniform`` does.

    The paper does not measure a server's test set under label skew. Personal accuracy is low there,
    since a client's BN state fits its own classes (see
    :class:`~fl_lightning.methods.local_state.LocalState` for the two accuracies).

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[method := FedBN()])
        >>> list(method.memory[0])  # state that client 0 keeps
        ['batch_norm', 'mean', 'var', 'counter']
    """

    paper = "Li et al., arXiv 2102.07623"
    claims = ("fedavg_on_identical_clients", "one_client_is_plain_training")
    kinds = ("affine", "mean", "var", "counter")
