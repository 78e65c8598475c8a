"""Attacks on what clients send, by attackers who know what the honest ones send (algorithms of omniscient attackers).

Each has a pure function of the honest rows ``[h, d]`` that gives the vector ``[d]`` which all attackers send, and a class that
a configuration names. Where the literature and its libraries differ, ``origin`` says whose formula it is.
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
    """The opposite of the honest mean (Allen-Zhu et al. 2021, arXiv 2012.14368), ``[h, d] -> [d]``."""
    return -honest.mean(0)


def fall_of_empires(honest: Tensor, tau: float = 2.0) -> Tensor:
    """``-tau`` times the honest mean (Xie et al. 2020, "Fall of Empires", arXiv 1903.03936), ``[h, d] -> [d]``."""
    return -tau * honest.mean(0)


def a_little_is_enough(honest: Tensor, tau: float = 1.5, *, ddof: int = 1) -> Tensor:
    """The honest mean plus ``tau`` honest standard deviations (Baruch et al. 2019, arXiv 1902.06156), ``[h, d] -> [d]``.

    Args:
        honest: What the honest clients send.
        tau: Number of standard deviations; below 0 on the other side of the mean.
        ddof: The deviation's divisor is h - ddof.

    Raises:
        ConfigurationError: There are no more than ``ddof`` honest clients.
    """
    if len(honest) <= ddof:
        raise ConfigurationError(
            f"a_little_is_enough: {len(honest)} honest clients have no standard deviation with ddof={ddof}; it needs {ddof + 1}"
        )
    return honest.mean(0) + tau * honest.std(0, correction=ddof)


def a_little_factor(num_clients: int, f: int) -> float:
    """The paper's factor z: what keeps the attackers' vector among the honest ones for a majority (Baruch et al., Section 3.2).

    ``z = Phi^-1((n - f - s) / (n - f))`` with ``s = floor(n/2) + 1 - f`` honest clients to win.

    Args:
        num_clients: Clients in the round, n.
        f: Attackers among them.

    Raises:
        ConfigurationError: They are a majority by themselves.
    """
    honest = num_clients - f
    supporters = num_clients // 2 + 1 - f
    if not 0 < supporters < honest:
        raise ConfigurationError(
            f"a_little_factor: {f} attackers of {num_clients} clients need no honest one for a majority; set tau"
        )
    return NormalDist().inv_cdf((honest - supporters) / honest)


def gaussian(
    honest: Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """A vector of independent normal numbers, of the honest rows' width: ``[h, d] -> [d]``."""
    drawn = torch.randn(honest.shape[1], generator=generator, dtype=honest.dtype)
    return (mean + std * drawn).to(honest.device)


def mimic(honest: Tensor, client: int = 0) -> Tensor:
    """What one honest client sends, over-representing it (Karimireddy et al. 2022, arXiv 2006.09365), ``[h, d] -> [d]``.

    Args:
        honest: What the honest clients send.
        client: Which of them, from 0.
    """
    return honest[client % len(honest)]


class SignFlip(Attack):
    """Attackers send the opposite of the honest mean (Allen-Zhu et al. 2021, arXiv 2012.14368)."""

    least_honest = 1

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """The opposite of each honest mean."""
        return [sign_flip(message.honest) for message in messages]


