"""Plan of a run: participation, local steps and aggregation weights of every round."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.aggregation import Aggregator
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import generator, permutation
from fl_lightning.round.failures import ClientFailures

Weighting = Literal["examples", "uniform", "samples"]
"""Quantity to which aggregation weights are proportional. For ``"uniform"``, weights are equal."""

_MOST_IDLE = 10_000  # this number of skipped rounds in succession is an error


@dataclass
class RoundPlan:
    """Participation, local steps and aggregation weights in each round of a run.

    Args:
        data: The federated data.
        local_steps: Local steps E of each client in a round; None if ``local_epochs`` is given.
        local_epochs: Passes over a client's data in a round; None if ``local_steps`` is given.
        cohort_size: Number of clients in a round.
        seed: The run's seed.
        weighting: Quantity to which aggregation weights are proportional.
        centralised: Whether one client trains on the union of the cohort's batches.
        failures: Clients that drop out or take fewer steps. Default: no failures.
        min_clients: Smallest number of clients to aggregate. With fewer clients, a round is
            skipped.
        last_round: Last round of the run if a budget is set, otherwise None.
        last_round_steps: Largest number of local steps of a client in ``last_round``.
        rate: Probability with which each client takes part in a round, independently of the others;
            None for cohorts of ``cohort_size`` clients.
    """

    data: FederatedDataModule
    local_steps: int | None
    local_epochs: int | None
    cohort_size: int
    seed: int
    weighting: Weighting = "examples"
    centralised: bool = False
    failures: ClientFailures | None = None
    min_clients: int = 1
    last_round: int | None = None
    last_round_steps: int | None = None
    rate: float | None = None

    def check(self, rules: Collection[Aggregator]) -> None:
        """Check the number of clients, and increase ``min_clients`` if an aggregator needs more.

        Args:
            rules: The aggregators of the run.

        Raises:
            ConfigurationError: The number of clients contradicts a setting or an aggregator.
        """
        size = self.cohort_size
        if not self.centralised:
            for rule in rules:
                rule.check(size)
        if self.failures is not None:
            self.failures.check(self.data.num_clients)
        if not 1 <= self.min_clients <= size:
            raise ConfigurationError(
                f"model.min_clients: {self.min_clients} must be at least 1 and at most the {size} clients of a round"
            )
        numbers = range(self.min_clients, size)
        self.min_clients = next((number for number in numbers if _accepted(number, rules)), size)

    def reporting(self, round_number: int) -> list[int]:
        """Return the clients that are sampled for a round and do not drop out."""
        # held-out clients have the numbers from num_clients on, so they are never drawn
        drawn = (
            sample_cohort(self.data.num_clients, self.cohort_size, self.seed, round_number)
            if self.rate is None
            else sample_poisson(self.data.num_clients, self.rate, self.seed, round_number)
        )
        failures = self.failures
        return [c for c in drawn if failures is None or failures.reports(c, self.seed, round_number)]

    def cohort(self, round_number: int) -> list[int]:
        """Return the clients of a round. If the round is skipped, the list is empty."""
        clients = self.reporting(round_number)
        return clients if len(clients) >= self.min_clients else []

    def full_steps(self, client_id: int) -> int:
        """Return how many local steps a client takes in a round without failures."""
        if self.local_steps is not None:
            return self.local_steps
        assert self.local_epochs is not None
        return self.local_epochs * self.data.steps_per_epoch(client_id)

    def steps(self, client_id: int, round_number: int) -> int:
        """Return how many local steps a client takes in a round."""
        steps = self.full_steps(client_id)
        if self.failures is not None:
            steps = self.failures.steps(steps, client_id, self.seed, round_number)
        return min(steps, self.last_round_steps or steps) if round_number == self.last_round else steps

    def first_step(self, client_id: int, round_number: int) -> int:
        """Return the position of a round's first batch in a client's sequence of batches.

        The position is (round - 1) x E, even if the client was absent in earlier rounds.
        """
        return (round_number - 1) * self.full_steps(client_id)

    def trained(self, round_number: int) -> tuple[list[int], list[int]]:
        """Return the clients that train in a round, and the number of local steps of each client.

        In a centralised run, client 0 represents the cohort. If the round is skipped, both lists
        are empty.
        """
        members = self.cohort(round_number)
        steps = [self.steps(client, round_number) for client in members]
        return ([0], [max(steps)]) if self.centralised and members else (members, steps)

    def sources(self, client_ids: Sequence[int], round_number: int, step: int) -> tuple[list[int], list[int]]:
        """Return the clients whose batches a local step uses, and the position of each batch.

        Args:
            client_ids: The clients that take the step. In a centralised run, the batches of the
                entire cohort are used instead.
            round_number: The communication round, from 1.
            step: The local step of the round, from 0.
        """
        clients = list(client_ids)
        if self.centralised:
            clients = [c for c in self.cohort(round_number) if step < self.steps(c, round_number)]
        return clients, [self.first_step(client, round_number) + step for client in clients]

    def weights(self, client_ids: Sequence[int], round_number: int) -> Tensor:
        """Return the planned aggregation weights ``[C]`` of a round."""
        sizes = [1.0] if self.centralised else self._sizes(client_ids, round_number)
        return torch.tensor([size / sum(sizes) for size in sizes], dtype=torch.float64)

    def usual(self) -> "RoundPlan":
        """Return a copy of the plan without client failures and a budget, and with cohorts of a fixed size."""
        return replace(self, failures=None, last_round=None, rate=None)

    def weight_share(self, client_ids: Sequence[int], round_number: int) -> float:
        """Return the given clients' share of the total weight of all clients.

        With uniform weights, this is ``len(client_ids)`` divided by the number of all clients.
        """
        if self.centralised:
            return 1.0
        sizes = self._sizes(range(self.data.num_clients), round_number)
        return sum(sizes[client] for client in client_ids) / sum(sizes)

    def _sizes(self, client_ids: Sequence[int], round_number: int) -> list[float]:
        if self.weighting == "uniform":
            return [1.0] * len(client_ids)
        if self.weighting == "examples":
            return [float(self.data.num_examples(client)) for client in client_ids]
        return [self.data.samples_per_step(c) * self.steps(c, round_number) for c in client_ids]

    def limit(self, budget_epochs: float) -> int:
        """Set and return the number of rounds for ``budget_epochs`` passes over all training data.

        The number solves ``local steps x rounds x batch size x clients = epochs x samples`` (FixBN,
        Appendix B.4), and is rounded up. If the budget ends inside a round, this round has fewer
        local steps.

        Raises:
            ConfigurationError: The budget is too small for one local step, or too many rounds are
                skipped.
        """
        data, self.last_round = self.data, None
        everyone = range(data.num_clients)
        samples = {i: data.samples_per_step(i) for i in everyone}
        remaining = budget_epochs * sum(data.num_examples(i) for i in everyone) + 1e-6
        costs = {i: samples[i] * self.full_steps(i) for i in everyone}
        round_number = 1
        if len(set(costs.values())) == 1 and self.failures is None and self.rate is None:
            skipped = max(ceil(remaining / (costs[0] * self.cohort_size)) - 1, 0)
            remaining -= skipped * costs[0] * self.cohort_size
            round_number += skipped
        idle = 0
        while remaining > (
            cost := sum(samples[i] * self.steps(i, round_number) for i in self.cohort(round_number))
        ):
            remaining -= cost
            round_number += 1
            idle = 0 if cost else idle + 1
            if idle == _MOST_IDLE:
                raise ConfigurationError(
                    f"budget_epochs: {budget_epochs} is never spent: rounds {round_number - idle} to {round_number - 1} have fewer than "
                    f"{self.min_clients} reports; lower model.min_clients or the dropout of model.failures"
                )
        steps = {i: self.steps(i, round_number) for i in self.cohort(round_number)}

        def cost_up_to(limit: int) -> float:
            return sum(samples[i] * min(limit, taken) for i, taken in steps.items())

        most = max(steps.values())
        last_steps = bisect_right(range(1, most + 1), remaining, key=cost_up_to)
        if last_steps == 0:
            round_number -= 1
        if round_number == 0:
            raise ConfigurationError(
                f"budget_epochs: {budget_epochs} is less than one local step of a round's {len(steps)} clients; raise it"
            )
        self.last_round = round_number
        self.last_round_steps = last_steps or None
        return round_number


def _accepted(num_clients: int, rules: Collection[Aggregator]) -> bool:
    try:
        for rule in rules:
            rule.check(num_clients)
    except ConfigurationError:
        return False
    return True


def check_local_work(
    local_steps: int | None,
    local_epochs: int | None,
    budget_epochs: float | None,
    participation: int | float,
) -> None:
    """Check the settings for local steps, local epochs, the budget and participation.

    Raises:
        ConfigurationError: Both or neither of ``local_steps`` and ``local_epochs`` are given, or a
            value is out of range.
    """
    if (local_steps is None) == (local_epochs is None):
        raise ConfigurationError(
            f"local_steps: {local_steps} and local_epochs: {local_epochs}; give one of them, and leave the other out (null in YAML)"
        )
    for setting, value in (("local_steps", local_steps), ("local_epochs", local_epochs)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{setting}: {value} must be at least 1")
    if budget_epochs is not None and not 0 < budget_epochs < inf:
        raise ConfigurationError(f"budget_epochs: {budget_epochs} must be positive and finite")
    if not (participation >= 1 if isinstance(participation, int) else 0 < participation <= 1):
        raise ConfigurationError(
            f"participation: {participation} must be a fraction in (0, 1] (0.1, 1.0) or a number of clients (1, 2, ...)"
        )


def require_clients(data: FederatedDataModule) -> None:
    """Check that the data have clients, or raise a ``ConfigurationError``."""
    if data.num_clients == 0:
        raise ConfigurationError(
            f"data: {type(data).__name__} has no clients; pass clients=[...], or name a data set such as Digits"
        )


def cohort_size(num_clients: int, participation: int | float) -> int:
    """Return the number of clients in a round's cohort.

    Args:
        num_clients: Number of clients of the federation.
        participation: Number of clients (int), or fraction (float) in (0, 1]. A fraction is rounded
            to a number of clients, at least 1.

    Raises:
        ConfigurationError: ``participation`` is greater than ``num_clients``.
    """
    if isinstance(participation, float):
        return max(1, round(participation * num_clients))
    if participation > num_clients:
        raise ConfigurationError(
            f"participation: {participation} clients a round, but there are only {num_clients}; use at most that many or a "
            "fraction such as 0.1"
        )
    return participation


def sample_cohort(num_clients: int, size: int, seed: int, round_number: int) -> list[int]:
    """Return the sorted client ids of a cohort.

    The clients are drawn uniformly without replacement, as a function of seed and round.
    """
    if size == num_clients:
        return list(range(num_clients))
    return sorted(permutation(num_clients, seed, "participation", round_number)[:size].tolist())


def sample_poisson(num_clients: int, rate: float, seed: int, round_number: int) -> list[int]:
    """Return the sorted client ids of a cohort in which each client is with probability ``rate``.

    The draws are independent, and a function of seed and round. The cohort may be empty.
    """
    draws = generator(seed, "participation", round_number)
    return (torch.rand(num_clients, generator=draws, dtype=torch.float64) < rate).nonzero().flatten().tolist()
