"""The cohort: the state of a round's clients, stacked along dimension 0."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.batch_norm.kinds import buffer_kinds, parameter_kinds
from fl_lightning.cohort.blocks import block_layout
from fl_lightning.cohort.client_rows import ClientRows
from fl_lightning.cohort.rows import Rows, join_columns
from fl_lightning.models.dropout import Dropout
from fl_lightning.optimizers.client import ClientOptimizer, OptimizerCallable


class Cohort(ClientRows):
    """The clients that take part in one communication round.

    Trainable parameters lie in one contiguous block ``[C, columns]`` per parameter group, buffers in one per kind;
    ``params``, ``grads`` and ``buffers`` give named views ``[C, *shape]`` of them. Row i belongs to ``client_ids[i]``.

    Attributes:
        client_ids: The clients, in increasing order.
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
        server_buffers: The server model's own buffers by name.
        pseudo_gradient: Storage of the server's gradients, ``[1, *shape]`` by name.
        buffer_aggregate: Storage of the aggregate of the clients' buffers, likewise.
        start_buffers: What the buffers held before the first local step, likewise, where :meth:`keep_start` has asked for it.
        policy: What happens to each kind of state in this round (see ``fl_lightning.round.policy``).
        losses: Mean training loss of each client over its local steps of this round, shape ``[C]``; known from
            ``on_before_aggregate`` on.
    """

    losses: Tensor

    def __init__(self, model: nn.Module, num_clients: int, groups: Mapping[str, str]) -> None:
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        self.parameter_kinds = parameter_kinds(model)
        self.buffer_kinds = buffer_kinds(model)
        params = Rows.empty(block_layout(parameters, groups), parameters, num_clients)
        super().__init__(
            params,
            params.zeros_like(),
            Rows.empty(block_layout(buffers, self.buffer_kinds), buffers, num_clients),
        )
        self.server_rows = Rows.empty(self.params.layout, parameters, 1)
        self.server = self.server_rows.row(0)
        self.server_parameters, self.server_buffers = parameters, buffers
        self.pseudo_gradient = Rows.empty(self.params.layout, parameters, 1)
        self.buffer_aggregate = Rows.empty(self.buffers.layout, buffers, 1)
        self.local_steps: list[int] = []
        self.start_buffers: dict[str, Tensor] | None = None
        self.policy: dict[str, str] = {}
        self._dropout_keys = [f"{n}.key" for n, layer in model.named_modules() if isinstance(layer, Dropout)]
        self._optimizer_made_of: tuple[Any, ...] | None = None
        self._finished: dict[int, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self.params.blocks[next(iter(self.params.blocks))])

    def broadcast(
        self,
        *,
        round_number: int,
        client_ids: Sequence[int],
        weights: Tensor,
        local_steps: Sequence[int],
        policy: Mapping[str, str],
        optimizer: OptimizerCallable,
        overrides: Mapping[str, Mapping[str, float]],
        lr_factor: float,
    ) -> None:
        """Start a round: every row becomes a copy of the server's state, with a fresh client optimizer."""
        self.round = round_number
        self.client_ids, self.weights = list(client_ids), weights
        self.local_steps = list(local_steps)
        self.policy = dict(policy)
        self._finished.clear()
        self._indices.clear()
        self.start_buffers = None
        for name, shapes in self.params.layout.items():
            row = join_columns(self.server_parameters, shapes, out=self.server_rows.blocks[name][0])
            self.params.blocks[name].copy_(row.expand_as(self.params.blocks[name]))
        for name, shapes in self.buffers.layout.items():
            self.buffers.blocks[name].copy_(
                join_columns(self.server_buffers, shapes).expand_as(self.buffers.blocks[name])
            )
        trained = [name for name in self.params.blocks if self.is_trained(name)]
        made_of = (optimizer, dict(overrides), trained)
        self._lr_factor = lr_factor
        if made_of == self._optimizer_made_of:
            self.restart_optimizer()
        else:
            blocks, gradients = ({n: rows.blocks[n] for n in trained} for rows in (self.params, self.grads))
            self._optimizer = ClientOptimizer(optimizer, blocks, gradients, overrides, lr_factor)
            self._optimizer_made_of = made_of
            self.train_blocks(trained)
        self.begin_step(0)

    def keep_start(self) -> None:
        """Ask in ``on_round_start`` for ``start_buffers``: what is there when every callback has had that hook."""
        self.start_buffers = {}

    def restart_optimizer(self) -> None:
        """Give every client a fresh client optimizer, without state."""
        self._optimizer.restart(self._lr_factor)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The client optimizer: one torch optimizer whose parameters are the trained blocks ``[C, columns]``."""
        return self._optimizer.torch

    def is_trained(self, block: str) -> bool:
        """Whether a parameter block is trained in this round, that is, not frozen by the policy."""
        return self.treatment(block) != "frozen"

    def mean(self, stacked: Tensor) -> Tensor:
        """Weighted mean over the clients, ``[C, *shape] -> [*shape]``, with the round's aggregation weights."""
        return (self.weights.to(stacked.dtype) @ stacked.reshape(len(self), -1)).view(stacked.shape[1:])

    def optimizer_state(self, key: str) -> Rows:
        """What the client optimizer remembers under ``key`` (SGD: ``"momentum_buffer"``), ``[C, *shape]`` by name.

        The views can be read and written. At the start of a round they are set to zero: state is reset unless a callback
        puts it back, from a copy of its own.

        Raises:
            ConfigurationError: The client optimizer keeps no such state.
        """
        blocks = self._optimizer.state(key)
        return Rows({name: self.params.layout[name] for name in blocks}, blocks)

    @property
    def optimizer_state_keys(self) -> list[str]:
        """The keys that :meth:`optimizer_state` knows."""
        return self._optimizer.state_names()

    @property
    def optimizer_steps(self) -> Tensor:
        """How many steps each client's optimizer state has seen, int64 ``[C]``: settable at the start of a round."""
        return self._optimizer.steps_taken(torch.tensor(self.local_steps))

    @optimizer_steps.setter
    def optimizer_steps(self, steps: Tensor) -> None:
        self._optimizer.restore_steps(steps)

    def recall(self, memory: dict[int, dict[str, Tensor]]) -> None:
        """Give each client the state that it kept: what the policy of this round declares ``local``.

        A client without a memory starts from the server's initial state, which the first call puts into ``memory``
        under -1.

        Args:
            memory: What :meth:`remember` has filled: by client id, rows ``[columns]`` by block.
        """
        initial = memory.setdefault(-1, {})
        for name, block in self._local_blocks().items():
            initial.setdefault(name, block[0].clone())
            for row, client in zip(block, self.client_ids, strict=True):
                row.copy_(memory.get(client, initial).get(name, initial[name]))

    def remember(self, memory: dict[int, dict[str, Tensor]]) -> None:
        """Keep the state that each client ends its local steps with, for :meth:`recall`; others' stays untouched.

        Args:
            memory: The callback's memory, part of its ``state_dict()``.
        """
        for name, block in self._local_blocks().items():
            for row, client in zip(block, self.client_ids, strict=True):
                memory.setdefault(client, {})[name] = row.clone()

    def treatment(self, block: str) -> str:
        """What the policy of this round does with a block of parameters or buffers."""
        kind = block.split(" ")[0]
        if kind == "scratch":
            return "reset"
        return self.policy[
            {"weights": "weight", "scalars": "weight", "bias": "weight", "batch_norm": "affine"}.get(
                kind, kind
            )
        ]

    def set_dropout_keys(self, keys: Tensor) -> None:
        """Give every dropout layer of row i the key ``keys[i]`` for the present local step."""
        for name in self._dropout_keys:
            self.buffers[name].copy_(keys)

    def take_step(self) -> None:
        """Let the client optimizer take one local step of every row."""
        self._optimizer.step()

    def begin_step(self, step: int) -> None:
        """Begin local step ``step`` (from 0); rows that do not take it get a zero gradient."""
        if step == 0 and self.start_buffers is not None:
            self.start_buffers = {name: value.clone() for name, value in self.buffers.items()}
        self.step, self._over = step, False
        for row in (row for row, steps in enumerate(self.local_steps) if step == steps):
            for block in self.grads.blocks.values():
                block[row].zero_()

    @property
    def active(self) -> Tensor:
        """Which clients take the present local step, bool ``[C]``; all, once the local steps are over."""
        return torch.tensor([self._over or self.step < steps for steps in self.local_steps])

    def active_rows(self) -> list[int]:
        """Indices of the rows that take the present local step."""
        return [row for row, steps in enumerate(self.local_steps) if self.step < steps]

    def finish_step(self, step: int) -> None:
        """Keep aside the state of clients whose last local step was ``step`` while others go on."""
        if step + 1 < max(self.local_steps):
            for row, steps in enumerate(self.local_steps):
                if step + 1 == steps:
                    self._finished[row] = [block[row].clone() for block in self._storage()]

    def restore_finished(self) -> None:
        """Put back the state of clients that finished early: they take part with exactly their own steps."""
        for row, kept in self._finished.items():
            for block, value in zip(self._storage(), kept, strict=True):
                block[row].copy_(value)
        self._over = True

    def _local_blocks(self) -> dict[str, Tensor]:
        blocks = {**self.params.blocks, **self.buffers.blocks}
        return {name: block for name, block in blocks.items() if self.treatment(name) == "local"}

    def _storage(self) -> list[Tensor]:
        states = [
            block for key in self._optimizer.state_names() for block in self._optimizer.state(key).values()
        ]
        return [*self.params.blocks.values(), *self.buffers.blocks.values(), *states]
