"""Which optimizers may step a cohort or a server, and which settings they take: all that is checked before training."""

import inspect
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.errors import ConfigurationError
from fl_lightning.optimizers import GroupSettings, OptimizerCallable


def check_elementwise(factory: OptimizerCallable) -> None:
    """Refuse optimizers that would mix clients when they are given all rows as one tensor.

    Two steps on a block of two rows must equal, bit for bit, the same steps on each row by itself.

    Raises:
        ConfigurationError: The optimizer cannot be made, or is not elementwise (Adafactor, Muon, LBFGS, ...).
    """
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
        name = type(_finite(factory([torch.zeros(1, 1)]))).__name__
        exact = torch.equal(steps(slice(None)), torch.stack([steps(0), steps(1)]))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"client_optimizer: {error}; use SGD, Adam, AdamW, RMSprop or Adagrad with settings that they take"
        ) from error
    if not exact:
        raise ConfigurationError(
            f"client_optimizer: {name} is not elementwise, so its step would mix the clients of a cohort; use SGD, Adam, "
            "AdamW, RMSprop or Adagrad"
        )


def _finite(optimizer: Optimizer) -> Optimizer:
    """The optimizer, refused where settings that torch takes make every update infinite or NaN, now or soon."""
    for key, value in optimizer.defaults.items():
        numbers = [
            number for number in (value if isinstance(value, tuple) else [value]) if isinstance(number, float)
        ]
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"{type(optimizer).__name__}.{key}: {value} must be finite")
    if (momentum := optimizer.defaults.get("momentum", 0)) > 1:
        raise ValueError(f"{type(optimizer).__name__}.momentum: {momentum} must lie in [0, 1]")
    return optimizer


def check_server_optimizer(factory: OptimizerCallable, parameters: Iterable[Tensor]) -> None:
    """Refuse optimizers that cannot step a server's parameters on a pseudo-gradient, by a trial step on copies.

    Raises:
        ConfigurationError: The optimizer cannot be made or cannot step.
    """
    # the model's own shapes: a factory may sort the parameters it is given
    leaves = [torch.zeros_like(parameter, requires_grad=True) for parameter in parameters]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    try:
        _finite(factory(leaves)).step()
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"server_optimizer: {error}; use SGD(lr=1), which is FedAvg, or SGD, Adam or Adagrad with settings of your own"
        ) from error


def check_overrides(factory: OptimizerCallable, overrides: GroupSettings) -> None:
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
                    f"parameter_groups.{group}.{key}: {type(optimizer).__name__} has no such setting; it has "
                    f"{', '.join(sorted(known))}"
                )
        if not 0 <= settings.get("lr_scale", 1.0) < math.inf:
            raise ConfigurationError(
                f"parameter_groups.{group}.lr_scale: {settings['lr_scale']} must be finite and at least 0 (0 freezes the group)"
            )
        _check_values(optimizer, group, settings)


def _check_values(optimizer: Optimizer, group: str, settings: Mapping[str, float]) -> None:
    """Let the optimizer's own constructor check a group's values: torch does not check those of parameter groups."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    arguments = {key: value for key, value in {**optimizer.defaults, **settings}.items() if key in accepted}
    try:
        _finite(kind([torch.zeros(1)], **arguments))
    except ValueError as error:
        values = ", ".join(f"{key}: {value}" for key, value in settings.items())
        raise ConfigurationError(f"parameter_groups.{group} ({values}): {error}") from error
    except TypeError:
        pass  # an optimizer of the user's own whose constructor takes other names: the round will tell
