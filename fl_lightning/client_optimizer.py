"""One ordinary torch optimizer that takes the local step of every client of a cohort.

The optimizer sees whole blocks ``[C, columns]`` as its parameters. For elementwise optimizers (SGD in all its forms,
Adam, AdamW, RMSprop, Adagrad, ...) this is exactly one optimizer per client; others are refused.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.errors import ConfigurationError

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer from parameters or parameter groups: ``torch.optim.SGD`` with everything but ``params`` bound."""

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

_SERVER_ADVICE = "use SGD(lr=1), which is FedAvg, or SGD, Adam or Adagrad with settings of your own"
_NO_SERVER_OPTIMIZERS = {
    "LBFGS": "needs a closure that computes the loss again, which a server without data cannot",
    "Muon": "orthogonalises matrices, which takes no other parameters, such as biases and those of BN",
    "Adafactor": "rescales the pseudo-gradient by the size of the weights, which is none of FedOpt's server steps",
}


def optimizer_name(factory: OptimizerCallable) -> str:
    """The class name of the optimizer that a factory makes."""
    return type(factory([torch.zeros(1, 1)])).__name__


def check_elementwise(factory: OptimizerCallable) -> None:
    """Refuse optimizers that would mix clients when they are given all rows as one tensor.

    Two steps on a block of two rows must equal, bit for bit, the same steps on each row by itself.

    Raises:
        ConfigurationError: The optimizer cannot be made, or is not elementwise (Adafactor, Muon, LBFGS, ...).
    """
    try:
        name = optimizer_name(factory)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"client_optimizer: {error}") from error
    start = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.25, -0.125]])
    gradients = [
        torch.tensor([[1.0, 2.0, -3.0], [-50.0, 0.5, 7.0]]),
        torch.tensor([[0.5, -1.0, 1.0], [9.0, 2.0, 0.1]]),
    ]

    def steps(rows: slice | int) -> Tensor:
        leaf = start[rows].clone()
        optimizer = factory([leaf])
        for gradient in gradients:
            leaf.grad = gradient[rows].clone()
            optimizer.step()
        return leaf

    try:
        exact = torch.equal(steps(slice(None)), torch.stack([steps(0), steps(1)]))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"client_optimizer: {name} cannot step a cohort ({error}); use SGD or Adam"
        ) from error
    if not exact:
        raise ConfigurationError(
            f"client_optimizer: {name} is not elementwise, so its step would mix the clients of a cohort; use SGD, Adam, "
            "AdamW, RMSprop or Adagrad"
        )


def check_server_optimizer(factory: OptimizerCallable, parameters: Iterable[Tensor]) -> None:
    """Refuse optimizers that cannot step a server's parameters on a pseudo-gradient, by a trial step on copies.

    Raises:
        ConfigurationError: The optimizer cannot be made, cannot step, or is of a kind that has no meaning here.
    """
    # the model's own shapes: Muon takes matrices only, and a factory may sort the parameters it is given
    leaves = [torch.zeros_like(parameter, requires_grad=True) for parameter in parameters]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    try:
        optimizer = factory(leaves)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigurationError(f"server_optimizer: {error}; {_SERVER_ADVICE}") from error
    name = type(optimizer).__name__
    if any(base.__name__ in _NO_SERVER_OPTIMIZERS for base in type(optimizer).__mro__):
        reason = _NO_SERVER_OPTIMIZERS.get(name, "is of a kind that cannot step a pseudo-gradient")
        raise ConfigurationError(f"server_optimizer: {name} {reason}; {_SERVER_ADVICE}")
    try:
        optimizer.step()
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"server_optimizer: {name} cannot step the server ({error}); {_SERVER_ADVICE}"
        ) from error


def state_keys(factory: OptimizerCallable) -> list[str]:
    """Names of what an optimizer remembers of each parameter, such as ``["momentum_buffer"]``; found by a trial step."""
    leaf = torch.zeros(1)
    leaf.grad = torch.ones(1)
    optimizer = factory([leaf])
    optimizer.step()
    return [key for key, value in optimizer.state[leaf].items() if value is not None]


class ClientOptimizer:
    """The client optimizer of one round over the blocks of a cohort.

    Args:
        factory: Makes the optimizer from parameter groups.
        blocks: Parameter blocks ``[C, columns]``, by name.
        gradients: Gradient blocks of the same names and shapes.
        overrides: For a block name the settings that differ from the optimizer's own; ``lr_scale`` multiplies ``lr``.
        lr_factor: Factor on every learning rate in this round.
    """

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
        self._lr_factor = lr_factor
        self._states: dict[str, dict[str, Tensor]] = {}
        self._initial_steps: Tensor | None = None
        self._counts_steps = False
        self.torch = self._make({name: [block] for name, block in self._blocks.items()})
        for name, block in self._blocks.items():
            block.grad = self._gradients[name]

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
        self.torch = self._make(rows)
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
            group["lr"] *= self._overrides.get(name, {}).get("lr_scale", 1.0) * self._lr_factor
        return optimizer

    def _gather(self) -> None:
        for (name, block), group in zip(self._blocks.items(), self.torch.param_groups, strict=True):
            keys = state_keys(partial(_with_settings, self._factory, group))
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


def check_overrides(factory: OptimizerCallable, overrides: Mapping[str, Mapping[str, float]]) -> None:
    """Refuse settings in ``parameter_groups`` that the optimizer does not have, or whose values it does not take.

    Raises:
        ConfigurationError: An unknown group or setting, or a value out of range.
    """
    optimizer = factory([torch.zeros(1)])
    known = set(optimizer.defaults) | {"lr_scale"}
    for group, settings in overrides.items():
        if group not in ("batch_norm", "scalars", "bias"):
            raise ConfigurationError(
                f"parameter_groups: unknown group {group!r}; use batch_norm, scalars or bias"
            )
        for key in settings:
            if key not in known:
                raise ConfigurationError(
                    f"parameter_groups.{group}.{key}: {optimizer_name(factory)} has no such setting; it has "
                    f"{', '.join(sorted(known))}"
                )
        if not settings.get("lr_scale", 1.0) >= 0:
            raise ConfigurationError(
                f"parameter_groups.{group}.lr_scale: {settings['lr_scale']} must be at least 0 (0 freezes the group)"
            )
        _check_values(optimizer, group, settings)


def _check_values(optimizer: Optimizer, group: str, settings: Mapping[str, float]) -> None:
    """Let the optimizer's own constructor check a group's values: torch does not check those of parameter groups."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    arguments = {key: value for key, value in {**optimizer.defaults, **settings}.items() if key in accepted}
    try:
        kind([torch.zeros(1)], **arguments)
    except ValueError as error:
        values = ", ".join(f"{key}: {value}" for key, value in settings.items())
        raise ConfigurationError(f"parameter_groups.{group} ({values}): {error}") from error
    except TypeError:
        pass  # an optimizer of the user's own whose constructor takes other names: the round will tell