class Scaled(Attack, ABC):
    """An attack with a factor, fixed or searched: one for all messages together.

    A search maximises the distance between what the server makes of the messages and the means of the honest ones. Messages under a
    weighted mean do not count, since theirs has no maximum; where there are no others, the fixed factor is used.

    Args:
        tau: The factor; None that of ``origin``.
        search: How the factor is searched instead: ``"byzfl"``, ``"grid"``, or ``"fixed"``, see
            :func:`~fl_lightning.attacks.search.search`. Under a weighted mean ``tau`` is used.
        origin: Whose attack.

    Raises:
        ConfigurationError: An unknown origin or search.

    Attributes:
        factors: The factor of each origin.
    """

    least_honest = 1
    factors: ClassVar[Mapping[Origin, float]]

    def __init__(self, tau: float | None = None, search: Search = "fixed", origin: Origin = "byzfl") -> None:
        check_choice(f"{type(self).__name__}.origin", origin, _ORIGINS)
        check_choice(f"{type(self).__name__}.search", search, _SEARCHES)
        self.tau, self.search, self.origin = tau, search, origin

    @abstractmethod
    def vector(self, message: Message, factor: float) -> Tensor:
        """What the attackers send instead of a message with a factor, ``[d]``."""

    def fixed(self, message: Message) -> float:
        """The factor where none is searched."""
        return self.factors[self.origin] if self.tau is None else self.tau

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Each message with the one factor."""
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
    """Attackers send ``-tau`` times the honest mean (Xie et al. 2020, "Fall of Empires", arXiv 1903.03936).

    ``tau`` is 2 by ``origin`` ``"byzfl"``, 1 by ``"blades"``, 0.1 by ``"paper"`` (its epsilon).
    """

    factors: ClassVar = {"byzfl": 2.0, "blades": 1.0, "paper": 0.1}

    def vector(self, message: Message, factor: float) -> Tensor:
        """The honest mean times ``-factor``."""
        return fall_of_empires(message.honest, factor)


class ALittleIsEnough(Scaled):
    r"""Attackers send the honest mean and ``tau`` standard deviations (Baruch et al. 2019, arXiv 1902.06156).

    ================  =======  =====================================  ============  ==========================================
    origin            sign     tau                                    divisor       mean and deviation of
    ================  =======  =====================================  ============  ==========================================
    ``"byzfl"``       \+       1.5                                    h - 1         the honest clients
    ``"blades"``      \+       :func:`a_little_factor`                h - 1         the honest clients
    ``"paper"``       \-       1.5                                    f             what the attackers themselves computed
    ================  =======  =====================================  ============  ==========================================
    """

    factors: ClassVar = {"byzfl": 1.5, "blades": 1.5, "paper": 1.5}

    def __init__(self, tau: float | None = None, search: Search = "fixed", origin: Origin = "byzfl") -> None:
        super().__init__(tau, search, origin)
        self.least_honest = 0 if origin == "paper" else 2

    def fixed(self, message: Message) -> float:
        """``tau``, or what Blades computes from the numbers of clients."""
        if self.tau is None and self.origin == "blades":
            return a_little_factor(len(message.weights), len(message.own))
        return super().fixed(message)

    def vector(self, message: Message, factor: float) -> Tensor:
        """The mean and ``factor`` standard deviations."""
        if self.origin == "paper":
            return a_little_is_enough(message.own, -factor, ddof=0)
        return a_little_is_enough(message.honest, factor)


class Gaussian(Attack):
    """Attackers send independent normal numbers, each its own.

    Args:
        mean: Their mean.
        std: Their standard deviation.
    """

    def __init__(self, mean: float = 0.0, std: float = 1.0) -> None:
        self.mean, self.std = mean, std

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Normal numbers in place of what the attackers have computed."""
        return [
            torch.stack([gaussian(message.own, self.mean, self.std) for _ in message.own])
            for message in messages
        ]


class Mimic(Attack):
    """Attackers send what one honest client sends, over-representing it (Karimireddy et al. 2022, arXiv 2006.09365).

    Args:
        client: Which of the round's honest clients, from 0.
    """

    least_honest = 1

    def __init__(self, client: int = 0) -> None:
        self.client = client

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """That client's messages."""
        return [mimic(message.honest, self.client) for message in messages]


class NonFinite(Attack):
    """Attackers send a number that is none: a test of what a rule does with it.

    Args:
        value: ``nan``, ``inf`` or ``-inf``.
    """

    def __init__(self, value: Literal["nan", "inf", "-inf"] = "nan") -> None:
        check_choice("NonFinite.value", value, ("nan", "inf", "-inf"))
        self.value = value

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """The value everywhere."""
        return [torch.full_like(message.own, float(self.value)) for message in messages]
