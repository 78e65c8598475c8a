"""FedBABU: Oh et al., "FedBABU: Towards Enhanced Representation for Federated Image Classification", arXiv 2106.06042."""

from collections.abc import Mapping

from torch import Tensor

from fl_lightning import FederatedModule
from fl_lightning.cohort import LAST_LAYER
from fl_lightning.errors import check_number
from fl_lightning.methods import PersonalEvaluation, fine_tuned


class FedBABU(PersonalEvaluation):
    """FedBABU: training changes only the body; clients fine-tune the model before an evaluation.

    The head keeps its initial value. The server sends the head once to each client. In each
    evaluation, every client fine-tunes a copy of the server's model, body and head, on the client's
    training data (Algorithm 1 and section 5). Fine-tuning uses the client optimizer with the initial learning rate
    (:func:`~fl_lightning.methods.fine_tuning.fine_tuned`).

    ``own_accuracy`` is the accuracy of the fine-tuned models, the paper's personalised accuracy.
    ``accuracy`` is the accuracy of the server's model.

    Args:
        fine_tune_epochs: Number of passes over the client's training data (default 1). With 0, the
            server's model is evaluated.
        head: The head, see :class:`~fl_lightning.callbacks.fedper.FedPer`.
        evaluate_clients: Number of clients whose models are fine-tuned and evaluated. Default: all
            clients.

    Raises:
        ConfigurationError: ``fine_tune_epochs`` is negative, or another method also gives clients
            separate models.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[FedBABU()])
        >>> bool((state["8.weight"] == small_cnn().double()[8].weight).all())  # the head never moves
        True
    """

    paper = "Oh et al., arXiv 2106.06042"
    equalities = ("own_twin_without_bn", "one_client_is_two_of_half_its_weight")

    def __init__(
        self,
        fine_tune_epochs: int = 1,
        head: list[str] | str = LAST_LAYER,
        evaluate_clients: int | None = None,
    ) -> None:
        super().__init__(evaluate_clients)
        check_number("FedBABU.fine_tune_epochs", fine_tune_epochs, least=0)
        self.fine_tune_epochs, self.head = fine_tune_epochs, [head] if isinstance(head, str) else head

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that the head is frozen."""
        return dict.fromkeys(self.head, "frozen")

    def client_model(self, pl_module: FederatedModule, client: int) -> Mapping[str, Tensor]:
        """Return a client's fine-tuned model."""
        return fine_tuned(pl_module, client, self.fine_tune_epochs)
