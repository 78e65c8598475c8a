"""Base class of methods whose clients keep local state, such as FedBN and SiloBN."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import lightning as L
from torch import Tensor

from fl_lightning.batch_norm.kinds import KINDS, buffer_kinds, parameter_kinds
from fl_lightning.cohort.client_memory import ClientMemory
from fl_lightning.cohort.cohort import SERVER
from fl_lightning.cohort.parts import match_parts
from fl_lightning.cohort.rows import buffer_layout, parameter_layout, split_block
from fl_lightning.errors import ConfigurationError
from fl_lightning.methods.personal_evaluation import PersonalEvaluation

if TYPE_CHECKING:
    from fl_lightning.cohort.cohort import Cohort
    from fl_lightning.round.module import FederatedModule


class LocalState(PersonalEvaluation):
    """Base class of methods whose clients keep some state without sending it.

    A subclass defines ``kinds``. A client starts a round with the local state from the end of its
    previous round. Before the first round, the local state is the initial state. A client's model
    is the server's model with the client's local state. The server's model has the mean of the
    local state over the clients of the last round.

    Args:
        evaluate_clients: Number of clients whose models are evaluated. Default: all clients.

    Raises:
        ConfigurationError: ``evaluate_clients`` is below 1, or the model has no state of ``kinds``.

    Attributes:
        kinds: Kinds of state and parts of the model that clients keep (see
            ``fl_lightning.round.policy``).
        memory: Local state of each client, keyed by client id: a row ``[columns]`` for each block.
            The key ``SERVER`` has the initial state.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> class LocalAffine(LocalState):
        ...     kinds = ("affine",)
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[method := LocalAffine()])
        >>> method.memory[0]["batch_norm"].shape  # client 0's gamma and beta of both BN layers
        torch.Size([20])
    """

    kinds: tuple[str, ...]
    saved = ("memory",)

    def __init__(self, evaluate_clients: int | None = None) -> None:
        super().__init__(evaluate_clients)
        self.memory = ClientMemory()

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that the state of ``kinds`` is local."""
        return dict.fromkeys(self.kinds, "local")

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Check that the model has parameters or buffers of ``kinds``."""
        model = pl_module.model
        parts = [kind for kind in self.kinds if kind not in KINDS]
        match_parts(model, parts, type(self).__name__)
        present = {*parameter_kinds(model).values(), *buffer_kinds(model).values()}
        if self.kinds and not parts and not present.intersection(self.kinds):
            remedy = (
                "" if set(self.kinds) <= {"weight", "buffer"} else ": it needs Batch Normalization, norm: bn"
            )
            raise ConfigurationError(
                f"{type(self).__name__}: the model {type(model).__name__} has no state of the kinds that clients would keep "
                f"({', '.join(self.kinds)}), but {', '.join(kind for kind in KINDS if kind in present)}{remedy}"
            )

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Restore the local state of the round's clients."""
        cohort.recall(self.memory)

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Store the local state of the round's clients."""
        cohort.remember(self.memory)

    def client_model(self, pl_module: "FederatedModule", client: int) -> Mapping[str, Tensor]:
        """Return the local state of a client. Before round 1, it is empty."""
        model, parts, task = pl_module.model, pl_module.parts, pl_module.client
        of_parameters = parameter_layout(model, task.parameter_groups, parts, task.group_of)
        layout = {**of_parameters, **buffer_layout(model, parts)}
        state: dict[str, Tensor] = {}
        for block, row in self.memory.get(client, self.memory.get(SERVER, {})).items():
            state |= split_block(row, layout[block].shapes)
        return state
