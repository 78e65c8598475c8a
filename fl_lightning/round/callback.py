"""The hooks of a communication round: a method of the literature is a subclass of :class:`FederatedCallback`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import lightning as L

from fl_lightning.batch_norm.swapping import restore_batch_norm
from fl_lightning.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from fl_lightning.cohort.cohort import Cohort
    from fl_lightning.round.module import FederatedModule


class UnknownHookError(ConfigurationError, TypeError):
    """A class has a hook that nothing calls: a mistake in the class, which the command line tells in one line."""


class FederatedCallback(L.Callback):
    """A method: it says what is averaged, kept or frozen (:meth:`policy`) and changes a round through its hooks.

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

    Before each hook torch's global generator is seeded from (seed, class, hook, round, step): what a hook draws with
    ``torch.rand`` and its like depends on neither the executor nor on earlier draws, and is the same after a resume.

    A hook name that does not exist (``on_rond_start``) is an error when the class is made, in a mixin too.

    Attributes:
        paper: Where the method comes from, for tables; empty for a method of one's own.
        claims: What the method promises beyond the rules for all, for ``verify`` to hold it to.
        needs_joint_forward: Whether the first local step of a round runs one forward pass over all clients together, so
            that layers may exchange inside of it (see ``fl_lightning.batch_norm.joint.cohort_mean``), under any executor.
        keeps_optimizer_state: Whether clients keep their optimizer's state (momentum) from round to round.
    """

    paper: str = ""
    claims: tuple[str, ...] = ()
    needs_joint_forward: ClassVar[bool] = False
    keeps_optimizer_state: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = {name for base in FederatedCallback.__mro__ for name in vars(base) if name.startswith("on_")}
        # a mixin is no FederatedCallback: nobody has looked at its names yet
        for base in cls.__mro__:
            if base in FederatedCallback.__mro__ or base.__module__.startswith("lightning."):
                continue
            for name in vars(base):
                if name.startswith("on_") and name not in known:
                    raise UnknownHookError(
                        f"{base.__name__}.{name} is not a hook of FederatedCallback{nearest(name, known)}"
                    )

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """What this method does with each kind of state in a round.

        Args:
            round_number: The communication round, from 1.
            total_rounds: Number of planned rounds.

        Returns:
            Treatments by kind (see ``fl_lightning.round.policy``), such as ``{"mean": "frozen", "var": "frozen"}``; kinds
            that are left out stay averaged.
        """
        return {}

    def undecided(self) -> Mapping[str, str]:
        """Treatments by kind that begin in a round which only training can tell: :meth:`policy` does not know it yet.

        Until then the policy table says so in words, and methods that could not be combined with it are refused.
        """
        return {}

    def extra_payload(self, cohort: "Cohort") -> tuple[int, int]:
        """Floats that this method sends on top of the averaged state, per client and round: (upload, download)."""
        return 0, 0

    def extra_traffic(self, cohort: "Cohort") -> Mapping[int, tuple[int, int]]:
        """Floats that single clients send beside the round, in the cohort or not: (upload, download) by client id."""
        return {}

    def extra_exchanges(self, cohort: "Cohort") -> int:
        """Synchronous exchanges with the server in this round beside the one of the averaged state."""
        return 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Call :meth:`configure_batch_norm` once, before training."""
        if stage == "fit":
            module: FederatedModule = pl_module  # type: ignore[assignment]  # rounds have one
            if self is module.federated_callbacks[0]:
                restore_batch_norm(module.model)  # a fit that failed may have left them
            self.configure_batch_norm(module)

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Swap BN modules of ``pl_module.model`` by type: the only way in which a callback changes a forward pass."""

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Called when every row of the cohort is a copy of the server's state."""

    def on_after_local_backward(
        self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort", step: int
    ) -> None:
        """Called when ``cohort.grads`` holds the gradients of local step ``step`` (from 0)."""

    def on_local_step_end(
        self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort", step: int
    ) -> None:
        """Called after the client optimizer has taken local step ``step`` (from 0)."""

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Called after the last local step, when the rows are what the clients send."""

    def on_round_end(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Called after the server step."""
