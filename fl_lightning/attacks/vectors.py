"""Attacks on messages. The attackers are omniscient: they know all honest clients' messages.

Some attacks have a function and a class. The function maps the vectors ``[h, d]`` of the h honest
clients to the vector ``[d]`` that all attackers send. The class can be named in a configuration.
The argument ``origin`` of the class selects the formula of a paper or library.
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
from fl_lightning.errors import ConfigurationError

FormulaOrigin = Literal["byzfl", "paper", "blades"]


def sign_flip(honest: Tensor) -> Tensor:
    """Return the negated mean of the rows (Allen-Zhu et al. 2021, arXiv 2012.14368), ``[d]``."""
    return -honest.mean(0)


def fall_of_empires(honest: Tensor, tau: float = 2.0) -> Tensor:
    """Return ``-tau`` times the mean of the rows (Xie et al. 2020, arXiv 1903.03936), ``[d]``."""
    return -tau * honest.mean(0)


def a_little_is_enough(honest: Tensor, tau: float = 1.5, *, ddof: int = 1) -> Tensor:
    """Return the mean plus ``tau`` standard deviations (Baruch et al. 2019, arXiv 1902.06156).

    Args:
        honest: Vectors of the h honest clients, ``[h, d]``.
        tau: Number of standard deviations. It may be negative.
        ddof: The standard deviation has the divisor ``h - ddof``.

    Raises:
        ConfigurationError: h is not greater than ``ddof``.
    """
    if len(honest) <= ddof:
        raise ConfigurationError(
            f"a_little_is_enough: {len(honest)} honest clients have no standard deviation with ddof={ddof}; it needs {ddof + 1}"
        )
    return honest.mean(0) + tau * honest.std(0, correction=ddof)


def a_little_factor(num_clients: int, f: int) -> float:
    """Return the factor z of the standard deviation, as in Baruch et al., Section 3.2.

    The f attackers need ``s = floor(n/2) + 1 - f`` honest clients to form a majority of the n
    clients. The factor is ``z = Phi^-1((n - f - s) / (n - f))``. With this z, s of the honest
    clients are expected to deviate from the mean by more than the attack vector does.

    Args:
        num_clients: Number n of clients in the round.
        f: Number of attackers in the round.

    Raises:
        ConfigurationError: The attackers alone are a majority, or need all honest clients for a
            majority.
    """
    honest = num_clients - f
    supporters = num_clients // 2 + 1 - f
    if not 0 < supporters < honest:
        raise ConfigurationError(
            f"a_little_factor: {f} attackers of {num_clients} clients need none or all of the honest clients for a majority; set tau"
        )
    return NormalDist().inv_cdf((honest - supporters) / honest)


class SignFlip(Attack):
    """Sign flip: attackers send the negated honest mean (Allen-Zhu et al., arXiv 2012.14368)."""

    least_honest = 1

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return the negated mean of the honest vectors for each message."""
        return [sign_flip(message.honest) for message in messages]


class Scaled(Attack, ABC):
    """Base class of attacks with a factor. The factor is fixed or found by a search.

    All messages have the same factor. A search maximises the distance between the aggregate and the
    honest mean, over all messages together. A search ignores messages whose rule is a weighted
    mean, because their distance has no maximum. If a search ignores all messages, the fixed factor
    is used.

    Args:
        tau: Fixed factor. The default depends on ``origin``.
        search: ``"fixed"`` uses ``tau``. ``"byzfl"`` searches for a factor, see
            :func:`~fl_lightning.attacks.search.search`.
        origin: Source of the formula: ``"byzfl"``, ``"paper"`` or ``"blades"``.

    Raises:
        ConfigurationError: The origin or search is unknown.

    Attributes:
        factors: Default factor for each origin.
    """

    least_honest = 1
    factors: ClassVar[Mapping[FormulaOrigin, float]]

    def __init__(
        self, tau: float | None = None, search: Search = "fixed", origin: FormulaOrigin = "byzfl"
    ) -> None:
        self.tau, self.search, self.origin = tau, search, origin

    @abstractmethod
    def vector(self, message: Message, factor: float) -> Tensor:
        """Return the attackers' vector ``[d]`` for a message and a factor."""

    def fixed(self, message: Message) -> float:
        """Return the factor that is used without a search."""
        return self.factors[self.origin] if self.tau is None else self.tau

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return the attackers' vector for each message. All messages have the same factor."""
        if not messages:
            return []
        factor = self.fixed(messages[0])
        robust = [message for message in messages if not isinstance(message.rule, WeightedMean)]
        if self.search != "fixed" and robust:
            factor = search(self._harm(robust))
        return [self.vector(message, factor) for message in messages]

    def _harm(self, messages: list[Message]) -> Callable[[float], float]:
        means = [message.honest.mean(0) for message in messages]

        def harm(factor: float) -> float:
            pairs = zip(messages, means, strict=True)
            moved = [m.aggregate(self.vector(m, factor)) - mean for m, mean in pairs]
            return float(torch.cat(moved).norm())

        return harm


