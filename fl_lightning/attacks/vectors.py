"""Attacks on messages, by omniscient attackers: they know the messages of the honest clients.

Each attack has a function from the honest rows ``[h, d]`` to the vector ``[d]`` that all attackers
send, and a class for configurations. ``origin`` selects the formula of a paper or library.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.aggregation import WeightedMean
from fl_lightning.attacks.base import Attack, Message
from fl_lightning.attacks.search import Search, search
from fl_lightning.errors import ConfigurationError, check_choice

Origin = Literal["byzfl", "paper", "blades"]
_ORIGINS = ("byzfl", "paper", "blades")
_SEARCHES = ("fixed", "byzfl", "grid")


def sign_flip(honest: Tensor) -> Tensor:
    """Return the negated mean (Allen-Zhu et al. 2021, arXiv 2012.14368), ``[h, d] -> [d]``."""
    return -honest.mean(0)


def fall_of_empires(honest: Tensor, tau: float = 2.0) -> Tensor:
    """Return ``-tau`` times the mean (Xie et al. 2020, arXiv 1903.03936), ``[h, d] -> [d]``."""
    return -tau * honest.mean(0)


def a_little_is_enough(honest: Tensor, tau: float = 1.5, *, ddof: int = 1) -> Tensor:
    """Return the mean plus ``tau`` standard deviations (Baruch et al. 2019, arXiv 1902.06156).

    Args:
        honest: Vectors of the honest clients, ``[h, d]``.
        tau: Number of standard deviations; may be negative.
        ddof: The divisor of the standard deviation is h - ddof.

    Raises:
        ConfigurationError: h is ``ddof`` or less.
    """
    if len(honest) <= ddof:
        raise ConfigurationError(
            f"a_little_is_enough: {len(honest)} honest clients have no standard deviation with ddof={ddof}; it needs {ddof + 1}"
        )
    return honest.mean(0) + tau * honest.std(0, correction=ddof)


def a_little_factor(num_clients: int, f: int) -> float:
    """Return the paper's factor z, beyond which s honest clients are expected.

    ``z = Phi^-1((n - f - s) / (n - f))``, where ``s = floor(n/2) + 1 - f`` honest clients and the
    attackers form a majority (Baruch et al., Section 3.2).

    Args:
        num_clients: Clients in the round, n.
        f: Attackers in the round.

    Raises:
        ConfigurationError: The attackers are a majority alone, or need all honest clients for one.
    """
    honest = num_clients - f
    supporters = num_clients // 2 + 1 - f
    if not 0 < supporters < honest:
        raise ConfigurationError(
            f"a_little_factor: {f} of {num_clients} clients attack and need none or all of the others for a majority; set tau"
        )
    return NormalDist().inv_cdf((honest - supporters) / honest)


def gaussian(
    honest: Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Draw a vector of independent normal numbers of the rows' width, ``[h, d] -> [d]``."""
    drawn = torch.randn(honest.shape[1], generator=generator, dtype=honest.dtype)
    return (mean + std * drawn).to(honest.device)


def mimic(honest: Tensor, client: int = 0) -> Tensor:
    """Return one honest client's vector (Karimireddy et al. 2022, arXiv 2006.09365).

    Args:
        honest: Vectors of the honest clients, ``[h, d]``.
        client: Index of the client, from 0, modulo h.
    """
    return honest[client % len(honest)]


class SignFlip(Attack):
    """The negated honest mean (Allen-Zhu et al. 2021, arXiv 2012.14368)."""

    least_honest = 1

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return the negated mean of each message."""
        return [sign_flip(message.honest) for message in messages]


class Scaled(Attack, ABC):
    """An attack with a fixed or searched factor, which is the same for all messages.

    A search maximises the distance between the messages' aggregates and honest means. It ignores
    messages whose rule is a weighted mean, as their distance has no maximum. If all messages are
    ignored, the fixed factor is used.

    Args:
        tau: Fixed factor; default: the factor of ``origin``.
        search: ``"fixed"`` for ``tau``; ``"byzfl"`` or ``"grid"`` for a search, see
            :func:`~fl_lightning.attacks.search.search`.
        origin: Source of the formula: ``"byzfl"``, ``"paper"`` or ``"blades"``.

    Raises:
        ConfigurationError: The origin or search is unknown.

    Attributes:
        factors: Default factor by origin.
    """

    least_honest = 1
    factors: ClassVar[Mapping[Origin, float]]

    def __init__(self, tau: float | None = None, search: Search = "fixed", origin: Origin = "byzfl") -> None:
        check_choice(f"{type(self).__name__}.origin", origin, _ORIGINS)
        check_choice(f"{type(self).__name__}.search", search, _SEARCHES)
        self.tau, self.search, self.origin = tau, search, origin

    @abstractmethod
    def vector(self, message: Message, factor: float) -> Tensor:
        """Return the attackers' vector ``[d]`` for a message and a factor."""

    def fixed(self, message: Message) -> float:
        """Return the factor that is used without a search."""
        return self.factors[self.origin] if self.tau is None else self.tau

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return the attackers' vector for each message, with one factor for all."""
        if not messages:
            return []
        factor = self.fixed(messages[0])
        robust = [message for message in messages if not isinstance(message.rule, WeightedMean)]
        if self.search != "fixed" and robust:
            factor = search(self._harm(robust), self.search)
        return [self.vector(message, factor) for message in messages]

    def _harm(self, messages: list[Message]) -> Callable[[float], float]:
        means = [message.honest.mean(0) for message in messages]

        def harm(factor: float) -> float:
            pairs = zip(messages, means, strict=True)
            moved = [m.aggregate(self.vector(m, factor)) - mean for m, mean in pairs]
            return float(torch.cat(moved).norm())

        return harm


