"""The client optimizers that the copies of a LightningModule have configured themselves."""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.clients.copies import ClientCopy, Copies, whole_copy
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.cohort.rows import split_block
from fl_lightning.errors import ConfigurationError
from fl_lightning.optimizers.settings import OptimizerCallable


class CopiesOptimizer:
    """The client optimizers of a round, one for each copy.

    A cohort uses this object like a :class:`~fl_lightning.optimizers.client.ClientOptimizer`. Copies
    and optimizers are made when they are first used.

    Args:
        task: What a client computes.
        cohort: The round's cohort.
        make: Function that makes an optimizer from parameters. Default: ``configure_optimizers`` of
            each copy.
    """

    by_row = True

    def __init__(self, task: Any, cohort: RoundCohort, make: OptimizerCallable | None = None) -> None:
        self._task, self._cohort, self._part, self._make = task, cohort, cohort.part(), make
        self._of_row: list[Optimizer] | None = None
        self.restart()

    @property
    def copies(self) -> Copies:
        """The copies of the clients of this rank."""
        copies: Copies = self._task.copies_of(self._part)
        return copies

    @property
    def of_row(self) -> list[Optimizer]:
        """The optimizer of each copy."""
        if self._of_row is None:
            self._of_row = [self._configured(copy) for copy in self.copies.of_row]
        return self._of_row

    def _configured(self, copy: ClientCopy) -> Optimizer:
        if self._make is not None:
            return self._make([*copy.trained.values()])
        with self._task.acting(copy):
            return copy.configure()

    @property
    def torch(self) -> Optimizer:
        """The optimizer of the first copy. A rank without clients has that of the server's module."""
        return self.of_row[0] if self.of_row else self._task.configured.template

    @property
    def groups(self) -> dict[str, Any]:
        """The settings of each trained block, which count for all clients."""
        return {block: _Settings(self, block) for block in self._cohort.trained_blocks}

    def restart(self) -> None:
        """Drop all optimizers with their state and settings."""
        self._of_row = None
        self._states: dict[str, dict[str, Tensor]] = {}
        self.initial_steps: dict[str, Tensor] = {}
        self.resting: set[str] = set()

    def parameters(self, row: int, block: str) -> list[Tensor]:
        """Return a block's parameters in the copy of a row."""
        trained = self.copies.of_row[row].trained
        return [trained[name] for name in self._cohort.params.layout[block].shapes]

    def group(self, row: int, block: str) -> dict[str, Any]:
        """Return the parameter group that has a block in the optimizer of a row."""
        first = self.parameters(row, block)[0]
        return next(
            group for group in self.of_row[row].param_groups if any(first is p for p in group["params"])
        )

    def follow(self) -> None:
        """Prepare a local step: make what is missing, and the changes of methods to the server's layers."""
        self.copies.follow()
        _ = self.of_row

    def schedule(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the settings of parameter groups that schedulers have changed."""
        layout = self._cohort.params.layout
        for block in self._cohort.trained_blocks if settings else ():
            for row in range(len(self.of_row)):
                self.group(row, block).update(settings.get(layout[block].group, {}))

    def step_of(self, part: RoundCohort, row: int) -> None:
        """Take a client's local step. As in plain PyTorch, it skips parameters without a gradient."""
        copy, gradients, skipped = self.copies.of_row[row], part.grads.row(row), part.skipped(row)
        for name, parameter in copy.trained.items():
            view = gradients[name]
            parameter.grad = None if name in skipped and not view.any() else view
        for block in self.resting:
            for parameter in self.parameters(row, block):
                parameter.grad = None
        self.of_row[row].step()
        copy.take_up()

    def states(self, *, create: bool = True) -> dict[str, dict[str, Tensor]]:
        """Return the optimizers' state as writable tensors ``[C, columns]``, by key and block.

        Args:
            create: Whether to create the tensors if no method has asked for them in this round.
        """
        if self._states or not create:
            return self._states
        keys, self._counts = self._keys()
        for block in self._cohort.trained_blocks:
            rows, layout = self._cohort.params.blocks[block], self._cohort.params.layout[block]
            for key in keys:
                whole = self._states.setdefault(key, {})[block] = torch.zeros_like(rows)
                views = split_block(whole[self._cohort.own_rows], layout.shapes)
                for row, optimizer in enumerate(self.of_row):
                    for parameter, view in zip(self.parameters(row, block), views.values(), strict=True):
                        state = optimizer.state[parameter]
                        if isinstance(state.get(key), Tensor):
                            view[row].copy_(state[key])
                        state[key] = view[row]
                        if self._counts:
                            state.setdefault("step", torch.tensor(0.0))
        return self._states

    def _keys(self) -> tuple[list[str], bool]:
        """Return the names of the state tensors, and whether the optimizer counts steps, by a trial."""
        optimizer = self._configured(whole_copy(self._task, {}))
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found = {
            key: value.shape == parameter.shape
            for parameter in parameters
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }
        counts = found.pop("step", None) is not None
        if odd := [key for key, fits in found.items() if not fits]:
            raise ConfigurationError(
                f"client_optimizer {type(optimizer).__name__}: its state ({', '.join(odd)}) has no value for each weight, so it "
                "cannot be kept across rounds; use SGD or Adam"
            )
        return [*found], counts

    def restore_steps(self, steps: Mapping[str, Tensor]) -> None:
        """Set the step count of each client ``[C]``, by block name."""
        self.initial_steps = dict(steps)
        self.states()
        for block in self._cohort.trained_blocks if self._counts else ():
            for row, taken in enumerate(steps[block][self._cohort.own_rows].tolist()):
                for parameter in self.parameters(row, block):
                    self.of_row[row].state[parameter]["step"] = torch.tensor(float(taken))


class _Settings(MutableMapping[str, Any]):
    """Settings of a block in the optimizers of all copies."""

    def __init__(self, optimizers: CopiesOptimizer, block: str) -> None:
        self._all, self._block = optimizers, block

    def _first(self) -> dict[str, Any]:
        if self._all.of_row:
            return self._all.group(0, self._block)
        label = self._all._cohort.params.layout[self._block].group
        settings: dict[str, Any] = self._all._task.configured.group(label)
        return settings

    def __getitem__(self, key: str) -> Any:
        return self._first()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        for row, optimizer in enumerate(self._all.of_row):
            group, own = self._all.group(row, self._block), self._all.parameters(row, self._block)
            if rest := [p for p in group["params"] if not any(p is each for each in own)]:
                group["params"] = rest  # of other blocks, which keep their settings
                group = {**group, "params": own}
                optimizer.param_groups.append(group)
            group[key] = value

    def __delitem__(self, key: str) -> None:
        raise TypeError("settings of an optimizer cannot be deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(self._first())

    def __len__(self) -> int:
        return len(self._first())
