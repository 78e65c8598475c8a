"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 1912.00818."""

from fl_lightning.cohort import LAST_LAYER
from fl_lightning.methods import LocalState


class FedPer(LocalState):
    """FedPer: clients keep the head (the personalization layers); the body (base layers) is averaged.

    Clients train body and head together (Algorithm 1). Clients also keep the buffers of the head.
    In the paper, the head is the classifier with up to three preceding blocks, and each client's
    head starts from random values. Here all heads start from the server's initial head.

    Args:
        head: Name of a module or parameter, such as ``fc``, or a list of names (see
            ``fl_lightning.cohort.parts``). Default: the last layer. With an empty list, the method
            is FedAvg.
        evaluate_clients: Number of clients whose models are evaluated. Default: all clients.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[method := FedPer(head="8")])
        >>> method.memory[0]["weights@8"].shape  # client 0's weights and biases of the last layer
        torch.Size([75])
    """

    paper = "Arivazhagan et al., arXiv 1912.00818"
    equalities: tuple[str, ...] = (
        "fedavg_on_identical_clients", "one_client_is_plain_training", "one_client_is_two_of_half_its_weight",
    )  # fmt: skip

    def __init__(self, head: list[str] | str = LAST_LAYER, evaluate_clients: int | None = None) -> None:
        super().__init__(evaluate_clients)
        self.kinds = (head,) if isinstance(head, str) else tuple(head)
