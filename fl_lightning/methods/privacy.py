"""Base class of methods with differential privacy, whose budget an accountant of Opacus computes.

``fl_lightning`` simulates a federation: torch's random numbers are not cryptographic, and samples,
losses and metrics of a run are not protected. The guarantee is for what clients send.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal

import lightning as L

from fl_lightning.errors import ConfigurationError, check_choice, check_number
from fl_lightning.methods.callback import FederatedCallback
from fl_lightning.methods.privacy_audit import CONFIDENCE, Audit, audit
from fl_lightning.methods.run_report import Report, Table
from fl_lightning.round.declarations import Declarations

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule

History = tuple[tuple[float, float, int], ...]
"""Steps of a mechanism: (noise in units of the clipping norm, sampling rate, number of steps)."""

_MOST_NOISE = 1e4


def _opacus(user: str) -> None:
    try:
        import_module("opacus.accountants")
    except ImportError as error:
        raise ConfigurationError(
            f"{user}: its accountant is that of Opacus, which is not installed; run pip install 'fl_lightning[privacy]'"
        ) from error


@cache
def epsilon_of(history: History, delta: float, accountant: Literal["rdp", "prv"] = "rdp") -> float:
    """Return epsilon of the subsampled Gaussian mechanism, computed by an accountant of Opacus.

    Args:
        history: All steps that have used the data.
        delta: Probability delta of (epsilon, delta)-differential privacy.
        accountant: Rényi differential privacy (``"rdp"``; Mironov, arXiv 1702.07476), or privacy
            random variables (``"prv"``; Gopi et al., arXiv 2106.02848), which is tighter and slower.

    Returns:
        Epsilon; 0 without steps, infinity without noise.

    Example:
        >>> round(epsilon_of(((1.0, 0.01, 1000),), 1e-5), 6)
        2.101365
    """
    from opacus.accountants import create_accountant

    taken = [step for step in history if step[2]]
    if not taken or any(noise == 0 for noise, _, _ in taken):
        return math.inf if taken else 0.0
    counter = create_accountant(accountant)
    counter.history = taken
    with warnings.catch_warnings():
        # if the largest or smallest order of RDP is the best one, the bound is valid, but could be lower
        warnings.filterwarnings("ignore", "Optimal order is the (largest|smallest) alpha")
        # PRV with rate 1 takes the logarithm of 0 where no mass is
        warnings.filterwarnings("ignore", "divide by zero", RuntimeWarning)
        return float(counter.get_epsilon(delta=delta))


def noise_for(
    epsilon: float,
    delta: float,
    rate: float,
    steps: int,
    accountant: Literal["rdp", "prv"],
    before: History = (),
) -> float:
    """Return the smallest noise, up to 0.1 %, with which ``steps`` steps after ``before`` have at most ``epsilon``.

    Raises:
        ConfigurationError: No noise is enough.
    """

    def found(noise: float) -> float:
        return epsilon_of((*before, (noise, rate, steps)), delta, accountant)

    low, high = 0.0, 1.0
    while found(high) > epsilon:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise ConfigurationError(
                f"epsilon: {epsilon} cannot be reached in {steps} steps at delta {delta} by the accountant {accountant}; raise epsilon"
                f"{' or statistics_noise' if before else ''}{', or set accountant: prv' if accountant == 'rdp' else ''}"
            )
    while high - low > 0.001 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) > epsilon else (low, middle)
    return high


class PrivateMethod(Report, FederatedCallback):
    """Base class of methods with differential privacy.

    A subclass calls :meth:`start` when training starts, :meth:`begin_round` in each round, and
    :meth:`count` for the steps of a unit of privacy.

    Args:
        clip: Largest norm C, above 0, of what one unit of privacy contributes. Infinity: no
            clipping, which needs ``noise: 0``.
        noise: Standard deviation of the noise, in units of ``clip``. With 0, there is no privacy.
        epsilon: Epsilon at the end of the planned rounds, from which the noise is computed. Give
            either ``noise`` or ``epsilon``.
        delta: Delta of (epsilon, delta)-differential privacy, in (0, 1). It should be below 1 / the
            number of units.
        accountant: Accountant of Opacus: ``"rdp"``, or ``"prv"``, which is tighter and slower.

    Attributes:
        unit: What is protected, for the result.
        metric: Name of the metric with the largest epsilon.
        planned_noise: The noise in use. It is known when training starts.
        history: Steps so far, as lists ``[noise, sampling rate, steps]`` by client id; key -1 stands for
            all clients.
        audited: Lower bound of epsilon after training; None if the data have no canaries.

    Raises:
        ConfigurationError: A setting is out of range, or Opacus is not installed.

    Example:
        >>> method = PrivateMethod(clip=1.0, noise=1.0)
        >>> method.count(0, noise=1.0, rate=0.01, steps=1000)
        >>> round(method.epsilons()["client 0"], 6)
        2.101365
    """

    unit = ""
    metric = "privacy/epsilon"
    saved: tuple[str, ...] = ("planned_noise", "planned_epsilon", "history", "last_round")

    def __init__(
        self,
        clip: float,
        noise: float | None = None,
        epsilon: float | None = None,
        delta: float = 1e-5,
        accountant: Literal["rdp", "prv"] = "rdp",
    ) -> None:
        name = type(self).__name__
        check_number(f"{name}.clip", clip, " (.inf with noise: 0 clips nothing)", above=0)
        check_number(f"{name}.delta", delta, "; usual is less than 1 / the number of samples", above=0)
        check_choice(f"{name}.accountant", accountant, ("rdp", "prv"))
        if (noise is None) == (epsilon is None):
            raise ConfigurationError(
                f"{name}: noise={noise} and epsilon={epsilon}; give one of the two, such as epsilon: 3"
            )
        if noise is not None:
            check_number(f"{name}.noise", noise, " (0 is no privacy)", least=0)
        if epsilon is not None:
            check_number(f"{name}.epsilon", epsilon, "", above=0)
        if delta >= 1:
            raise ConfigurationError(f"{name}.delta: {delta} must be below 1; use 1e-5")
        if math.isinf(clip) and noise != 0:
            raise ConfigurationError(
                f"{name}.clip: {clip} needs noise: 0, as the noise is proportional to clip; use clip: 1"
            )
        self.clip, self.noise, self.epsilon = clip, noise, epsilon
        self.delta, self.accountant = delta, accountant
        self.planned_noise, self.planned_epsilon = noise or 0.0, 0.0
        self.history: dict[int, list[list[float]]] = {}
        self.last_round = 0
        self.names: dict[int, str] = {-1: "every client"}
        self.audited: Audit | None = None
        if noise != 0:
            _opacus(name)

    def start(self, pl_module: "FederatedModule", plan: Callable[[float], float]) -> None:
        """Check a resumed run, and decide the noise.

        Args:
            pl_module: The run.
            plan: Function that returns the noise for an epsilon.

        Raises:
            ConfigurationError: Earlier rounds of the run had no such method, or another ``epsilon``.
        """
        name = type(self).__name__
        if getattr(pl_module.data, "planted", None) is not None and pl_module.client.logs_itself:
            raise ConfigurationError(
                "data.canaries: the audit needs model.loss, which a LightningModule has not; leave canaries out"
            )
        if pl_module.round - 1 != self.last_round:
            raise ConfigurationError(
                f"{name}: rounds {self.last_round + 1} to {pl_module.round - 1} of the resumed run trained without it, so epsilon would be "
                "wrong; start a new run, from public weights or without ckpt_path"
            )
        if self.epsilon is None:
            self.planned_noise = self.noise or 0.0
        elif not self.history:
            self.planned_noise, self.planned_epsilon = plan(self.epsilon), self.epsilon
        elif self.planned_epsilon != self.epsilon:
            raise ConfigurationError(
                f"{name}.epsilon: {self.epsilon} is not that of the resumed run, {self.planned_epsilon or 'which had noise'}; leave the "
                "setting as it was"
            )

    def begin_round(self, pl_module: "FederatedModule") -> bool:
        """Note a round, and return whether it is new."""
        is_new, self.last_round = pl_module.round != self.last_round, pl_module.round
        return is_new

    def count(self, unit: int, noise: float, rate: float, steps: int) -> None:
        """Add steps to the history of a client, or of all clients (-1)."""
        segments = self.history.setdefault(unit, [])
        if not segments or segments[-1][:2] != [noise, rate]:
            segments.append([noise, rate, 0])
        segments[-1][2] += steps

    def histories(self) -> dict[str, History]:
        """Return the steps so far, keyed by the name of the client."""
        return {
            self.names.get(unit, f"client {unit}"): tuple(
                (noise, rate, int(n)) for noise, rate, n in segments
            )
            for unit, segments in sorted(self.history.items())
        }

    def epsilons(self) -> dict[str, float]:
        """Return the epsilon so far, keyed by the name of the client or of the server."""
        return {
            name: epsilon_of(history, self.delta, self.accountant)
            for name, history in self.histories().items()
        }

    def refuse(self, pl_module: "FederatedModule", reason: str = "") -> None:
        """Check that no noise is missing: neither for another method nor for a training without clients.

        Args:
            pl_module: The run.
            reason: A reason of the subclass against the run, if any.

        Raises:
            ConfigurationError: There is a reason.
        """
        if pl_module.centralised:
            reason = "centralised training joins the clients' batches, and has no client's guarantee; leave model.centralised out"
        for method in pl_module.federated_callbacks:
            kind, name = type(method), type(method).__name__
            sends = any(
                getattr(kind, hook) is not getattr(Declarations, hook)
                for hook in ("extra_payload", "extra_traffic")
            )
            if method is not self and (method.needs_joint_forward or (sends and method.role == "method")):
                reason = f"it and {name} cannot be combined: {name} sends values that no noise protects, beside the update; leave one of the two out"
        if reason:
            raise ConfigurationError(f"{type(self).__name__}: {reason}")

    def log_epsilon(self, pl_module: "FederatedModule") -> None:
        """Log the largest epsilon, in rounds with an evaluation and in the last round.

        The accountant ``prv`` is too slow for rounds before the last one.
        """
        is_last = pl_module.round == pl_module.planned_rounds
        if self.planned_noise and (is_last or (self.accountant == "rdp" and pl_module.evaluates_now)):
            pl_module.log_numbers({self.metric: max(self.epsilons().values(), default=0.0)})

    def on_train_end(self, trainer: L.Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]  # a run's module has this type
        """Attack the trained model, if the data have canaries."""
        self.audited = audit(pl_module, self.delta)

    def tables(self) -> Mapping[str, Table]:
        """Return the steps and the epsilon of each client, or of the server."""
        rows: list[list[float | str]] = [
            [name, noise, rate, steps, self.delta, epsilon]
            for (name, history), epsilon in zip(
                self.histories().items(), self.epsilons().values(), strict=True
            )
            for noise, rate, steps in history
        ]
        columns = ["client", "noise", "sampling_rate", "steps", "delta", "epsilon"]
        return {"privacy": Table(columns, rows)} if rows else {}

    def result(self) -> Mapping[str, float]:
        """Return the largest epsilon, if it is finite."""
        largest = max(self.epsilons().values(), default=0.0)
        found = {"privacy/epsilon_lower_bound": self.audited.epsilon} if self.audited else {}
        return found | ({self.metric: largest} if 0 < largest < math.inf else {})

    def result_lines(self) -> Mapping[str, str]:
        """Return the guarantee in words."""
        found = self.epsilons()
        if not (largest := max(found.values(), default=0.0)):
            return {}
        who = f"the largest of {len(found)} clients, " if len(found) > 1 else ""
        line = f"epsilon {largest:.3g} at delta {self.delta:g} ({who}{self.accountant.upper()}); unit: {self.unit}"
        if math.isinf(largest):
            line = "none, as epsilon is infinite or too large for the accountant"
        if any(noise == 0 for history in self.histories().values() for noise, _, _ in history):
            line = "none, as the noise is 0"
        lines = {"privacy": line}
        if (attack := self.audited) is not None:
            refuted = ", above the epsilon of the accountant" if attack.epsilon > largest else ""
            lines["privacy audit"] = (
                f"epsilon is at least {attack.epsilon:.3g} ({CONFIDENCE:.0%} confidence){refuted}; an attack guesses "
                f"{attack.right} of {attack.guesses} right, of {attack.canaries} canaries"
            )
        return lines
