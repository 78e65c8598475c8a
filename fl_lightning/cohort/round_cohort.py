"""The class :class:`RoundCohort`: a cohort with the operations of a communication round."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fl_lightning.batch_norm.kinds import KINDS
from fl_lightning.client_data.fingerprint import digest
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.cohort.rows import Rows, join_columns
from fl_lightning.cohort.skipped_steps import SkippedSteps
from fl_lightning.errors import ConfigurationError
from fl_lightning.models.dropout import Dropout, dropout_keys
from fl_lightning.optimizers.client import ClientOptimizer
from fl_lightning.optimizers.settings import GroupSettings, OptimizerCallable
from fl_lightning.ranks import Ranks


def _memory(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class RowState(NamedTuple):
    """State of one client, as views of the client's row.

    Attributes:
        tensors: Parameters (autograd leaves) and buffers by name.
        places: By name, a view of the client's row and the view's location in memory.
        trained: The trained parameters.
        gradients: Views to which the gradients of ``trained`` are written.
    """

    tensors: dict[str, Tensor]
    places: dict[str, tuple[Tensor, tuple[int, int]]]
    trained: list[Tensor]
    gradients: list[Tensor]


class RoundCohort(Cohort):
    """Cohort with the operations of a round, from the broadcast to the server's step.

    Args:
        model: The server's model.
        num_clients: Number of clients C.
        parameter_groups: Settings of the client optimizer for each parameter group. Default: empty.
        ranks: The ranks that share the clients. Default: a single rank.
        parts: Parts of the model that a policy treats separately. Default: no parts.
        groups: Parameter group of each parameter. Default:
            :func:`~fl_lightning.cohort.rows.parameter_groups`.

    Attributes:
        parameter_groups: Settings of the client optimizer for each parameter group.
        parts: Parts of the model that a policy treats separately.
        buffer_aggregate: The aggregated buffers, ``[1, *shape]`` by name.
        own_rows: The rows that this rank computes.
        samples: Number of training samples that each client has processed in this round.
        trained_blocks: Names of the parameter blocks that are trained in this round.
        trained_names: Names of the parameters in ``trained_blocks``.
    """

    def __init__(
        self,
        model: nn.Module,
        num_clients: int,
        parameter_groups: GroupSettings | None = None,
        ranks: Ranks | None = None,
        parts: Sequence[str] = (),
        groups: Mapping[str, str] | None = None,
    ) -> None:
        self.ranks, self.parts = ranks or Ranks(), tuple(parts)
        super().__init__(model, num_clients, parameter_groups or {}, self.ranks.here, self.parts, groups)
        share = self.ranks.share(num_clients)
        self.own_rows = slice(share.start, share.stop)
        self._completed: set[str] = set()
        self.parameter_groups = parameter_groups or {}
        self.buffer_aggregate = Rows.empty(self.buffers.layout, self.server_buffers, 1)
        self.samples: list[int] = []
        self._dropout_keys = [f"{n}.key" for n, layer in model.named_modules() if isinstance(layer, Dropout)]
        self._keys: Tensor | None = None
        self.trained_blocks: list[str] = []
        self.trained_names: list[str] = []
        self._row_state: dict[int, RowState] = {}
        self._skipped = SkippedSteps()

    def broadcast(
        self,
        *,
        round_number: int,
        client_ids: Sequence[int],
        weights: Tensor,
        local_steps: Sequence[int],
        policy: Mapping[str, str],
        optimizer: OptimizerCallable,
        lr_factor: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Start a round: copy the server's state to every row, and create a client optimizer.

        Args:
            round_number: The communication round, from 1.
            client_ids: The clients, in increasing order.
            weights: Aggregation weights, shape ``[C]``, with sum 1.
            local_steps: Number of local steps of each client.
            policy: The treatment of each kind of state and each part of the model.
            optimizer: Function that creates the client optimizer.
            lr_factor: Factor that multiplies the client learning rate.
            seed: The run's seed, for the random numbers of dropout and ``generators``.

        Raises:
            ConfigurationError: The policy names a part that is not in ``parts``.
        """
        for part in policy.keys() - {*KINDS, *self.parts}:
            raise ConfigurationError(
                f"policy() declares {part!r} in round {round_number} and did not before training; declare a part in undecided() if "
                "training decides its round"
            )
        self.round, self.step, self._over = round_number, 0, False
        self.client_ids, self.weights = list(client_ids), weights
        self.local_steps, self.policy, self._seed = list(local_steps), dict(policy), seed
        self.extra, self._completed, self._keys = {}, set(), None
        self._skipped.start_round()
        self.samples = [0] * len(self)
        self.losses = torch.zeros(len(self), device=next(iter(self.params.blocks.values())).device)
        for name, layout in self.params.layout.items():
            row = join_columns(self.server_parameters, layout.shapes, out=self.server_rows.blocks[name][0])
            self.params.blocks[name].copy_(row.expand_as(self.params.blocks[name]))
        for name, layout in self.buffers.layout.items():
            block = self.buffers.blocks[name]
            block.copy_(join_columns(self.server_buffers, layout.shapes).expand_as(block))
        self.versions = {
            name: name if self.treatment(name) == "frozen" else f"{name} {digest(rows.blocks[name][:1])}"
            for rows in (self.params, self.buffers)
            for name, layout in rows.layout.items()
            if self.treatment(name) in ("frozen", "discarded") and layout.kind != "scratch"
        }
        trained = [name for name in self.params.blocks if self.is_trained(name)]
        if trained != self.trained_blocks:
            self.trained_blocks = trained
            self.trained_names = [name for block in trained for name in self.params.layout[block].shapes]
            self._row_state.clear()
        averaged = {n: block for n, block in self.params.layout.items() if self.treatment(n) == "averaged"}
        if averaged != self.pseudo_gradient.layout:
            self.pseudo_gradient = Rows.empty(averaged, self.server_parameters, 1)
        groups = {name: self.parameter_groups.get(self.params.layout[name].group, {}) for name in trained}
        blocks, gradients = ({n: rows.blocks[n] for n in trained} for rows in (self.params, self.grads))
        self._optimizer = ClientOptimizer(optimizer, blocks, gradients, groups, lr_factor, self.own_rows)

    @property
    def client_optimizer(self) -> Any:
        """The client optimizer of this round."""
        return self._optimizer

    @client_optimizer.setter
    def client_optimizer(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def learning_rates(self) -> dict[str, float]:
        """Return the largest client learning rate of each trained parameter group."""
        rates: dict[str, float] = {}
        for block, settings in self.optimizer_groups.items():
            group = self.params.layout[block].group
            rates[group] = max(rates.get(group, 0.0), float(settings["lr"]))
        return rates

    def first(self, clients: int) -> Self:
        """Return a cohort of ``clients`` clients, in the memory of this cohort's first rows."""
        if clients == len(self):
            return self
        cohort, share = copy(self), self.ranks.share(clients)
        cohort.rows, cohort._row_state = slice(0, clients), {}
        cohort.own_rows = slice(share.start, share.stop)
        for name in ("params", "grads", "buffers"):
            setattr(cohort, name, getattr(self, name).part(cohort.rows))
        return cohort

    def part(self, rows: slice | None = None) -> Self:
        """Return a cohort for local steps, whose rows are views of some rows of this cohort.

        Args:
            rows: The rows. Default: the rows that this rank computes.
        """
        part, rows = copy(self), rows or self.own_rows
        for name in ("params", "grads", "buffers"):
            setattr(part, name, getattr(self, name).part(rows))
        part.rows, part._in_local_steps, part._keys = rows, True, None
        part.client_ids, part.local_steps = self.client_ids[rows], self.local_steps[rows]
        part.samples, part.losses, part.weights = self.samples[rows], self.losses[rows], self.weights[rows]
        part.extra = {name: value[rows] for name, value in self.extra.items()}
        return part

    def finish_steps(self, part: Self, samples: Sequence[int], *, weigh_samples: bool = False) -> None:
        """Finish the local steps: gather the rows of all ranks, and average the losses.

        Args:
            part: The part of this cohort that this rank has computed.
            samples: Number of training samples that each client of the entire cohort has processed.
            weigh_samples: Whether to make the aggregation weights proportional to ``samples``.
        """
        self._skipped.restore_rows(part, part._optimizer)
        self.ranks.complete([*self._state(), self.losses, *self.extra.values()])
        self._over, self.step, self.samples = True, max(self.local_steps) - 1, list(samples)
        self.losses = self.losses / torch.tensor(self.local_steps, device=self.losses.device)
        if weigh_samples:
            self.weights = self._sample_weights()

    def _sample_weights(self) -> Tensor:
        return (torch.tensor(self.samples).double() / sum(self.samples)).to(self.losses.device)

    def subset(self, rows: list[int], weights: Tensor | None) -> Self:
        """Return a cohort without the clients that are left out after the local steps.

        Args:
            rows: The remaining rows, in ascending order.
            weights: Aggregation weights, shape ``[len(rows)]``, with sum 1. None means weights
                proportional to ``samples``.
        """
        cohort = copy(self)
        for name in ("params", "grads", "buffers"):
            setattr(cohort, name, getattr(self, name).chosen(rows))
        for name in ("client_ids", "local_steps", "samples"):
            setattr(cohort, name, [getattr(self, name)[row] for row in rows])
        cohort.rows = rows if isinstance(self.rows, slice) else [self.rows[row] for row in rows]
        cohort.losses = self.losses[rows]
        cohort.extra = {name: value[rows] for name, value in self.extra.items()}
        cohort.weights = cohort._sample_weights() if weights is None else weights
        return cohort

    def _state(self) -> list[Tensor]:
        return [*self.params.blocks.values(), *self.buffers.blocks.values()]

    def _everyones(self, key: str) -> dict[str, Tensor]:
        blocks = super()._everyones(key)
        if self._over and key not in self._completed:
            self.ranks.complete([*blocks.values()])
            self._completed.add(key)
        return blocks

    def begin_step(self, step: int) -> list[int]:
        """Begin a local step, and return the rows of the clients that take the step.

        The gradients of all other rows are set to 0. Dropout layers get new random keys.

        Args:
            step: The local step, from 0.
        """
        self.step = step
        self._skipped.start_step()
        for row in (row for row, steps in enumerate(self.local_steps) if step == steps):
            for block in self.grads.blocks.values():
                block[row].zero_()
        rows = self.active_rows()
        if self._dropout_keys and rows:
            if self._keys is None:  # of all local steps, so that a step copies numbers that are on the device
                steps = range(max(self.local_steps))
                keys = [dropout_keys(self._seed, self.round, self.client_ids, each) for each in steps]
                self._keys = torch.stack(keys).to(self.buffers[self._dropout_keys[0]].device)
            for name in self._dropout_keys:
                self.buffers[name].copy_(self._keys[step])
        return rows

    def row_state(self, row: int) -> RowState:
        """Return one client's state for a forward and backward pass, from a cache if possible."""
        if row not in self._row_state:
            params, buffers, gradients = self.params.row(row), self.buffers.row(row), self.grads.row(row)
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            # detach: the views of the row stay valid even if a forward pass sets ``x.data = y``
            detached = {name: value.detach() for name, value in buffers.items()}
            self._row_state[row] = RowState(
                tensors={**leaves, **detached},
                places={name: (value, _memory(value)) for name, value in {**params, **buffers}.items()},
                trained=[leaves[name] for name in self.trained_names],
                gradients=[gradients[name] for name in self.trained_names],
            )
        return self._row_state[row]

    def take_up(self, row: int, tensors: Mapping[str, Tensor]) -> None:
        """Update a client's row with the tensors that the forward pass has replaced.

        A model's forward pass may assign a new tensor to a module, or set ``x.data = y``.

        Args:
            row: The client's row.
            tensors: The tensors in the model after the forward pass, by name.

        Raises:
            ConfigurationError: The shape of a tensor has changed.
        """
        state = self.row_state(row)
        replaced = {
            name: value.detach().clone()  # clone: another tensor may share the memory
            for name, value in tensors.items()
            if value is not state.tensors[name]
            or _memory(value) != state.places[name][1]
            or value.shape != state.places[name][0].shape
        }
        for name, value in replaced.items():
            place = state.places[name][0]
            if value.shape != place.shape and value.numel() != 1:
                raise ConfigurationError(
                    f"model: the forward pass changes the shape of {name!r} from {list(place.shape)} to {list(value.shape)}; "
                    "make the model with the final shape"
                )
            place.copy_(value)
        if any(tensors[name] is state.tensors[name] for name in replaced):
            del self._row_state[row]

    def put_gradients(self, row: int, gradients: Sequence[Tensor | None]) -> None:
        """Store the gradients of a client.

        As in plain PyTorch, the local step skips parameters without a gradient.

        Args:
            row: The client's row.
            gradients: Gradient of each trained parameter. None if the loss does not depend on the
                parameter.
        """
        views = self.grads.row(row)
        used = [(views[n], g) for n, g in zip(self.trained_names, gradients, strict=True) if g is not None]
        torch._foreach_copy_([place for place, _ in used], [gradient for _, gradient in used])
        if len(used) < len(gradients):
            pairs = zip(self.trained_names, gradients, strict=True)
            self.skip([row], [name for name, gradient in pairs if gradient is None])

    def skip(self, rows: Sequence[int], names: Sequence[str]) -> None:
        """Skip parameters of some rows in this local step, and set their gradients to 0.

        If a method sets the gradient of a parameter afterwards, the parameter is not skipped.
        """
        for row in rows:
            self._skipped.add(row, names)
            for name in names:
                self.grads.row(row)[name].zero_()

    def skipped(self, row: int) -> list[str]:
        """Return the names of the parameters that a row skips in this local step."""
        return self._skipped.names(row)

    def add_losses(self, indices: list[int], losses: Tensor, sizes: Sequence[int]) -> None:
        """Add the losses and batch sizes of a local step to the sums of each row.

        Args:
            indices: The rows.
            losses: Loss of each row in ``indices``, shape ``[len(indices)]``.
            sizes: Batch size of each row in ``indices``.
        """
        self.losses[self.index(indices)] += losses.to(self.losses.dtype)
        for row, size in zip(indices, sizes, strict=True):
            self.samples[row] += size
        self._skipped.gradients_written(self)

    def take_step(self) -> None:
        """Take one step of the client optimizer for all rows. Skipped and resting state does not change."""
        if self._optimizer.by_row:
            for row in self.active_rows():
                self._optimizer.step_of(self, row)
        else:
            self._skipped.step(self, self._optimizer)

    def finish_step(self, step: int, last: int) -> None:
        """Save the state of clients that finish their local steps with ``step``.

        Args:
            step: The local step.
            last: The round's last local step. After this step, no state needs to be saved.
        """
        self._skipped.finish_step(self, self._optimizer, step, last)