class FallOfEmpires(Scaled):
    """Fall of Empires: attackers send ``-tau`` times the honest mean.

    The paper is Xie et al. 2020, arXiv 1903.03936. The paper calls the factor ``tau`` epsilon. The
    default of ``tau`` depends on ``origin``: 2 for ``"byzfl"``, 1 for ``"blades"``, and 0.1 for
    ``"paper"``.
    """

    factors: ClassVar = {"byzfl": 2.0, "blades": 1.0, "paper": 0.1}

    def vector(self, message: Message, factor: float) -> Tensor:
        """Return the honest mean times ``-factor``."""
        return fall_of_empires(message.honest, factor)


class ALittleIsEnough(Scaled):
    r"""A Little Is Enough: attackers shift the mean by ``tau`` standard deviations.

    The paper is Baruch et al. 2019, arXiv 1902.06156. The formula depends on ``origin``. Let h be
    the number of honest clients, and f the number of attackers.

    ============  ====  =======================  =======  ==========================
    origin        sign  tau                      divisor  mean and deviation of
    ============  ====  =======================  =======  ==========================
    ``"byzfl"``   \+    1.5                      h - 1    the honest clients
    ``"blades"``  \+    :func:`a_little_factor`  h - 1    the honest clients
    ``"paper"``   \-    1.5                      f        the attackers' own vectors
    ============  ====  =======================  =======  ==========================
    """

    factors: ClassVar = {"byzfl": 1.5, "blades": 1.5, "paper": 1.5}

    def __init__(
        self, tau: float | None = None, search: Search = "fixed", origin: FormulaOrigin = "byzfl"
    ) -> None:
        super().__init__(tau, search, origin)
        self.least_honest = 0 if origin == "paper" else 2

    def fixed(self, message: Message) -> float:
        """Return ``tau``. If ``tau`` is None, return the default factor of ``origin``.

        With ``"blades"``, the default depends on the numbers of clients and attackers.
        """
        if self.tau is None and self.origin == "blades":
            return a_little_factor(len(message.weights), len(message.own))
        return super().fixed(message)

    def vector(self, message: Message, factor: float) -> Tensor:
        """Return the mean plus or minus ``factor`` standard deviations.

        The origin of the formula decides the sign.
        """
        if self.origin == "paper":
            return a_little_is_enough(message.own, -factor, ddof=0)
        return a_little_is_enough(message.honest, factor)


class Gaussian(Attack):
    """Gaussian noise: each attacker sends independent normal random numbers.

    Args:
        mean: Mean of the numbers.
        std: Standard deviation of the numbers.
    """

    def __init__(self, mean: float = 0.0, std: float = 1.0) -> None:
        self.mean, self.std = mean, std

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return independent normal random numbers for each attacker and each message."""
        sent = []
        for own in (message.own for message in messages):
            drawn = torch.stack([torch.randn(len(row), dtype=row.dtype) for row in own])
            sent.append((self.mean + self.std * drawn).to(own.device))
        return sent


class Mimic(Attack):
    """Mimic: attackers send a copy of one honest client's vector.

    The paper is Karimireddy et al. 2022, arXiv 2006.09365.

    Args:
        client: Index of the copied client among the round's h honest clients, from 0, taken modulo
            h.
    """

    least_honest = 1

    def __init__(self, client: int = 0) -> None:
        self.client = client

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return the vectors of the copied client."""
        return [message.honest[self.client % len(message.honest)] for message in messages]


class NonFinite(Attack):
    """Attack that sends non-finite values, to test how an aggregation rule handles them.

    Args:
        value: Value of all coordinates: ``nan``, ``inf`` or ``-inf``.
    """

    def __init__(self, value: Literal["nan", "inf", "-inf"] = "nan") -> None:
        self.value = value

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return vectors in which every coordinate is ``value``."""
        return [torch.full_like(message.own, float(self.value)) for message in messages]
