"""One ordinary torch optimizer that takes the local step of every client of a cohort.

The optimizer sees whole blocks ``[C, columns]`` as its parameters. For elementwise optimizers (SGD in all its forms,
Adam, AdamW, RMSprop, Adagrad, ...) this is exactly one optimizer per client; others are refused (see
``fl_lightning.optimizers.checks``).
"""

from collections.abc import Mapping
from functools import cached_property

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
    """The client optimizer over the blocks of a cohort, in one round.

    Args:
        factory: Makes the optimizer from parameter groups.
        blocks: Parameter blocks ``[C, columns]``, by name.
        gradients: Gradient blocks of the same names and shapes.
        overrides: For a block name the settings that differ from the optimizer's own.
        lr_factor: Factor on every learning rate.
        rows: The rows that this process steps; None for all.

    Attributes:
        torch: The torch optimizer.
        initial_steps: The step count that each row of a block starts from in this round, int64 ``[C]``; empty for zeros.
    """

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
        """Begin again as new: without state, with the settings that it was made with."""
        self._states: dict[str, dict[str, Tensor]] = {}
        self.initial_steps: dict[str, Tensor] = {}
        self.torch: Optimizer = self._make(self._blocks)
        for group in self.torch.param_groups:
            group["lr"] = group["lr"] * self._lr_factor  # not in place: a tensor would be everybody's
        for name, block in self._blocks.items():
            block.grad = self._gradients[name]

    @cached_property
    def _keys(self) -> dict[str, list[str]]:
        """Names of what the optimizer remembers of each block, such as ``["momentum_buffer"]``; found by a trial step."""
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
        """Take one local step of every row."""
        self.torch.step()

    def states(self) -> dict[str, dict[str, Tensor]]:
        """What the optimizer remembers: for each of its names blocks ``[C, columns]`` that can be read and written.

        Of rows that other processes step they hold what was written to them.

        Before the first local step of a round all starts from zeros, as it would after a reset. Left out is what all rows
        share: step counts, and NAdam's ``mu_product``.

        Raises:
            ConfigurationError: What it remembers starts from something else.
        """
        if self._states:
            return self._states
        for name, keys in self._keys.items():
            block = self._blocks[name]
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
        """A state ``[C, columns]``, whose own rows are what the optimizer goes on with."""
        own = state[key]
        if len(own) == self._clients:
            return own
        everyones = own.new_zeros(self._clients, *own.shape[1:])
        everyones[self._rows] = own
        state[key] = everyones[self._rows]
        return everyones

    def refuse_other_counts(self, name: str) -> None:
        """Refuse to step a parameter that a row has left out before: one count of steps is shared by all rows and tensors of a block.

        Raises:
            ConfigurationError: The optimizer counts steps.
        """
        if any("step" in keys for keys in self._keys.values()):
            raise ConfigurationError(
                f"client_optimizer {type(self.torch).__name__}: parameter {name!r} had no gradient in an earlier local step of this "
                "round and has one now, and this optimizer counts the steps of each parameter; use SGD"
            )

    def restore_steps(self, steps: Mapping[str, Tensor]) -> None:
        """Start each row of each block from its own step count ``[C]``; only optimizers that count steps (Adam) take notice.

        Adam shares one count per parameter, so rows become parameters of their own: the same arithmetic.
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
            own = {key: blocks[name][self._rows] for key, blocks in states.items()}
            for row, (leaf, taken) in enumerate(zip(group["params"], steps[name][self._rows], strict=True)):
                leaf.grad = self._gradients[name][row]
                self.torch.state[leaf] = {key: block[row] for key, block in own.items()}
                self.torch.state[leaf]["step"] = torch.tensor(float(taken))

    def _make(self, leaves: Mapping[str, Tensor]) -> Optimizer:
        optimizer = self._factory([{**self._overrides.get(n, {}), "params": [leaves[n]]} for n in leaves])
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * group.pop("lr_scale", 1.0)
        return optimizer
