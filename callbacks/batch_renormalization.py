"""Batch Renormalization: Ioffe, "Batch Renormalization: Towards Reducing Minibatch Dependence", arXiv 1702.03275."""

from collections.abc import Sequence
from math import inf
from typing import Literal

import lightning as L
import torch
from torch import Tensor

from fl_lightning import Cohort, FederatedCallback, FederatedModule, SwappedBatchNorm, swap_batch_norm
from fl_lightning.batch_norm import batch_norm_layers
from fl_lightning.errors import ConfigurationError, check_number


class RenormalizedBatchNorm(SwappedBatchNorm):
    """BN layer that corrects batch statistics towards the running statistics (Algorithm 1)."""

    method = "BatchRenormalization"
    scratch = ("rounds",)
    linear = False
    settings: "BatchRenormalization"

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``gamma ((x - m_B) / s_B r + d) + beta`` in training."""
        if not self.training:
            return super().forward(inputs)
        settings, names = self.settings, ("running_mean", "running_var", "num_batches_tracked", "rounds")
        running_mean, running_var, steps, rounds = map(self.get_buffer, names)
        values = self.values(inputs)
        mean, deviation = values.mean(1), (values.var(1, correction=0) + settings.eps).sqrt()
        with torch.no_grad():
            r_max, d_max = settings.limits(rounds if settings.unit == "rounds" else steps)
            running = (running_var + self.eps).sqrt()
            r = torch.clamp(deviation / running, 1 / r_max, r_max)
            d = torch.clamp((mean - running_mean) / running, -d_max, d_max)
            self.running_mean = running_mean + settings.momentum * (mean - running_mean)
            # in evaluation, sqrt(running_var + self.eps) is the running deviation
            self.running_var = (running + settings.momentum * (deviation - running)).square() - self.eps
            self.num_batches_tracked = steps + 1
        scale = r / deviation
        return self.scaled(inputs, scale, d - mean * scale)


class BatchRenormalization(FederatedCallback):
    """Batch Renormalization: the batch's statistics are corrected towards the running statistics.

    BN in training thus normalises almost as in evaluation. A BN layer normalises with the mean m_B
    and the standard deviation s_B of the batch. Then it corrects the result towards the running mean
    m and the running standard deviation s::

        y = gamma ((x - m_B) / s_B r + d) + beta
        r = clamp(s_B / s, 1 / r_max, r_max)
        d = clamp((m_B - m) / s, -d_max, d_max)

    No gradient flows through r and d. With r_max = 1 and d_max = 0, the layer is BN. Without
    limits, the forward pass normalises with m and s. The limits grow from 1 and 0, as in the paper.
    A client's local steps are counted over all rounds. A client that joins in a later round starts
    with the server's count, the largest number of steps of a client.

    A client moves m and s after each step. The server averages m and ``s^2 - eps`` of the layer,
    which ``running_mean`` and ``running_var`` hold.

    Args:
        r_max: Last limit of r, at least 1.
        d_max: Last limit of d, at least 0.
        r_growth: Two times. Between them, the limit of r grows linearly. The defaults of both growths
            are for tens of thousands of local steps. Shorter runs need earlier times.
        d_growth: Two times. Between them, the limit of d grows linearly.
        unit: Unit of the times: ``"steps"`` (local steps) or ``"rounds"``.
        momentum: Weight of a batch in m and s. It replaces the momentum of the layers.
        eps: Number added to the variance of a batch. It replaces the eps of the layers in training.

    Raises:
        ConfigurationError: A setting is out of range, or the model has no BN layer with running
            statistics.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[BatchRenormalization(1, 0, eps=1e-5)])
        >>> float((state["8.weight"] - train(small_cnn(), blobs(), rounds=2)["8.weight"]).abs().max()) < 1e-12
        True
    """

    paper = "Ioffe, arXiv 1702.03275"
    examples = (
        {"r_growth": [0, 4], "d_growth": [1, 3]},
        {"r_growth": [1, 2], "d_growth": [0, 2], "unit": "rounds"},
    )

    def __init__(
        self,
        r_max: float = 3.0,
        d_max: float = 5.0,
        r_growth: Sequence[int] = (5000, 40000),
        d_growth: Sequence[int] = (5000, 25000),
        unit: Literal["steps", "rounds"] = "steps",
        momentum: float = 0.01,
        eps: float = 1e-3,
    ) -> None:
        name = type(self).__name__
        check_number(f"{name}.r_max", r_max, least=1, below=inf)
        check_number(f"{name}.d_max", d_max, least=0, below=inf)
        check_number(f"{name}.momentum", momentum, least=0, most=1)
        check_number(f"{name}.eps", eps, above=0)
        for setting, times in {"r_growth": r_growth, "d_growth": d_growth}.items():
            if len(times) != 2 or not 0 <= times[0] < times[1]:
                raise ConfigurationError(f"{name}.{setting}: {times} must be two times, the earlier first")
        self.r_max, self.d_max, self.r_growth, self.d_growth = r_max, d_max, r_growth, d_growth
        self.unit, self.momentum, self.eps = unit, momentum, eps

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Replace BN layers by layers that renormalise."""
        for layer in swap_batch_norm(pl_module.model, RenormalizedBatchNorm, settings=self):
            note = ", the eps of the layers, as they hold s^2 - eps"
            check_number("BatchRenormalization.eps", self.eps, note, least=layer.eps)

    def limits(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return the limits of r and d after ``time`` local steps or rounds."""
        growths = (self.r_growth, self.d_growth)
        r, d = (((time - start) / (end - start)).clamp(0, 1) for start, end in growths)
        return 1 + (self.r_max - 1) * r, self.d_max * d

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Tell the layers the number of earlier rounds."""
        for name in batch_norm_layers(pl_module.model):
            cohort.buffers[f"{name}.rounds"].fill_(cohort.round - 1)