class FallOfEmpires(Scaled):
    """``-tau`` times the honest mean (Xie et al. 2020, "Fall of Empires", arXiv 1903.03936).

    ``tau`` defaults to 2 for the origin ``"byzfl"``, 1 for ``"blades"``, 0.1 for ``"paper"``
    (epsilon).
    """

    factors: ClassVar = {"byzfl": 2.0, "blades": 1.0, "paper": 0.1}

    def vector(self, message: Message, factor: float) -> Tensor:
        """Return the honest mean times ``-factor``."""
        return fall_of_empires(message.honest, factor)


class ALittleIsEnough(Scaled):
    r"""The honest mean and ``tau`` standard deviations (Baruch et al. 2019, arXiv 1902.06156).

    ================  =======  =====================================  ============  ==========================================
    origin            sign     tau                                    divisor       mean and deviation of
    ================  =======  =====================================  ============  ==========================================
    ``"byzfl"``       \+       1.5                                    h - 1         the honest clients
    ``"blades"``      \+       :func:`a_little_factor`                h - 1         the honest clients
    ``"paper"``       \-       1.5                                    f             the attackers' own vectors
    ================  =======  =====================================  ============  ==========================================
    """

    factors: ClassVar = {"byzfl": 1.5, "blades": 1.5, "paper": 1.5}

    def __init__(self, tau: float | None = None, search: Search = "fixed", origin: Origin = "byzfl") -> None:
        super().__init__(tau, search, origin)
        self.least_honest = 0 if origin == "paper" else 2

    def fixed(self, message: Message) -> float:
        """Return ``tau``, or Blades' factor, which depends on the numbers of clients."""
        if self.tau is None and self.origin == "blades":
            return a_little_factor(len(message.weights), len(message.own))
        return super().fixed(message)

    def vector(self, message: Message, factor: float) -> Tensor:
        """Return the mean plus or minus ``factor`` standard deviations."""
        if self.origin == "paper":
            return a_little_is_enough(message.own, -factor, ddof=0)
        return a_little_is_enough(message.honest, factor)


class Gaussian(Attack):
    """Independent normal numbers, drawn for each attacker.

    Args:
        mean: Mean of the numbers.
        std: Standard deviation of the numbers.
    """

    def __init__(self, mean: float = 0.0, std: float = 1.0) -> None:
        self.mean, self.std = mean, std

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Draw normal numbers for each attacker and message."""
        return [
            torch.stack([gaussian(message.own, self.mean, self.std) for _ in message.own])
            for message in messages
        ]


class Mimic(Attack):
    """A copy of an honest client's vector (Karimireddy et al. 2022, arXiv 2006.09365).

    Args:
        client: Index of the client among the round's honest clients, from 0.
    """

    least_honest = 1

    def __init__(self, client: int = 0) -> None:
        self.client = client

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return the client's messages."""
        return [mimic(message.honest, self.client) for message in messages]


class NonFinite(Attack):
    """A vector of non-finite values, to test how a rule handles them.

    Args:
        value: ``nan``, ``inf`` or ``-inf``.
    """

    def __init__(self, value: Literal["nan", "inf", "-inf"] = "nan") -> None:
        check_choice("NonFinite.value", value, ("nan", "inf", "-inf"))
        self.value = value

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return vectors filled with the value."""
        return [torch.full_like(message.own, float(self.value)) for message in messages]
