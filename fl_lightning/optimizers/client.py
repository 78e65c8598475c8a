"""Client optimizer: one torch optimizer takes the local steps of all clients.

The optimizer's parameters are tensors with one row per client. An elementwise optimizer, such as
SGD or Adam, gives exactly the results of one optimizer per client.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.errors import ConfigurationError
from fl_lightning.optimizers.settings import GroupSettings, OptimizerCallable

_ZERO_STATES = {
    "momentum_buffer",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "grad_avg",
    "exp_inf",
    "step",
}


class ClientOptimizer:
    """Client optimizer that all clients share in one round.

    Args:
        factory: Function that creates the optimizer from parameter groups.
        blocks: Parameters ``[C, columns]`` by block name, with one row per client.
        gradients: Gradients with the same names and shapes as ``blocks``.
        overrides: Settings that replace the optimizer's defaults, by block name.
        lr_factor: Factor by which every learning rate is multiplied.
        rows: Rows that this process updates. Default: all rows.

    Attributes:
        torch: The torch optimizer.
        resting: Names of the blocks that take no steps until the optimizer is restarted.
        initial_steps: Each client's step count before the round, int64 ``[C]`` by block name; empty
            if all counts are 0.
    """

    by_row = False

    def __init__(
        self,
        factory: OptimizerCallable,
        blocks: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        overrides: GroupSettings,
        lr_factor: float = 1.0,
        rows: slice | None = None,
    ) -> None:
        self._factory, self._overrides, self._lr_factor = factory, overrides, lr_factor
        self._rows = rows or slice(None)
        self._clients = len(next(iter(blocks.values()), ()))
        self._blocks = {name: block[self._rows] for name, block in blocks.items()}
        self._gradients = {name: block[self._rows] for name, block in gradients.items()}
        self.restart()

    def restart(self) -> None:
        """Reset the optimizer to its initial state and settings."""
        self._states: dict[str, dict[str, Tensor]] = {}
        self.initial_steps: dict[str, Tensor] = {}
        self.resting: set[str] = set()
        self.torch: Optimizer = self._make(self._blocks)
        for name, block in self._blocks.items():
            block.grad = self._gradients[name]

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """Settings of each block."""
        return dict(zip(self._blocks, self.torch.param_groups, strict=True))

    @cached_property
    def _keys(self) -> dict[str, list[str]]:
        """Names of the state tensors of each block, such as ``["momentum_buffer"]``."""
        leaves = {name: torch.zeros(1) for name in self._blocks}
        for leaf in leaves.values():
            leaf.grad = torch.ones(1)
        trial = self._make(leaves)
        trial.step()
        return {
            name: [key for key, value in trial.state[leaf].items() if value is not None]
            for name, leaf in leaves.items()
        }

    def step(self) -> None:
        """Take one local step for every client of this process, except with blocks that rest."""
        groups = zip(self._blocks, self.torch.param_groups, strict=True)
        idle = [leaf for name, group in groups if name in self.resting for leaf in group["params"]]
        gradients = [leaf.grad for leaf in idle]
        for leaf in idle:
            leaf.grad = None  # as in plain PyTorch: no decay, and no momentum
        self.torch.step()
        for leaf, gradient in zip(idle, gradients, strict=True):
            leaf.grad = gradient

    def states(self, *, create: bool = True) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state as writable tensors ``[C, columns]``.

        The outer keys are names of states, such as ``"momentum_buffer"``. The inner keys are names
        of blocks. A process updates only the rows of its own clients. State without a row per
        client, such as a step count, is left out.

        Args:
            create: Whether to create zero state before the first local step. SGD with dampening d
                then moves by ``(1 - d) g`` in the first step, and by g without such state.

        Raises:
            ConfigurationError: The initial state of the optimizer is not zero.
        """
        if self._states:
            return self._states
        for name, keys in self._keys.items():
            block = self._blocks[name]
            if not create and not self.torch.state.get(block):
                continue
            state = self.torch.state[block]
            if not state:
                unknown = set(keys) - _ZERO_STATES
                if unknown:
                    raise ConfigurationError(
                        f"client_optimizer {type(self.torch).__name__}: its state ({', '.join(sorted(unknown))}) does not "
                        "start from zeros, so it cannot be kept across rounds; use SGD or Adam"
                    )
                for key in keys:
                    state[key] = torch.tensor(0.0) if key == "step" else torch.zeros_like(block)
            for key in keys:
                if state[key].shape == block.shape:
                    self._states.setdefault(key, {})[name] = self._of_all(state, key)
        return self._states

    def _of_all(self, state: dict[str, Tensor], key: str) -> Tensor:
        """Return a state tensor with the rows of all clients.

        The tensor in the optimizer becomes a view of the returned tensor.
        """
        rows = state[key]
        if len(rows) == self._clients:
            return rows
        everyones = rows.new_zeros(self._clients, *rows.shape[1:])
        everyones[self._rows] = rows
        state[key] = everyones[self._rows]
        return everyones

    def refuse_other_counts(self, name: str) -> None:
        """Raise a ``ConfigurationError`` if a parameter's step depends on the parameter's earlier steps.

        Adam counts steps, and SGD with dampening treats the first step differently. All parameters
        of a block share the count, which is wrong for a parameter that has no gradient in some
        steps. Counts that were restored are wrong also in later rounds.

        Args:
            name: Name of the parameter, for the message.
        """
        counts = any("step" in keys or set(keys) - _ZERO_STATES for keys in self._keys.values())
        groups = self.torch.param_groups
        dampens = any(group.get("dampening") and group.get("momentum") for group in groups)
        # momentum that is kept between rounds starts from zeros, not from a first step
        if counts or (dampens and not self.initial_steps):
            raise ConfigurationError(
                f"client_optimizer {type(self.torch).__name__}: parameter {name!r} has a gradient in some local steps only, and the steps of this optimizer depend on "
                "their number; use SGD without dampening, freeze the parameter, or train a LightningModule by SequentialExecutor"
            )

    def restore_steps(self, steps: Mapping[str, Tensor]) -> None:
        """Set the step count of each client, for optimizers that count steps, such as Adam.

        Such an optimizer has one step count per parameter. Each client's row therefore becomes a
        separate parameter.

        Args:
            steps: Step counts of the clients ``[C]``, by block name.
        """
        self.initial_steps = dict(steps)
        states = self.states()
        if not any("step" in keys for keys in self._keys.values()):
            return
        groups = [
            {**group, "params": list(block.unbind(0))}
            for group, block in zip(self.torch.param_groups, self._blocks.values(), strict=True)
        ]
        self.torch = self._factory(groups)
        for name, group in zip(self._blocks, groups, strict=True):
            local = {key: blocks[name][self._rows] for key, blocks in states.items()}
            for row, (leaf, taken) in enumerate(zip(group["params"], steps[name][self._rows], strict=True)):
                leaf.grad = self._gradients[name][row]
                self.torch.state[leaf] = {key: block[row] for key, block in local.items()}
                self.torch.state[leaf]["step"] = torch.tensor(float(taken))

    def _make(self, leaves: Mapping[str, Tensor]) -> Optimizer:
        optimizer = self._factory([{**self._overrides.get(n, {}), "params": [leaves[n]]} for n in leaves])
        for group in optimizer.param_groups:  # not in place, because groups may share this tensor
            group["lr"] = group["lr"] * group.pop("lr_scale", 1.0) * self._lr_factor
        return optimizer
