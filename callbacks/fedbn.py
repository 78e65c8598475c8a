"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", arXiv 2102.07623."""

from fl_lightning.methods import LocalState


class FedBN(LocalState):
    """FedBN: clients keep gamma, beta, statistics and counter of BN; the other parameters are averaged.

    There is no global model: each client combines the averaged parameters with its own BN state.
    The authors' code differs in two points:

    - It finds BN layers by "bn" in the name. Here the type decides, so ResNet's ``downsample.1`` is
      found too.
    - It weights every client with 1/n. Set ``weighting: uniform`` for the same weights.

    The paper does not evaluate label skew on the server's test set. A client's model has a low
    accuracy there, because its BN state fits only the client's classes. For the two accuracies see
    :class:`~fl_lightning.methods.local_state.LocalState`.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[method := FedBN()])
        >>> list(method.memory[0])  # state that client 0 keeps
        ['batch_norm', 'mean', 'var', 'counter']
    """

    paper = "Li et al., arXiv 2102.07623"
    claims = ("fedavg_on_identical_clients", "one_client_is_plain_training")
    kinds = ("affine", "mean", "var", "counter")
