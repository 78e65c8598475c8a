"""The cohort as a method sees it: the state of a round's clients, stacked along dimension 0."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.aggregation import weighted_mean
from fl_lightning.batch_norm.kinds import buffer_kinds, parameter_kinds
from fl_lightning.cohort.rows import Rows, buffer_layout, check_room, parameter_layout
from fl_lightning.errors import ConfigurationError
from fl_lightning.optimizers.client import ClientOptimizer
from fl_lightning.optimizers.settings import GroupSettings
from fl_lightning.randomness import generator

SERVER = -1
"""Stands among client ids for the server: what a method remembers under it is the server's, or what every client starts with."""


class Cohort:
    """The clients that take part in one communication round.

    Trainable parameters lie in one contiguous block ``[C, columns]`` per parameter group, buffers in one per kind;
    ``params``, ``grads`` and ``buffers`` give named views ``[C, *shape]`` of them, and their ``blocks`` whole. Row i belongs
    to ``client_ids[i]``. What is here is for methods; the module drives a round through
    :class:`~fl_lightning.cohort.round_cohort.RoundCohort`.

    Where several ranks share a run, the hooks of a local step see a part of the cohort: the clients that this rank computes,
    maybe none, at ``rows`` of the whole one.

    Args:
        model: The server's model.
        num_clients: Number of clients C.
        parameter_groups: Client optimizer settings by parameter group.
        copies: Processes on this machine that hold all of it.

    Raises:
        ConfigurationError: The device has less memory than the rows take.

    Attributes:
        client_ids: The clients, in increasing order.
        rows: Which rows of the round's whole cohort these are, an index of stacked tensors: all, but in local steps, and where
            clients are left out after them (``on_divergence: drop``).
        extra: What a method gives each client in ``on_round_start`` and keeps for it in local steps, tensors ``[C, ...]`` by a
            name of its own; in ``on_before_aggregate`` the rows of all ranks are there. A round begins without any.
        weights: Aggregation weights p_i, shape ``[C]``, sum 1.
        round: The communication round, from 1.
        step: The present local step, from 0.
        local_steps: Number of local steps of each client in this round.
        params: Parameters, ``[C, *shape]`` by name.
        grads: Gradients of the present local step, likewise.
        buffers: Buffers, likewise: running statistics, counters, others.
        server: The server's parameters that this round started from, ``[*shape]`` by name.
        server_rows: The same as blocks ``[1, columns]``.
        server_parameters: The server model's own parameters by name, which the server step changes.
        server_buffers: The server model's own buffers by name; a method that pools statistics writes them.
        parameter_kinds: The kind of each parameter by name (see ``fl_lightning.batch_norm.kinds``).
        buffer_kinds: That of each buffer.
        policy: What happens to each kind of state in this round (see ``fl_lightning.round.policy``).
        losses: Mean training loss of each client over its local steps of this round, shape ``[C]``; known from
            ``on_before_aggregate`` on.
    """

    losses: Tensor
    _optimizer: ClientOptimizer

    def __init__(
        self, model: nn.Module, num_clients: int, parameter_groups: GroupSettings, copies: int = 1
    ) -> None:
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        check_room([*parameters.values(), *parameters.values(), *buffers.values()], num_clients, copies)
        self.params = Rows.empty(parameter_layout(model, parameter_groups), parameters, num_clients)
        self.grads = self.params.zeros_like()
        self.buffers = Rows.empty(buffer_layout(model), buffers, num_clients)
        self.client_ids: list[int] = []
        self.round = self.step = 0
        self.parameter_kinds, self.buffer_kinds = parameter_kinds(model), buffer_kinds(model)
        self.server_rows = Rows.empty(self.params.layout, parameters, 1)
        self.server = self.server_rows.row(0)
        self.server_parameters, self.server_buffers = parameters, buffers
        self.weights = torch.empty(0)
        self.local_steps: list[int] = []
        self.policy: dict[str, str] = {}
        self.rows: slice | list[int] = slice(0, num_clients)
        self.extra: dict[str, Tensor] = {}
        self._seed = 0
        self._over = self._in_local_steps = False

    def __len__(self) -> int:
        return len(next(iter(self.params.blocks.values())))

    def treatment(self, block: str) -> str:
        """What the policy of this round does with a block of parameters or buffers, by its name."""
        kind = {**self.params.layout, **self.buffers.layout}[block].kind
        return "reset" if kind == "scratch" else self.policy[kind]

    def is_trained(self, block: str) -> bool:
        """Whether a parameter block is trained in this round, that is, not frozen by the policy."""
        return self.treatment(block) != "frozen"

    def mean(self, stacked: Tensor) -> Tensor:
        """Weighted mean over the clients, ``[C, *shape] -> [*shape]``, with the round's aggregation weights.

        Raises:
            ConfigurationError: In a local step, where clients know nothing of each other.
        """
        if self._in_local_steps:
            raise ConfigurationError(
                "cohort.mean: in a local step clients know nothing of each other, and other ranks have some of them; use it in "
                "on_round_start, on_before_aggregate or on_round_end"
            )
        return weighted_mean(stacked.reshape(len(self), -1), self.weights).view(stacked.shape[1:])

    @property
    def active(self) -> Tensor:
        """Which clients take the present local step, bool ``[C]``; all, once the local steps are over."""
        return torch.tensor([self._over or self.step < steps for steps in self.local_steps])

    def active_rows(self) -> list[int]:
        """Indices of the rows that take the present local step."""
        return [row for row, steps in enumerate(self.local_steps) if self.step < steps]

    def index(self, rows: list[int]) -> slice | Tensor:
        """Ascending rows as an index into stacked tensors, which no device has to be waited for.

        A slice where they follow each other, which is copied as one piece; others are gathered.
        """
        if not rows or rows[-1] - rows[0] + 1 == len(rows):
            return slice(rows[0], rows[-1] + 1) if rows else slice(0, 0)
        index, device = torch.tensor(rows), next(iter(self.params.blocks.values())).device
        return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index

    def generators(self, purpose: str) -> list[torch.Generator]:
        """A random generator for each row, a function of (seed, purpose, round, client, local step), whichever rank has the client.

        Args:
            purpose: What is drawn, such as ``"noise"``: equal clients and steps of different purposes are independent.
        """
        return [generator(self._seed, purpose, self.round, client, self.step) for client in self.client_ids]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The client optimizer: one torch optimizer whose parameters are the trained blocks ``[C, columns]``."""
        return self._optimizer.torch

    def optimizer_state(self, key: str) -> Rows:
        """What the client optimizer remembers under ``key`` (SGD: ``"momentum_buffer"``), ``[C, *shape]`` by name.

        The views can be read and written. At the start of a round they are set to zero: state is reset unless a callback
        puts it back, from a copy of its own.

        Raises:
            ConfigurationError: The client optimizer keeps no such state.
        """
        states = self._optimizer.states()
        if key not in states:
            raise ConfigurationError(
                f"client_optimizer {type(self.optimizer).__name__} keeps no state {key!r} (it keeps: "
                f"{', '.join(states) or 'nothing; set momentum > 0'})"
            )
        blocks = {name: block[self.rows] for name, block in self._everyones(key).items()}
        return Rows({name: self.params.layout[name] for name in blocks}, blocks)

    def _everyones(self, key: str) -> dict[str, Tensor]:
        """State of the client optimizer with all that other ranks know of it."""
        return self._optimizer.states()[key]

    @property
    def optimizer_state_keys(self) -> list[str]:
        """The keys that :meth:`optimizer_state` knows."""
        return list(self._optimizer.states())

    @property
    def optimizer_steps(self) -> dict[str, Tensor]:
        """How many steps each client's optimizer state has seen, int64 ``[C]`` by parameter block: settable at the start of a round."""
        taken, before = torch.tensor(self.local_steps), self._optimizer.initial_steps
        return {n: before[n][self.rows] + taken if n in before else taken for n in self.params.blocks}

    @optimizer_steps.setter
    def optimizer_steps(self, steps: Mapping[str, Tensor]) -> None:
        self._optimizer.restore_steps(steps)

    def restart_optimizer(self) -> None:
        """Give every client a fresh client optimizer, without state."""
        self._optimizer.restart()

    def recall(self, memory: MutableMapping[int, Any]) -> None:
        """Give each client the state that it kept: what the policy of this round declares ``local``.

        A client without a memory starts from the server's initial state, which the first call puts into ``memory``
        under :data:`SERVER`.

        Args:
            memory: What :meth:`remember` has filled: by client id, rows ``[columns]`` by block; a
                :class:`~fl_lightning.cohort.client_memory.ClientMemory`, or a dict.
        """
        blocks = self._local_blocks()
        initial = {name: block[0].clone() for name, block in blocks.items()} | {**memory.get(SERVER, {})}
        memory[SERVER] = initial
        for index, client in enumerate(self.client_ids):
            kept = memory.get(client, initial)
            for name, block in blocks.items():
                block[index].copy_(kept.get(name, initial[name]))

    def remember(self, memory: MutableMapping[int, Any]) -> None:
        """Keep the state that each client ends its local steps with, for :meth:`recall`; others' stays untouched.

        Args:
            memory: The callback's memory, part of its ``state_dict()``.
        """
        blocks = self._local_blocks()
        for index, client in enumerate(self.client_ids):
            own = {name: block[index].clone() for name, block in blocks.items()}
            memory[client] = {**memory.get(client, {}), **own}

    def _local_blocks(self) -> dict[str, Tensor]:
        blocks = {**self.params.blocks, **self.buffers.blocks}
        return {name: block for name, block in blocks.items() if self.treatment(name) == "local"}
