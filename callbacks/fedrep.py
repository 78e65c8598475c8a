"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", arXiv 2102.07303."""

import lightning as L

from fl_lightning import Cohort, FederatedModule
from fl_lightning.callbacks.fedper import FedPer
from fl_lightning.cohort import LAST_LAYER
from fl_lightning.errors import check_number


class FedRep(FedPer):
    """FedRep: each client first trains the head, then the body; only the body is averaged.

    The first ``head_steps`` local steps of a round train only the head. The other steps train only
    the body (Algorithm 1). The untrained part has gradient 0 and learning rate 0, so that momentum
    and weight decay have no effect. Both phases start with a new client optimizer. A client with at
    most ``head_steps`` local steps trains only the head. Running statistics change in both phases,
    because BN normalises with the batch.

    The authors weight clients by their number of samples. After the last round, the authors tune
    the heads of all clients. Here a client is evaluated with the head from the client's last round.

    Args:
        head_steps: Number of local steps that train the head, at least 0. With 0, the heads are
            never trained.
        head: The head, see :class:`~fl_lightning.callbacks.fedper.FedPer`.
        evaluate_clients: Number of clients whose models are evaluated. Default: all clients.

    Raises:
        ConfigurationError: ``head_steps`` is negative, or no client has a local step for the body.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> method = FedRep(head_steps=3)
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[method], local_steps=4)
        >>> bool((method.memory[0]["weights@last layer"] == method.memory[1]["weights@last layer"]).any())
        False
    """

    paper = "Collins et al., arXiv 2102.07303"
    equalities = ("one_client_is_two_of_half_its_weight",)
    takes = ("the client optimizer's state",)

    def __init__(
        self, head_steps: int = 1, head: list[str] | str = LAST_LAYER, evaluate_clients: int | None = None
    ) -> None:
        super().__init__(head, evaluate_clients)
        self.head_steps = head_steps

    def on_fit_start(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # a run's module has this type
        """Raise an error if no client has a local step for the body."""
        most = max(map(pl_module.plan.full_steps, range(pl_module.data.num_clients)))
        check_number("FedRep.head_steps", self.head_steps, least=0, below=most)

    def on_after_local_backward(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Let the untrained part, the head or the body, rest."""
        if step == self.head_steps:
            cohort.restart_optimizer()
        for block, layout in cohort.params.layout.items():
            # the body rests while the head trains, and the head rests while the body trains
            if {*layout.parts, layout.kind}.isdisjoint(self.kinds) == (step < self.head_steps):
                cohort.rest(block)
