"""What a method declares of itself: what it does with each kind of state, what it sends, what it takes for itself."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from fl_lightning.cohort.cohort import Cohort
from fl_lightning.round.context import RunContext

ROLES = ("method", "attack", "observer")
"""In this order hooks are called."""


class Declarations:
    """What a method says of itself, without a module or a trainer.

    Attributes:
        paper: Where the method comes from, for tables; empty for a method of one's own.
        claims: What the method promises beyond the rules for all, for ``verify`` to hold it to.
        examples: Constructor settings with which the method is shown, tested and verified: the usual ones first, those that
            show most of it in a few rounds last.
        needs_joint_forward: Whether the first local step of a round runs one forward pass over all clients together, so
            that layers may exchange inside of it (see ``fl_lightning.batch_norm.joint.cohort_mean``), under any executor.
        sends_for_evaluations: Whether what clients send depends on which rounds are evaluated, as in StaticBN; then
            ``check_val_every_n_epoch`` is part of the run's name.
        role: A hook is called for methods first, then for attacks, which rewrite what clients send, then for observers, which
            change nothing; within a role in the order of the list.
        takes: What only one method of a run can decide, in words (``"client drift"``, ``"the round of the freeze"``, ``"the
            client optimizer's state"``), each with what may be set instead of leaving one of two such methods out; empty
            where nothing may. Two methods that take the same are refused.
    """

    paper: str = ""
    claims: tuple[str, ...] = ()
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    needs_joint_forward: ClassVar[bool] = False
    sends_for_evaluations: ClassVar[bool] = False
    role: ClassVar[Literal["method", "attack", "observer"]] = "method"
    takes: Mapping[str, str] = MappingProxyType({})

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

    def same_until(self, total_rounds: int) -> int | None:
        """Up to which round a run with this method is the run without it, bit for bit.

        A study trains the rounds up to there once for all runs that have them in common. The answer follows from the constructor's
        arguments: it is asked of an object that no run has.

        Args:
            total_rounds: Number of planned rounds.

        Returns:
            That round, >= 0; None where runs differ from the first round on, or where only training can tell.
        """
        return None

    def remark(self, module: RunContext) -> str:
        """Return a remark that follows the method's name in results, tables and pictures, such as "nothing frozen".

        Args:
            module: The run's federated module.
        """
        return ""

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Floats that this method sends on top of the averaged state, per client and round: (upload, download)."""
        return 0, 0

    def extra_traffic(self, cohort: Cohort) -> Mapping[int, tuple[int, int]]:
        """Floats that single clients send beside the round, in the cohort or not: (upload, download) by client id."""
        return {}

    def extra_exchanges(self, cohort: Cohort) -> int:
        """Synchronous exchanges with the server in this round beside the one of the averaged state."""
        return 0
