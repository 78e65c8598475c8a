"""Base classes of methods that freeze BN state after a round T*."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import lightning as L

from fl_lightning.batch_norm.kinds import STATISTICS
from fl_lightning.batch_norm.layers import require_batch_norm
from fl_lightning.methods.callback import FederatedCallback
from fl_lightning.round.context import RunContext

if TYPE_CHECKING:
    from fl_lightning.cohort.cohort import Cohort
    from fl_lightning.round.module import FederatedModule


class Freezing(FederatedCallback):
    """Base class of methods that use batch statistics up to round T*, and then freeze BN state.

    A subclass defines T* in :meth:`last_batch_round`. If nothing else of the subclass affects rounds
    up to T*, the subclass can declare T* in ``same_until``, and runs of a study share these rounds.

    Attributes:
        kinds: Kinds of state that are frozen (see ``fl_lightning.round.policy``).
        milestone: Name of the metric that holds T*. Pictures mark the round T* of every metric whose
            name ends with ``/freeze_round``.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> class FreezeLate(Freezing):
        ...     def last_batch_round(self, total_rounds):
        ...         return total_rounds - 1
        >>> state = train(small_cnn(), blobs(), rounds=4, callbacks=[FreezeLate()])
        >>> int(state["1.num_batches_tracked"])
        3
    """

    kinds: tuple[str, ...] = STATISTICS
    takes = ("the round from which BN state is frozen",)
    milestone = "fixbn/freeze_round"

    @abstractmethod
    def last_batch_round(self, total_rounds: int) -> int | None:
        """Return T*, the last round with batch statistics; None if T* is not known yet."""

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that the state of ``kinds`` is averaged up to round T*, and frozen after T*."""
        last = self.last_batch_round(total_rounds)
        if last is not None and round_number > last:
            return dict.fromkeys(self.kinds, "frozen")
        return {kind: "averaged" for kind in self.kinds if kind != "counter"}

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Check that the model has the state to freeze.

        Raises:
            ConfigurationError: The model has no BN layer, or a BN layer lacks the running
                statistics that the method freezes.
        """
        require_batch_norm(pl_module.model, type(self).__name__, statistics="mean" in self.kinds)

    def on_train_start(self, trainer: L.Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]  # a run's module has this type
        """Print a line if training ends before BN state is frozen."""
        if self.remark(pl_module):
            last, rounds = self.last_batch_round(pl_module.planned_rounds), _last_round(pl_module)
            name = type(self).__name__
            pl_module.print(
                f"{name}: T* = {last}, and training ends with round {rounds}: nothing is frozen in this run."
            )

    def remark(self, module: RunContext) -> str:
        """Return "nothing frozen" if training ends before BN state is frozen, else ""."""
        if module.total_rounds is None:
            return ""
        last = self.last_batch_round(module.planned_rounds)
        return "nothing frozen" if last is not None and last >= _last_round(module) else ""

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Log T* as a metric of the run after round T*, since other runs may share earlier rounds."""
        last = self.last_batch_round(pl_module.planned_rounds)
        if last is not None and cohort.round > last:
            pl_module.log(self.milestone, float(last))


def _last_round(module: RunContext) -> int:
    limit = module.trainer.fit_loop.max_epochs
    return module.planned_rounds if limit in (None, -1) else limit


class FoundFreezing(Freezing):
    """Base class of methods that find T*, the last round before BN freezes, during training.

    Attributes:
        freeze_round: T*, or None until the method has found T*.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> class FreezeAtOnce(FoundFreezing):
        ...     def on_round_end(self, trainer, pl_module, cohort):
        ...         if self.freeze_round is None:
        ...             self.freeze_after(pl_module, cohort.round)
        >>> state = train(small_cnn(), blobs(), rounds=3, callbacks=[FreezeAtOnce()])
        FreezeAtOnce: T* = 1; BN is frozen from round 2 on.
    """

    freeze_round: int | None = None
    saved: tuple[str, ...] = ("freeze_round",)

    def last_batch_round(self, total_rounds: int) -> int | None:
        """Return T*; None until the method has found T*."""
        return self.freeze_round

    def undecided(self) -> Mapping[str, str]:
        """Declare that the state of ``kinds`` may be frozen later, unless T* is known."""
        return dict.fromkeys(self.kinds, "frozen") if self.freeze_round is None else {}

    def freeze_after(self, pl_module: "FederatedModule", round_number: int) -> None:
        """Set T* to ``round_number``, then log and print T*."""
        self.freeze_round = round_number
        pl_module.log(self.milestone, float(round_number))
        name = type(self).__name__
        pl_module.print(f"{name}: T* = {round_number}; BN is frozen from round {round_number + 1} on.")
