"""Declarations of a method: treatment of state, network traffic and exclusive resources."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fl_lightning.cohort.cohort import Cohort
from fl_lightning.round.context import RunContext

ROLES = ("method", "attack", "observer")
"""Roles of callbacks. Hooks are called in the order of these roles."""


class Declarations:
    """Declarations of a method, which are known without a module or a trainer.

    Attributes:
        paper: The method's paper, for tables; empty for a new method.
        claims: Equalities that the method promises in addition to the rules for all methods.
            ``verify`` checks them.
        examples: Constructor settings with which pages, tests and ``verify`` make the method. The
            first example has typical settings. The settings of the last example suit a run of a few
            rounds, and use most of the method.
        needs_joint_forward: Whether the first local step of a round is one forward pass over all
            clients, so that layers can exchange values between clients (see
            ``fl_lightning.batch_norm.joint.cohort_mean``).
        sends_for_evaluations: Whether evaluations cause traffic, as in StaticBN. If so,
            ``check_val_every_n_epoch`` is part of the run's hash.
        role: ``"method"``, ``"attack"`` (changes what clients send) or ``"observer"`` (only reads).
            Hooks are called by role in this order, and within a role in the order of the list.
        takes: Resources that the method must control alone, such as ``"client drift"``. A run with
            two methods that take the same resource is refused. If this is a mapping, its values are
            settings that avoid the conflict.
        logs: Prefixes of the metrics that the method logs in rounds, such as ``("bn/",)``. If the
            method has evaluation metrics that are missing before round 1, their prefixes belong
            here as well. Callbacks may monitor these metrics.
    """

    paper: str = ""
    claims: tuple[str, ...] = ()
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    needs_joint_forward: ClassVar[bool] = False
    sends_for_evaluations: ClassVar[bool] = False
    role: ClassVar[Literal["method", "attack", "observer"]] = "method"
    takes: Mapping[str, str] | tuple[str, ...] = ()
    logs: tuple[str, ...] = ()

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Return how this method treats kinds of state and parts of the model in a round.

        Args:
            round_number: The communication round, from 1.
            total_rounds: Number of planned rounds.

        Returns:
            Treatments by kind of state or part of the model (see ``fl_lightning.cohort.parts``),
            such as ``{"mean": "frozen", "fc": "local"}``. Kinds without an entry keep the default:
            they are averaged.
        """
        return {}

    def undecided(self) -> Mapping[str, str]:
        """Return the treatments whose first round is known only during training.

        The keys are kinds of state. The policy table lists these treatments. A run is refused if
        another method declares a conflicting treatment.
        """
        return {}

    def same_until(self, total_rounds: int) -> int | None:
        """Return for how many rounds a run equals a run without this method, bit for bit.

        A study trains such shared rounds once. The number depends only on constructor arguments.

        Args:
            total_rounds: Number of planned rounds.

        Returns:
            The number of rounds, >= 0. None if round 1 differs, or if training determines the
            number.
        """
        return None

    def remark(self, module: RunContext) -> str:
        """Return a remark on the run for results and figures, such as ``"nothing frozen"``."""
        return ""

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Return how many floats each client sends and receives besides the averaged state."""
        return 0, 0

    def extra_traffic(self, cohort: Cohort) -> Mapping[int, tuple[int, int]]:
        """Return how many additional floats single clients send and receive.

        The keys are client ids. The clients need not be in the cohort.
        """
        return {}

    def extra_exchanges(self, cohort: Cohort) -> int:
        """Return the number of additional exchanges with the server.

        The exchange of the averaged state is not counted.
        """
        return 0
