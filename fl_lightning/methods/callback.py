"""The hooks of a communication round: a method of the literature is a subclass of :class:`FederatedCallback`."""

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
    """A method: it says what is averaged, kept or frozen (``policy``) and changes a round through its hooks.

    Unlike Lightning's callbacks these are essential: a run without its callback is another algorithm. One round is ::

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
            server gradient <- server - aggregate(cohort)            # the pseudo-gradient
            on_before_optimizer_step(trainer, pl_module, optimizer)  # Lightning's own hook
            server <- one step of the server optimizer
            on_round_end(trainer, pl_module, cohort)

    Every tensor of the cohort has the client axis first. What a method remembers about clients between rounds belongs
    in its ``state_dict()``, as plain tensors and numbers keyed by client id: then a resumed run is exact.

    A client whose update is not finite is left out under ``on_divergence: drop``, before ``on_before_aggregate`` and again after
    it: the cohort of the hooks that follow has fewer clients than that of ``on_round_start``, and its ``rows`` say which. A round
    that too few are left of, or too few report in, is skipped: ``on_round_skipped(trainer, pl_module)`` takes the place of its
    remaining hooks.

    Before each hook torch's global generator is seeded from (seed, class, hook, round, step): what a hook draws with
    ``torch.rand`` and its like depends on neither the executor nor on earlier draws, and is the same after a resume.

    Several ranks share the clients of a run, and give the numbers of one, if hooks keep to this:

    - ``on_round_start``, ``on_before_aggregate``, ``on_round_end`` and Lightning's hooks see the whole cohort on every rank, and
      must do the same on each: no clock, no process number, no random numbers but torch's global ones.
    - ``on_after_local_backward`` and ``on_local_step_end`` get the rows of their rank, ``cohort.rows`` of the whole cohort, maybe
      none. They change nothing but rows, and ``cohort.mean`` raises there. What they keep for clients lies in ``cohort.extra``,
      which ``on_round_start`` fills with tensors ``[C, ...]``, not on ``self``; what they draw comes from ``cohort.generators``.

    A hook name that does not exist (``on_rond_start``) is an error when the class is made, in a mixin too.
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
        """Swap BN modules of ``pl_module.model`` by type: the only way in which a callback changes a forward pass."""

    def change_batches(
        self, pl_module: "FederatedModule", client_ids: Sequence[int], batches: BatchStack
    ) -> BatchStack:
        """The batches that an attack lets clients train on instead of theirs: called for the role ``attack`` only."""
        return batches

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Called when every row of the cohort is a copy of the server's state."""

    def on_after_local_backward(
        self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort, step: int
    ) -> None:
        """Called when ``cohort.grads`` holds the gradients of local step ``step`` (from 0)."""

    def on_local_step_end(
        self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort, step: int
    ) -> None:
        """Called after the client optimizer has taken local step ``step`` (from 0)."""

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Called after the last local step, when the rows are what the clients send."""

    def on_round_end(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Called after the server step."""

    def on_round_skipped(
        self, trainer: L.Trainer, pl_module: "FederatedModule"
    ) -> tuple[Mapping[int, tuple[int, int]], int]:
        """Called when a round is skipped, in place of its remaining hooks.

        Returns:
            Floats that single clients send nonetheless, as in ``extra_traffic``, and exchanges, as in ``extra_exchanges``.
        """
        return {}, 0
