"""The base class of methods, with the hooks of a communication round."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning as L

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.recorded import Recorded
from fl_lightning.round.declarations import Declarations

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule


class FederatedCallback(Recorded, Declarations, L.Callback):
    """A method: it declares the treatment of state (``policy``) and changes a round by hooks.

    Without the method a run is another algorithm. One round is ::

        setup                                          # once: configure_batch_norm(pl_module)
        for round in 1, 2, ..., total_rounds:
            cohort <- copies of the server's state for the sampled clients
            on_round_start(trainer, pl_module, cohort)
            for step in 0, 1, ..., E - 1:              # local steps, all clients side by side
                cohort.grads, cohort.buffers <- forward and backward on each client's batch
                on_after_local_backward(trainer, pl_module, cohort, step)
                cohort.params <- one step of the client optimizer
                on_local_step_end(trainer, pl_module, cohort, step)
            on_before_aggregate(trainer, pl_module, cohort)
            cohort.pseudo_gradient <- server - aggregate(cohort)
            on_after_aggregate(trainer, pl_module, cohort)
            on_before_optimizer_step(trainer, pl_module, optimizer)  # Lightning's own hook
            server <- one step of the server optimizer
            on_round_end(trainer, pl_module, cohort)

    The first dimension of every tensor of the cohort is the client. State of clients that a method
    keeps between rounds belongs in its ``state_dict()``, as tensors and numbers by client id.

    With ``on_divergence: drop`` clients with a non-finite update are left out before and after
    ``on_before_aggregate``. Later hooks get the remaining clients, with rows ``cohort.rows``. If
    too few clients report or remain, ``on_round_skipped(trainer, pl_module)`` replaces the
    remaining hooks.

    Before each hook torch's global generator is seeded from (seed, class, hook, round, step), so
    random numbers depend on neither the executor nor earlier draws, and are equal after a resume.

    Runs on several ranks and on one rank give the same numbers if hooks follow these rules:

    - ``on_round_start``, ``on_before_aggregate``, ``on_after_aggregate``, ``on_round_end`` and
      Lightning's hooks get the entire cohort, and must do the same on every rank: without clocks,
      rank numbers, or random numbers except torch's global ones.
    - ``on_after_local_backward`` and ``on_local_step_end`` get the rank's rows ``cohort.rows``,
      possibly none, and change only these rows; ``cohort.mean`` raises an error. State for local
      steps is not kept on ``self`` but in ``cohort.extra``, which ``on_round_start`` fills with
      tensors ``[C, ...]``. Random numbers come from ``cohort.generators``.

    A class with an unknown hook name (``on_rond_start``), even from a mixin, is an error.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> class Halved(FederatedCallback):
        ...     def on_after_local_backward(self, trainer, pl_module, cohort, step):
        ...         for gradients in cohort.grads.blocks.values():
        ...             gradients *= 0.5
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[Halved()])
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = {name for name in dir(FederatedCallback) if name.startswith("on_")}
        for name in dir(cls):
            if name.startswith("on_") and name not in known:
                raise ConfigurationError(
                    f"{cls.__name__}.{name} is not a hook of FederatedCallback{nearest(name, known)}"
                )

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Swap BN modules of ``pl_module.model``, the only allowed change of a forward pass."""

    def change_batches(
        self, pl_module: "FederatedModule", client_ids: Sequence[int], batches: BatchStack
    ) -> BatchStack:
        """Return changed ``batches`` of an attack; called only if the role is ``attack``."""
        return batches

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Act before the local steps, when every row is a copy of the server's state."""

    def on_after_local_backward(
        self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort, step: int
    ) -> None:
        """Act after local step ``step`` (from 0) has set the gradients ``cohort.grads``."""

    def on_local_step_end(
        self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort, step: int
    ) -> None:
        """Act after the client optimizer has taken local step ``step`` (from 0)."""

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Act after the last local step; the hook may change the rows, which the clients send."""

    def on_after_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Correct the server's update, ``cohort.pseudo_gradient`` or averaged ``server_buffers``."""

    def on_round_end(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Act after the server step."""

    def on_round_skipped(
        self, trainer: L.Trainer, pl_module: "FederatedModule"
    ) -> tuple[Mapping[int, tuple[int, int]], int]:
        """Act if the round is skipped, instead of in the remaining hooks.

        Returns:
            The floats by client (see ``extra_traffic``), and exchanges (see ``extra_exchanges``).
        """
        return {}, 0
