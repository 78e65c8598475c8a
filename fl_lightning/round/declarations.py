"""The declarations of a method: treatment of state, traffic and exclusive resources."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from fl_lightning.cohort.cohort import Cohort
from fl_lightning.round.context import RunContext

ROLES = ("method", "attack", "observer")
"""The order in which hooks are called."""


class Declarations:
    """The declarations of a method, available without a module or a trainer.

    Attributes:
        paper: The method's paper, for tables; empty for a new method.
        claims: The method's guarantees beyond the general rules; ``verify`` checks them.
        examples: Constructor settings for pages, tests and ``verify``. The first are the usual
            settings; the last show most of the method within a few rounds.
        needs_joint_forward: Whether the first local step of a round is one forward pass over all
            clients under any executor, so that layers may exchange values inside the pass (see
            ``fl_lightning.batch_norm.joint.cohort_mean``).
        sends_for_evaluations: Whether evaluations cause traffic, as in StaticBN. Then
            ``check_val_every_n_epoch`` is part of the run's name.
        role: Position in the order of hooks: methods, then attacks, which rewrite what clients
            send, then observers, which only read. Within a role the order is the list's.
        takes: Resources that only one method of a run can control, such as ``"client drift"``, each
            with the setting that avoids a conflict (empty if there is none). A run with two methods
            that take the same resource is refused.
        logs: Prefixes of the metrics that the method logs in rounds, such as ``("bn/",)``, and of
            evaluation metrics that are missing before round 1. Callbacks may monitor these metrics.
    """

    paper: str = ""
    claims: tuple[str, ...] = ()
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    needs_joint_forward: ClassVar[bool] = False
    sends_for_evaluations: ClassVar[bool] = False
    role: ClassVar[Literal["method", "attack", "observer"]] = "method"
    takes: Mapping[str, str] = MappingProxyType({})
    logs: tuple[str, ...] = ()

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Return this method's treatment of kinds of state and parts of the model in a round.

        Args:
            round_number: The communication round, from 1.
            total_rounds: Number of planned rounds.

        Returns:
            Treatments by kind of state or part of the model (see ``fl_lightning.cohort.parts``),
            such as ``{"mean": "frozen", "fc": "local"}``. Kinds without an entry are averaged.
        """
        return {}

    def undecided(self) -> Mapping[str, str]:
        """Return the treatments, by kind, whose first round only training determines.

        The policy table shows them in words. Methods that conflict with them are refused.
        """
        return {}

    def same_until(self, total_rounds: int) -> int | None:
        """Return the last round until which a run equals, bit for bit, a run without this method.

        A study trains such shared rounds once. The answer depends only on constructor arguments.

        Args:
            total_rounds: Number of planned rounds.

        Returns:
            The round, >= 0; None if round 1 differs or only training determines the round.
        """
        return None

    def remark(self, module: RunContext) -> str:
        """Return a remark on the run for results and figures, such as "nothing frozen"."""
        return ""

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Return the floats per client beside the averaged state: (upload, download)."""
        return 0, 0

    def extra_traffic(self, cohort: Cohort) -> Mapping[int, tuple[int, int]]:
        """Return further floats by client id, in the cohort or not: (upload, download)."""
        return {}

    def extra_exchanges(self, cohort: Cohort) -> int:
        """Return the number of exchanges with the server beside that of the averaged state."""
        return 0
