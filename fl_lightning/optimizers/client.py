"""One ordinary torch optimizer that takes the local step of every client of a cohort.

The optimizer sees whole blocks ``[C, columns]`` as its parameters. For elementwise optimizers (SGD in all its forms,
Adam, AdamW, RMSprop, Adagrad, ...) this is exactly one optimizer per client; others are refused (see
``fl_lightning.optimizers.checks``).
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.errors import ConfigurationError
from fl_lightning.optimizers import OptimizerCallable

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


def state_keys(factory: OptimizerCallable) -> list[str]:
    """Names of what an optimizer remembers of each parameter, such as ``["momentum_buffer"]``; found by a trial step."""
    leaf = torch.zeros(1)
    leaf.grad = torch.ones(1)
    optimizer = factory([leaf])
    optimizer.step()
    return [key for key, value in optimizer.state[leaf].items() if value is not None]


class ClientOptimizer:
    """The client optimizer over the blocks of a cohort; each round restarts it.

    Args:
        factory: Makes the optimizer from parameter groups.
        blocks: Parameter blocks ``[C, columns]``, by name.
        gradients: Gradient blocks of the same names and shapes.
        overrides: For a block name the settings that differ from the optimizer's own; ``lr_scale`` multiplies ``lr``.
        lr_factor: Factor on every learning rate in this round.
    """

    _initial_steps: Tensor | None

    def __init__(
        self,
        factory: OptimizerCallable,
        blocks: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        overrides: Mapping[str, Mapping[str, float]],
        lr_factor: float = 1.0,
    ) -> None:
        self._factory = factory
        self._blocks = dict(blocks)
        self._gradients = dict(gradients)
        self._overrides = overrides
        self._start(lr_factor)

    def restart(self, lr_factor: float = 1.0) -> None:
        """Begin again as new: without state, with the settings that it was made with.

        State that starts from zeros is set to zero where it lies, which is faster than to have the system hand out the
        same memory again.

        Args:
            lr_factor: Factor on every learning rate in this round.
        """
        if self._in_rows or not self._from_zeros:
            self._start(lr_factor)
            return
        self._initial_steps = None
        for group, fresh in zip(self.torch.param_groups, self._fresh, strict=True):
            group.update(fresh)
        self._scale_rates(lr_factor)
        kept = [v for state in self.torch.state.values() for v in state.values() if torch.is_tensor(v)]
        if kept:
            torch._foreach_zero_(kept)

    def _start(self, lr_factor: float) -> None:
        self._states: dict[str, dict[str, Tensor]] = {}
        self._initial_steps = None
        self._counts_steps = self._in_rows = False
        self.torch = self._make({name: [block] for name, block in self._blocks.items()})
        self._fresh = [{k: v for k, v in g.items() if k != "params"} for g in self.torch.param_groups]
        self._scale_rates(lr_factor)
        for name, block in self._blocks.items():
            block.grad = self._gradients[name]
        self._from_zeros = self._starts_from_zeros()
        if self._from_zeros:
            self._gather()  # so that no bit depends on whether a round is the first of its process

    def _starts_from_zeros(self) -> bool:
        """Whether all that the optimizer remembers is zero in a new one, and nothing is kept outside of its state."""
        if not type(self.torch).__module__.startswith("torch.optim.") or any(
            group.get("dampening") for group in self.torch.param_groups
        ):
            return False
        return all(set(self._state_keys(group)) <= _ZERO_STATES for group in self.torch.param_groups)

    def _state_keys(self, group: dict[str, Any]) -> list[str]:
        return state_keys(partial(_with_settings, self._factory, group))

    def _scale_rates(self, factor: float) -> None:
        for group in self.torch.param_groups:
            group["lr"] = group["lr"] * factor  # not in place: a tensor would be everybody's

    def step(self) -> None:
        """Take one local step of every row."""
        self.torch.step()

    def state(self, key: str) -> dict[str, Tensor]:
        """What the optimizer remembers under ``key``, as blocks ``[C, columns]`` that can be read and written.

        Before the first local step of a round the state starts from zeros, as it would after a reset.

        Raises:
            ConfigurationError: The optimizer keeps no such state.
        """
        if not self._states:
            self._gather()
        if key not in self._states:
            raise ConfigurationError(
                f"client_optimizer {type(self.torch).__name__} keeps no state {key!r} (it keeps: "
                f"{', '.join(self._states) or 'nothing; set momentum > 0'})"
            )
        return self._states[key]

    def state_names(self) -> list[str]:
        """The states that :meth:`state` gives, without the step count."""
        if not self._states:
            self._gather()
        return list(self._states)

    def steps_taken(self, local_steps: Tensor) -> Tensor:
        """Each row's step count: what it started from plus ``local_steps [C]`` of this round."""
        return local_steps if self._initial_steps is None else self._initial_steps + local_steps

    def restore_steps(self, steps: Tensor) -> None:
        """Start each row from its own step count ``[C]``; only optimizers that count steps (Adam) take notice.

        Adam shares one count per parameter, so rows that differ become parameters of their own: the same arithmetic.
        """
        self._initial_steps = steps
        if not self._states:
            self._gather()
        if not self._counts_steps:
            return
        if bool((steps == steps[0]).all()):
            for block in self._blocks.values():
                self.torch.state[block]["step"].fill_(float(steps[0]))
            return
        rows = {name: list(block.unbind(0)) for name, block in self._blocks.items()}
        rates = [group["lr"] for group in self.torch.param_groups]
        self.torch, self._in_rows = self._make(rows), True
        for group, rate in zip(self.torch.param_groups, rates, strict=True):
            group["lr"] = rate
        for name, leaves in rows.items():
            for index, leaf in enumerate(leaves):
                leaf.grad = self._gradients[name][index]
                self.torch.state[leaf] = {key: blocks[name][index] for key, blocks in self._states.items()}
                self.torch.state[leaf]["step"] = torch.tensor(float(steps[index]))

    def _make(self, leaves: Mapping[str, list[Tensor]]) -> Optimizer:
        groups = []
        for name, parameters in leaves.items():
            settings = {
                key: value for key, value in self._overrides.get(name, {}).items() if key != "lr_scale"
            }
            groups.append({"params": parameters, **settings})
        optimizer = self._factory(groups)
        for name, group in zip(leaves, optimizer.param_groups, strict=True):
            group["lr"] = group["lr"] * self._overrides.get(name, {}).get("lr_scale", 1.0)
        return optimizer

    def _gather(self) -> None:
        for (name, block), group in zip(self._blocks.items(), self.torch.param_groups, strict=True):
            keys = self._state_keys(group)
            self._counts_steps |= "step" in keys
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
                # step counts and NAdam's mu_product are one number that all rows share
                if state[key].shape == block.shape:
                    self._states.setdefault(key, {})[name] = state[key]


def _with_settings(factory: OptimizerCallable, group: dict[str, Any], parameters: Iterable[Any]) -> Optimizer:
    """An optimizer with a parameter group's own settings (an override may switch momentum on for one group)."""
    return factory([{**group, "params": list(parameters)}])
