"""MTFL: Mills et al., "Multi-Task Federated Learning for Personalised Deep Neural Networks in Edge Computing", arXiv 2007.09236."""

from fl_lightning.methods import LocalState


class MTFL(LocalState):
    """MTFL: clients keep gamma and beta of BN; all other state is averaged.

    A client's gamma and beta start from the server's initial values. ``own_accuracy`` is the
    paper's measure: the accuracy of a client's model, with the averaged state, on test data with
    the client's distribution.

    In the paper (section 3), clients keep private patches. These methods implement the paper's
    variants:

    - Private patches "yb" (gamma and beta): this method.
    - Private patches "us" (running means and variances):
      :class:`~fl_lightning.callbacks.silobn.SiloBN`.
    - Both patches: :class:`~fl_lightning.callbacks.fedbn.FedBN`.
    - FedAvg-Adam, which averages Adam's moments:
      :class:`~fl_lightning.callbacks.maintained_momentum.MaintainedMomentum` with global scope.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[method := MTFL()])
        >>> method.memory[0]["batch_norm"].shape  # client 0's gamma and beta of both BN layers
        torch.Size([20])
    """

    paper = "Mills et al., arXiv 2007.09236"
    equalities = ("fedavg_on_identical_clients", "one_client_is_plain_training")
    kinds = ("affine",)
