"""Checks of the client optimizer, the server optimizer and their settings before training."""

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.errors import ConfigurationError, check_choice, check_number
from fl_lightning.optimizers.settings import GroupSettings, OptimizerCallable


def check_elementwise(factory: OptimizerCallable) -> None:
    """Check that an optimizer does not mix the rows of a tensor. Each row belongs to a client.

    Steps on a tensor with two rows must equal steps on each row alone, bit for bit. The steps are
    repeated with gradients that exceed any norm to which an optimizer may clip them.

    Raises:
        ConfigurationError: The optimizer cannot be created, or is not elementwise (such as
            Adafactor or Muon).
    """
    start = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.25, -0.125]])
    gradients = torch.tensor([[[1.0, 2.0, -3.0], [-50.0, 0.5, 7.0]], [[0.5, -1.0, 1.0], [9.0, 2.0, 0.1]]])

    def steps(rows: slice | int, scale: float) -> Tensor:
        leaf = start[rows].clone()
        optimizer = factory([leaf])
        for gradient in scale * gradients:
            leaf.grad = gradient[rows].clone()
            optimizer.step()
        return leaf

    remedy = "use SGD, Adam, AdamW, RMSprop or Adagrad"
    with _refusals("client_optimizer", f"; {remedy} with settings that they take"):
        name = type(_finite(factory([torch.zeros(1, 1)]))).__name__
        exact = all(
            torch.equal(steps(slice(None), scale), torch.stack([steps(0, scale), steps(1, scale)]))
            for scale in (1.0, 1e5)
        )
    if not exact:
        raise ConfigurationError(
            f"client_optimizer: {name} is not elementwise, so its step would mix the clients of a cohort; {remedy}"
        )


def check_server_optimizer(factory: OptimizerCallable, parameters: Iterable[Tensor]) -> None:
    """Check the server optimizer by a trial step with zero gradients.

    Raises:
        ConfigurationError: The optimizer refuses the parameters or a setting.
    """
    # use the shapes of the model's parameters, because a factory may group parameters by shape
    leaves = [torch.zeros_like(parameter, requires_grad=True) for parameter in parameters]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    remedy = "; use SGD(lr=1), which is FedAvg, or SGD, Adam or Adagrad with other settings"
    with _refusals("server_optimizer", remedy):
        _finite(factory(leaves)).step()


def check_overrides(factory: OptimizerCallable, overrides: GroupSettings) -> None:
    """Raise a ``ConfigurationError`` if the optimizer refuses a setting in ``parameter_groups``."""
    optimizer = factory([torch.zeros(1)])
    accepted = inspect.signature(type(optimizer)).parameters
    for group, settings in overrides.items():
        check_choice("parameter_groups", group, ("batch_norm", "scalars", "bias"))
        for key in settings:
            check_choice(f"parameter_groups.{group}", key, sorted({*optimizer.defaults, "lr_scale"}))
        scale, note = settings.get("lr_scale", 1.0), " (0 freezes the group)"
        check_number(f"parameter_groups.{group}.lr_scale", scale, note, least=0, below=math.inf)
        # pass values to the constructor, because torch does not check values in parameter groups
        values = ", ".join(f"{key}: {value}" for key, value in settings.items())
        arguments = {
            key: value for key, value in {**optimizer.defaults, **settings}.items() if key in accepted
        }
        with _refusals(f"parameter_groups.{group} ({values})"):
            _finite(type(optimizer)([torch.zeros(1)], **arguments))


def _finite(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer. Raise a ``ValueError`` if a setting would make updates infinite."""
    for key, value in optimizer.defaults.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            raise ValueError(f"{type(optimizer).__name__}.{key}: {value} must be finite")
    if (momentum := optimizer.defaults.get("momentum", 0)) > 1:
        raise ValueError(f"{type(optimizer).__name__}.momentum: {momentum} must lie in [0, 1]")
    return optimizer


@contextmanager
def _refusals(place: str, remedy: str = "") -> Iterator[None]:
    """Convert exceptions of an optimizer to one-line errors that name the setting."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigurationError(f"{place}: {error}{remedy}") from error
