"""Properties that a method declares, such as network traffic and the treatment of state."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from fl_lightning.cohort.cohort import Cohort

ROLES = ("method", "attack", "observer")
"""Roles of callbacks, in the order in which their hooks are called."""


class Declarations:
    """Properties that a method declares before a run.

    Attributes:
        paper: The method's paper, for tables; empty for a new method.
        equalities: Names of equalities that the method promises. ``verify`` checks these equalities in
            addition to the rules for all methods.
        examples: Example settings of the constructor, for pages, tests and ``verify``. The first
            example has typical settings. The last example suits a run of a few rounds.
        needs_joint_forward: Whether all clients share one forward pass in the first local step of a
            round. Layers can then exchange values between clients, see
            ``fl_lightning.batch_norm.joint.cohort_mean``.
        sends_for_evaluations: Whether evaluations cause traffic, as in StaticBN. If so,
            ``check_val_every_n_epoch`` is part of the run's hash.
        per_sample: Whether local steps need the gradient of each sample, of batches that are Poisson
            samples. BN layers must then not normalise with batches, and ``verify`` uses Group
            Normalization.
        needs: Settings of ``FederatedModule`` without which the method refuses to run, such as
            ``{"weighting": "uniform"}``. ``verify`` uses them.
        role: ``"method"``, ``"attack"`` (changes what clients send) or ``"observer"`` (only reads).
            In each round, hooks of methods are called first, and hooks of observers last.
        takes: Resources that only one method of a run may control, such as ``"client drift"``. In a
            mapping, the values are remedies for the error message.
    """

    paper: str = ""
    equalities: tuple[str, ...] = ()
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    needs_joint_forward: ClassVar[bool] = False
    sends_for_evaluations: ClassVar[bool] = False
    per_sample: ClassVar[bool] = False
    needs: ClassVar[Mapping[str, Any]] = {}
    role: ClassVar[Literal["method", "attack", "observer"]] = "method"
    takes: Mapping[str, str] | tuple[str, ...] = ()

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Return how a round treats kinds of state and parts of the model.

        Args:
            round_number: The communication round, from 1.
            total_rounds: Number of planned rounds.

        Returns:
            Treatments by kind of state or part of the model (see ``fl_lightning.cohort.parts``),
            such as ``{"mean": "frozen", "fc": "local"}``. All other kinds are averaged.
        """
        return {}

    def undecided(self) -> Mapping[str, str]:
        """Return treatments that start in a round that is unknown before training.

        The keys are kinds of state. Another method must not declare a conflicting treatment.
        """
        return {}

    def same_until(self, total_rounds: int) -> int | None:
        """Return the number of rounds, from round 1 on, in which this method has no effect.

        Runs of a study can share these rounds, so up to this number a run must equal a run without
        this method, bit for bit, in its state and its metrics. The number depends only on constructor arguments. Studies ignore
        an inherited declaration, because a subclass may change earlier rounds. They also ignore a
        method with an argument that is an object of another class.

        Args:
            total_rounds: Number of planned rounds.

        Returns:
            The number of rounds, at least 0. None if the method changes round 1, or if training
            determines the number.
        """
        return None

    def remark(self, module: Any) -> str:
        """Return a remark on the run for results and figures, such as ``"nothing frozen"``."""
        return ""

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Return how many floats each client sends and receives besides the averaged state."""
        return 0, 0

    def extra_traffic(self, cohort: Cohort) -> Mapping[int, tuple[int, int]]:
        """Return the additional floats that single clients send and receive, by client id.

        The clients need not be in the cohort.
        """
        return {}

    def extra_exchanges(self, cohort: Cohort) -> int:
        """Return the number of exchanges with the server besides the exchange of averaged state."""
        return 0


def in_order(callbacks: Iterable[Any]) -> list[Any]:
    """Return the methods among a trainer's callbacks, sorted by role.

    Methods with the same role keep their order.
    """
    methods = [callback for callback in callbacks if isinstance(callback, Declarations)]
    return sorted(methods, key=lambda method: ROLES.index(method.role))


def numbered(methods: Iterable[Any], hook: str) -> Iterator[tuple[Any, int, str]]:
    """Yield methods with their number among the methods of the same class, and a name of the hook.

    The name, such as ``"FedProx.on_round_start"``, differs for each method of a run.
    """
    seen: Counter[type] = Counter()
    for method in methods:
        kind = type(method)
        number, seen[kind] = seen[kind], seen[kind] + 1
        yield method, number, f"{kind.__name__}.{hook}{f' {number}' if number else ''}"
