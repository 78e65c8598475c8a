"""Adaptive server optimizers (Reddi et al., "Adaptive Federated Optimization", ICLR 2021)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fl_lightning.errors import check_number
from fl_lightning.recorded import Recorded


class AdaptiveServer(Recorded, Optimizer, ABC):
    """Base class of adaptive server optimizers (Reddi et al. 2021, Algorithm 2).

    Delta is the mean change of the clients' parameters, which is the negative pseudo-gradient. A
    step has three parts:

    1. ``m <- beta1 m + (1 - beta1) Delta``.
    2. The second moment v is updated from Delta^2, see :meth:`second_moment`. The initial value of
       v is tau^2.
    3. ``theta <- theta + lr m / (sqrt(v) + tau)``.

    There is no bias correction. Parameters without a gradient do not change. Frozen and local
    parameters have no gradient.

    Args:
        params: The server's parameters or parameter groups.
        lr: The server's learning rate, at least 0.
        betas: beta1 and beta2, each in [0, 1).
        tau: Constant added to the denominator, above 0. Smaller values make the step sizes more
            adaptive.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
    ) -> None:
        name = type(self).__name__
        check_number(f"{name}.lr", lr, least=0)
        for beta in betas:
            check_number(f"{name}.betas", beta, least=0, below=1)
        check_number(f"{name}.tau", tau, above=0)
        super().__init__(params, {"lr": lr, "betas": betas, "tau": tau})

    @staticmethod
    @abstractmethod
    def second_moment(v: Tensor, square: Tensor, beta2: float) -> Tensor:
        """Return the new second moment v, computed from the current v, Delta^2 and beta2."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one server step.

        Args:
            closure: Function from Lightning that computes the loss.

        Returns:
            The result of the closure.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            (beta1, beta2), tau = group["betas"], group["tau"]
            for theta in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[theta]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(theta), torch.full_like(theta, tau**2)
                delta = -theta.grad
                state["m"] = beta1 * state["m"] + (1 - beta1) * delta
                state["v"] = self.second_moment(state["v"], delta.square(), beta2)
                theta += group["lr"] * state["m"] / (state["v"].sqrt() + tau)
        return loss


class FedAdam(AdaptiveServer):
    """Server optimizer FedAdam, with ``v <- beta2 v + (1 - beta2) Delta^2``.

    :class:`AdaptiveServer` defines the symbols.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, server_optimizer=FedAdam)
    """

    @staticmethod
    def second_moment(v: Tensor, square: Tensor, beta2: float) -> Tensor:
        """Return the new second moment v, which is a moving average of Delta^2."""
        return beta2 * v + (1 - beta2) * square


class FedYogi(AdaptiveServer):
    """Server optimizer FedYogi, with ``v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)``.

    :class:`AdaptiveServer` defines the symbols.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, server_optimizer=FedYogi)
    """

    @staticmethod
    def second_moment(v: Tensor, square: Tensor, beta2: float) -> Tensor:
        """Return the new second moment: v moves towards Delta^2 by ``(1 - beta2) Delta^2``."""
        return v - (1 - beta2) * square * (v - square).sign()
