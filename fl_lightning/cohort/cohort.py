"""The class :class:`Cohort`: the state of a round's clients, stacked along dimension 0."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.aggregation import weighted_mean
from fl_lightning.batch_norm.kinds import KINDS, buffer_kinds, model_buffers, parameter_kinds
from fl_lightning.cohort.client_memory import is_finite
from fl_lightning.cohort.parts import treatment
from fl_lightning.cohort.rows import Rows, Tensors, buffer_layout, check_room, parameter_layout
from fl_lightning.errors import ConfigurationError, check_choice
from fl_lightning.optimizers.settings import GroupSettings
from fl_lightning.randomness import generator

SERVER = -1
"""Key of the server's entry in a client memory. All other keys are client ids.

The entry holds the server's state, or the initial state of all clients.
"""


class Cohort:
    """State of the clients that participate in one communication round.

    Row i of each tensor belongs to the client ``client_ids[i]``. ``params``, ``grads`` and
    ``buffers`` map names to tensors ``[C, *shape]``. These tensors are views of contiguous blocks
    ``[C, columns]``. The blocks are in ``params.blocks``, ``grads.blocks`` and ``buffers.blocks``.
    For each part of the model, each parameter group has one block of parameters, and each kind of
    buffer has one block of buffers.

    In a run with several ranks, the hooks of a local step get only the rows of one rank. A rank may
    have no rows. ``FederatedModule`` uses the subclass
    :class:`~fl_lightning.cohort.round_cohort.RoundCohort`.

    Args:
        model: The server's model.
        num_clients: Number of clients C.
        parameter_groups: Settings of the client optimizer for each parameter group.
        copies: Number of processes on this machine, each of which holds all rows.
        parts: Parts of the model that a policy treats separately (see
            ``fl_lightning.cohort.parts``).
        groups: Parameter group of each parameter. Default:
            :func:`~fl_lightning.cohort.rows.parameter_groups`.

    Raises:
        ConfigurationError: The rows need more memory than the device has.

    Attributes:
        client_ids: The clients, in increasing order.
        rows: Indices of this cohort's rows in the round's entire cohort. This cohort has fewer rows
            in the local steps of a rank, and after clients have been left out.
        extra: Dict of tensors ``[C, ...]`` that methods need in local steps. The dict is empty at
            the start of a round; methods fill it in ``on_round_start``. Before
            ``on_before_aggregate``, the rows of all ranks are gathered.
        weights: Aggregation weights p_i, shape ``[C]``, with sum 1.
        round: The communication round, from 1.
        step: The current local step, from 0; after the local steps, the last one of any client.
        local_steps: Number of local steps of each client in this round.
        params: Parameters, ``[C, *shape]`` by name.
        grads: Gradients of the current local step, ``[C, *shape]`` by name.
        buffers: Buffers, ``[C, *shape]`` by name, such as running statistics and counters.
        server: The server's parameters at the start of the round, ``[*shape]`` by name.
        server_rows: The parameters of ``server`` as blocks ``[1, columns]``.
        server_parameters: The server model's parameters by name, which the server's step changes.
        server_buffers: The server model's buffers by name, to which a method may write pooled
            statistics.
        pseudo_gradient: Gradient of each averaged parameter for the server optimizer,
            ``[1, *shape]`` by name. The hook ``on_after_aggregate`` may change the gradients in
            place.
        parameter_kinds: The kind of each parameter by name (see ``fl_lightning.batch_norm.kinds``).
        buffer_kinds: The kind of each buffer by name.
        policy: The treatment of each kind of state and each part of the model (see
            ``fl_lightning.round.policy``).
        versions: Name of the broadcast value of each frozen or discarded block. If a method changes
            discarded state at the server, its name changes.
        losses: Mean training loss of each client over the local steps, shape ``[C]``, set before
            ``on_before_aggregate``.

    Example:
        >>> from fl_lightning.testing import small_cnn
        >>> cohort = Cohort(small_cnn(), num_clients=5, parameter_groups={})
        >>> cohort.params["8.weight"].shape  # one row per client
        torch.Size([5, 3, 24])
    """

    losses: Tensor
    _optimizer: Any

    def __init__(
        self,
        model: nn.Module,
        num_clients: int,
        parameter_groups: GroupSettings,
        copies: int = 1,
        parts: Sequence[str] = (),
        groups: Mapping[str, str] | None = None,
    ) -> None:
        parameters, buffers = dict(model.named_parameters()), model_buffers(model)
        check_room([*parameters.values(), *parameters.values(), *buffers.values()], num_clients, copies)
        layout = parameter_layout(model, parameter_groups, parts, groups)
        self.params = Rows.empty(layout, parameters, num_clients)
        self.grads = self.params.zeros_like()
        self.buffers = Rows.empty(buffer_layout(model, parts), buffers, num_clients)
        self.client_ids: list[int] = []
        self.round = self.step = 0
        self.parameter_kinds, self.buffer_kinds = parameter_kinds(model), buffer_kinds(model)
        self._kinds = {**parameter_kinds(model, untrained=True), **self.buffer_kinds}
        self.server_rows = Rows.empty(self.params.layout, parameters, 1)
        self.server = Tensors(self.server_rows.row(0))
        self.pseudo_gradient = Rows({}, {})
        self.server_parameters, self.server_buffers = Tensors(parameters), Tensors(buffers)
        self.weights = torch.empty(0)
        self.local_steps: list[int] = []
        self.policy: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.rows: slice | list[int] = slice(0, num_clients)
        self.extra: dict[str, Tensor] = {}
        self._seed = 0
        self._over = self._in_local_steps = False

    def __len__(self) -> int:
        return len(next(iter(self.params.blocks.values())))

    @property
    def block_names(self) -> list[str]:
        """The names of all blocks of parameters and buffers."""
        return [*self.params.layout, *self.buffers.layout]

    def names(self, *kinds: str, untrained: bool = False) -> list[str]:
        """Return the names of the model's tensors of some kinds of state.

        The names are keys of ``params`` and ``buffers``. Parameters that are not trained, such as
        those of a moving average of the model, have no rows: their names are keys of
        ``server_parameters`` alone.

        Args:
            kinds: Kinds of state, such as ``"affine"`` (see ``fl_lightning.batch_norm.kinds``).
            untrained: Whether to include parameters that are not trained.

        Raises:
            ConfigurationError: There is no such kind of state.
        """
        for kind in kinds:
            check_choice("cohort.names", kind, KINDS)
        chosen = [name for name, kind in self._kinds.items() if kind in kinds]
        return [name for name in chosen if untrained or name in self.params or name in self.buffers]

    def treatment(self, block: str) -> str:
        """Return how this round treats a block, such as ``"averaged"`` or ``"frozen"``.

        Args:
            block: Name of a block of parameters or buffers.
        """
        layout = {**self.params.layout, **self.buffers.layout}[block]
        return treatment(self.policy, layout.kind, layout.parts)

    @property
    def treatments(self) -> dict[str, str]:
        """Treatment of each parameter and buffer in this round, such as ``"frozen"``."""
        layouts = {**self.params.layout, **self.buffers.layout}.items()
        return {name: self.treatment(block) for block, layout in layouts for name in layout.shapes}

    def is_trained(self, block: str) -> bool:
        """Return whether a parameter block is trained in this round."""
        return self.treatment(block) != "frozen"

    def updates(self, block: str) -> Tensor:
        """Return the clients' updates ``x_i - x`` of a parameter block, ``[C, columns]``."""
        return self.params.blocks[block] - self.server_rows.blocks[block]

    def mean(self, stacked: Tensor) -> Tensor:
        """Return the weighted mean of a tensor over the clients, ``[C, *shape] -> [*shape]``.

        Raises:
            ConfigurationError: The method is called in a local step.
        """
        if self._in_local_steps:
            raise ConfigurationError(
                "cohort.mean: in a local step clients are independent, and other ranks compute some of them; call it in "
                "on_round_start, on_before_aggregate or on_round_end"
            )
        return weighted_mean(stacked.reshape(len(self), -1), self.weights).view(stacked.shape[1:])

    @property
    def active(self) -> Tensor:
        """Mask of the clients that take part in the current local step, bool ``[C]``.

        After the local steps, all elements are True.
        """
        return torch.tensor([self._over or self.step < steps for steps in self.local_steps])

    def active_rows(self) -> list[int]:
        """Return the rows of the clients that take part in the current local step."""
        return [row for row, steps in enumerate(self.local_steps) if self.step < steps]

    def index(self, rows: list[int]) -> slice | Tensor:
        """Return an index for ascending rows: a slice if possible, otherwise a tensor.

        The CPU does not wait for the GPU.
        """
        if not rows or rows[-1] - rows[0] + 1 == len(rows):
            return slice(rows[0], rows[-1] + 1) if rows else slice(0, 0)
        index, device = torch.tensor(rows), next(iter(self.params.blocks.values())).device
        return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index

    def generators(self, purpose: str) -> list[torch.Generator]:
        """Return one random generator for each row.

        Args:
            purpose: Name of the use, such as ``"noise"``. Different names give independent numbers.
                The numbers also depend on the run's seed, the round, the client and the local step.
        """
        return [generator(self._seed, purpose, self.round, client, self.step) for client in self.client_ids]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer of the trained blocks ``[C, columns]``."""
        optimizer: torch.optim.Optimizer = self._optimizer.torch
        return optimizer

    def optimizer_state(self, key: str) -> Rows:
        """Return a state of the client optimizer, such as the momentum, for each parameter.

        The result maps parameter names to writable views ``[C, *shape]``. The views are zero at the
        start of each round. If a hook reads them before the first local step, SGD with dampening d
        moves by ``(1 - d) g`` in this step, instead of g.

        Args:
            key: Name of the state, such as ``"momentum_buffer"``.

        Raises:
            ConfigurationError: The client optimizer has no such state.
        """
        states = self._optimizer.states()
        if key not in states:
            raise ConfigurationError(
                f"client_optimizer {type(self.optimizer).__name__} keeps no state {key!r} (it keeps: "
                f"{', '.join(states) or 'nothing; set momentum > 0'})"
            )
        return self.optimizer_rows(self._everyones(key))

    def optimizer_rows(self, everyones: Mapping[str, Tensor]) -> Rows:
        """Return this cohort's rows of a state of the client optimizer, given by block."""
        blocks = {name: block[self.rows] for name, block in everyones.items()}
        return Rows({name: self.params.layout[name] for name in blocks}, blocks)

    def _everyones(self, key: str) -> dict[str, Tensor]:
        """Return a state of the client optimizer by block, with the rows of the entire cohort."""
        states: dict[str, dict[str, Tensor]] = self._optimizer.states()
        return states[key]

    @property
    def optimizer_state_keys(self) -> list[str]:
        """Names of the client optimizer's states, such as ``"momentum_buffer"``."""
        return list(self._optimizer.states())

    @property
    def optimizer_steps(self) -> dict[str, Tensor]:
        """Number of optimizer steps of each client, int64 ``[C]`` by block.

        The property can be set only at the start of a round.
        """
        taken, before = torch.tensor(self.local_steps), self._optimizer.initial_steps
        return {n: before[n][self.rows] + taken if n in before else taken for n in self.params.blocks}

    @optimizer_steps.setter
    def optimizer_steps(self, steps: Mapping[str, Tensor]) -> None:
        self._optimizer.restore_steps(steps)

    @property
    def optimizer_groups(self) -> dict[str, dict[str, Any]]:
        """Settings of the client optimizer, such as ``"lr"``, for each trained block.

        Hooks may change the settings.
        """
        groups: dict[str, dict[str, Any]] = self._optimizer.groups
        return groups

    def rest(self, block: str) -> None:
        """Let a block rest for all clients: set its gradient to 0, and take no steps.

        The block rests until :meth:`restart_optimizer` is called, or until the end of the round.
        """
        if self.is_trained(block):
            self.resting.add(block)
            self.grads.blocks[block].zero_()

    @property
    def resting(self) -> set[str]:
        """Names of the blocks that rest, see :meth:`rest`."""
        resting: set[str] = self._optimizer.resting
        return resting

    def restart_optimizer(self) -> None:
        """Reset the state of every client's optimizer."""
        self._optimizer.restart()

    def recall(self, memory: MutableMapping[int, Any]) -> None:
        """Restore each client's local state from a memory.

        Local state is state with the treatment ``local``. The first call stores the server's
        initial state under the key :data:`SERVER`. A client without an entry gets this initial
        state.

        Args:
            memory: A :class:`~fl_lightning.cohort.client_memory.ClientMemory` or dict, filled by
                :meth:`remember`. A client's entry maps block names to rows ``[columns]``.
        """
        blocks = self._local_blocks()
        initial = {name: block[0].clone() for name, block in blocks.items()} | {**memory.get(SERVER, {})}
        memory[SERVER] = initial
        for index, client in enumerate(self.client_ids):
            entry = memory.get(client, initial)
            for name, block in blocks.items():
                block[index].copy_(entry.get(name, initial[name]))

    def remember(self, memory: MutableMapping[int, Any]) -> None:
        """Store each client's local state, so that :meth:`recall` can restore it.

        If a client's state is not finite, the client keeps its old entry, if any.

        Args:
            memory: The callback's memory. The callback's ``saved`` must name it.
        """
        self.store_vectors(memory, self._local_blocks())

    def load_vectors(self, memory: MutableMapping[int, Any]) -> dict[str, Tensor]:
        """Load the vectors that were stored by :meth:`store_vectors`.

        The result has a tensor ``[C, columns]`` for each averaged block. The row of a client
        without an entry is zero.

        Args:
            memory: The callback's memory, filled by :meth:`store_vectors`.
        """
        blocks = {n: block for n, block in self.params.blocks.items() if self.treatment(n) == "averaged"}
        vectors = {name: torch.zeros_like(block) for name, block in blocks.items()}
        for index, client in enumerate(self.client_ids):
            entry = memory.get(client, {})
            for name in vectors.keys() & entry.keys():
                vectors[name][index] = entry[name]
        return vectors

    def store_vectors(self, memory: MutableMapping[int, Any], vectors: Mapping[str, Tensor]) -> None:
        """Store one vector for each client and block, so that :meth:`load_vectors` can load it.

        If a client's vectors are not finite, the client keeps its old entry, if any.

        Args:
            memory: The callback's memory. The callback's ``saved`` must name it.
            vectors: The vectors by block, ``[C, columns]``.
        """
        for index, client in enumerate(self.client_ids):
            entry = {name: rows[index].clone() for name, rows in vectors.items()}
            if is_finite(entry):
                memory[client] = {**memory.get(client, {}), **entry}

    def _local_blocks(self) -> dict[str, Tensor]:
        blocks = {**self.params.blocks, **self.buffers.blocks}
        return {name: block for name, block in blocks.items() if self.treatment(name) == "local"}
