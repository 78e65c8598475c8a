"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", arXiv 2102.07623."""

from fl_lightning.methods import LocalState


class FedBN(LocalState):
    """FedBN: clients keep gamma, beta, statistics and counter of BN; the other parameters are averaged.

    There is no global model: each client combines the averaged parameters with local BN state. The
    authors' code differs in two points:

    - The code treats a layer as BN if the layer's name contains "bn". Here the layer's type
      decides. ResNet's ``downsample.1`` is therefore BN here, but not in the authors' code.
    - The code gives every client the weight 1/n. For equal weights, set ``weighting: uniform``.

    The paper does not study label skew, where clients have different classes. With label skew, a
    client's BN state fits only the client's classes. The client's model then has a low accuracy on
    the server's test set. :class:`~fl_lightning.methods.local_state.LocalState` explains the two
    accuracies of the clients' models.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[method := FedBN()])
        >>> list(method.memory[0])  # state that client 0 keeps
        ['batch_norm', 'mean', 'var', 'counter']
    """

    paper = "Li et al., arXiv 2102.07623"
    equalities = ("fedavg_on_identical_clients", "one_client_is_plain_training")
    kinds = ("affine", "mean", "var", "counter")
