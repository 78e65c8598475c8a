"""FedTAN: Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", arXiv 2301.02982."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import lightning as L
import torch
from torch import Tensor

from fl_lightning import Cohort, FederatedCallback, FederatedModule
from fl_lightning.aggregation import require_weighted_mean
from fl_lightning.batch_norm import SwappedBatchNorm, cohort_mean, swap_batch_norm
from fl_lightning.randomness import generator

Backward = Literal["aggregated", "own", "none"]
Correction = Literal["union", "official"]


@dataclass(frozen=True)
class JointStep:
    """Local step in which BN layers use the statistics of the union of all clients' batches.

    Attributes:
        clients: Number of clients in the step.
        backward: The setting ``backward`` of :class:`FedTAN`.
        var_correction: The setting ``var_correction`` of :class:`FedTAN`.
    """

    clients: int
    backward: Backward
    var_correction: Correction

    def mean(self, statistic: Tensor) -> Tensor:
        """Return the mean of a statistic over all clients of the cohort.

        The setting ``backward`` decides which gradient flows through the mean.
        """
        mean: Tensor = cohort_mean(statistic, self.clients)
        if self.backward == "aggregated":
            return mean
        return mean.detach() if self.backward == "none" else statistic + (mean - statistic).detach()

    def unbiased(self, variance: Tensor, inputs: Tensor) -> Tensor:
        """Return the unbiased variance of the union of all clients' inputs.

        Args:
            variance: Biased variance of the union, ``[channels]``.
            inputs: The layer's inputs at one client, ``[b, channels, ...]``.
        """
        count = len(inputs)
        if self.var_correction == "union":
            count = self.clients * inputs[:, 0].numel()
        if count < 2:
            raise ValueError("expected more than 1 value per channel")
        return variance * (count / (count - 1))


class TANBatchNorm(SwappedBatchNorm):
    """BN layer that uses the statistics of all clients' batches in a joint step.

    Attributes:
        joint: The current joint step. With None, the layer is an ordinary BN layer.
    """

    method = "FedTAN"
    scratch = ("joint",)
    joint: JointStep | None

    def prepare(self) -> None:
        """Make this layer an ordinary BN layer."""
        self.joint = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the normalised inputs, in a joint step with statistics of all clients' batches."""
        if self.joint is None or not self.training:
            output: Tensor = super().forward(inputs)
            return output
        self._check_input_dim(inputs)  # type: ignore[no-untyped-call]  # torch gives it no types
        assert self.running_mean is not None
        each = [0, *range(2, inputs.dim())]
        values = inputs.to(self.running_mean.dtype)
        mean = self.joint.mean(values.mean(each, keepdim=True))
        # the gradient through the mean of all clients is 0, but its derivative, which attacks need, is not
        center = mean if self.joint.backward == "aggregated" else mean.detach()
        variance = self.joint.mean((values - center).square().mean(each, keepdim=True))
        self._track(mean.flatten(), self.joint.unbiased(variance.flatten(), inputs))
        output = (values - mean) / (variance + self.eps).sqrt()
        if self.affine:
            output = output * self.weight.view_as(mean) + self.bias.view_as(mean)
        return output.to(inputs.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.momentum is not None
        self.get_buffer("running_mean").mul_(1 - self.momentum).add_(self.momentum * mean)
        self.get_buffer("running_var").mul_(1 - self.momentum).add_(self.momentum * variance)
        self.get_buffer("num_batches_tracked").add_(1)


class FedTAN(FederatedCallback):
    """FedTAN: clients exchange BN statistics and their gradients in the first local step.

    In the first local step, every BN layer normalises with the mean and variance of all clients'
    batches together. The clients also average the gradients that flow through this mean and
    variance. Each layer needs three exchanges, in which the clients wait for each other. Later
    local steps are as in FedAvg: BN normalises with the client's batch, and updates the client's
    running statistics.

    With one local step per round (E = 1), the run of any model equals centralised training with BN
    on the union of all batches. This requires equal aggregation weights, because the first step
    weights all clients equally. Weights are equal if all clients have the same number of samples,
    or with ``weighting: uniform``, as in the authors' code.

    With every executor, the first step is one forward pass over all clients. This pass needs memory
    for the batches of all clients. The batches must have equal shapes.

    Args:
        backward: Gradient that flows through the statistics in the first step. ``"aggregated"``:
            the clients average this gradient, as in the paper. ``"own"``: the gradient flows only
            through the client's own statistics, without an exchange in the backward pass. This may
            be the paper's baseline "FedAvg + Algorithm 2", of which we had no description and no
            code. ``"none"``: no gradient flows through the statistics.
        var_correction: Factor that makes the running variance unbiased. ``"union"``: N/(N-1) for N
            values per channel in the batches of all clients, as in centralised BN. ``"official"``:
            b/(b-1) for b images in a client's batch, as in the authors' code.
        affine_init: Initial gamma of BN. ``"ones"``: the model's initial values. ``"uniform"``:
            random numbers in [0, 1) from the module's seed, as in the authors' code. A checkpoint
            replaces the initial gamma.
        restart_momentum: Whether clients restart the optimizer after the first step, as in the
            authors' code.

    Raises:
        ConfigurationError: A setting is unknown, the model has no BN layer, the aggregator is not
            the weighted mean, or another callback keeps the momentum despite ``restart_momentum``.

    Example:
        >>> from fl_lightning.testing import blobs, centralised, distance, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=3, callbacks=[FedTAN()])
        >>> distance(state, centralised(small_cnn(), blobs(), steps=3)) < 1e-12
        True
    """

    paper = "Wang et al., arXiv 2301.02982"
    needs_joint_forward = True
    equalities: tuple[str, ...] = ("own_twin", "centralised_bn", "one_client_is_plain_training")
    examples = ({}, {"affine_init": "uniform"}, {"backward": "own"})

    def __init__(
        self,
        backward: Backward = "aggregated",
        var_correction: Correction = "union",
        affine_init: Literal["ones", "uniform"] = "ones",
        restart_momentum: bool = True,
    ) -> None:
        self.backward, self.var_correction = backward, var_correction
        self.affine_init, self.restart_momentum = affine_init, restart_momentum
        if restart_momentum:
            self.takes = {"the client optimizer's state": "set FedTAN.restart_momentum: false"}
        if backward != "aggregated":
            self.paper += "; FedAvg + Algorithm 2, inferred"
        if (backward, var_correction, affine_init) != ("aggregated", "union", "ones"):
            self.equalities = ()

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that running statistics are averaged, so that no other method can change this."""
        return {"mean": "averaged", "var": "averaged"}

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Replace BN layers by layers that can exchange statistics, and draw their initial gamma."""
        require_weighted_mean(pl_module, "FedTAN", "takes means inside of a local step")
        self.layers: list[TANBatchNorm] = swap_batch_norm(pl_module.model, TANBatchNorm)
        for index, layer in enumerate(self.layers):
            if self.affine_init == "uniform" and layer.affine:
                draw = generator(pl_module.seed, "FedTAN affine_init", index)
                layer.weight.data.copy_(torch.rand(layer.weight.shape, generator=draw))

    def on_train_start(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Print a note if ``backward`` is not ``"aggregated"``."""
        if self.backward != "aggregated":
            pl_module.print(
                f"FedTAN(backward={self.backward}): 'FedAvg + Algorithm 2', inferred because its text was not available."
            )

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Prepare all BN layers for the exchange in the first local step."""
        cohort.extra["calls"] = _calls(cohort)
        for layer in self.layers:
            layer.joint = JointStep(len(cohort), self.backward, self.var_correction)

    def on_local_step_end(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Return to ordinary BN after the first step.

        If ``restart_momentum`` is set, also restart the optimizers.
        """
        if step == 0:
            cohort.extra["calls"].neg_().add_(_calls(cohort))
            for layer in self.layers:
                layer.joint = None
            if self.restart_momentum:
                cohort.restart_optimizer()

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Return the numbers of floats that a client sends and receives in the first local step."""
        channels = torch.tensor([layer.num_features for layer in self.layers])
        floats = int(cohort.extra["calls"][0].cpu() @ channels) * (4 if self.backward == "aggregated" else 2)
        return floats, floats

    def extra_exchanges(self, cohort: Cohort) -> int:
        """Return the number of exchanges.

        Each call of a BN layer needs 3 exchanges, or 2 if gradients are not averaged.
        """
        return int(cohort.extra["calls"][0].sum()) * (3 if self.backward == "aggregated" else 2)


def _calls(cohort: Cohort) -> Tensor:
    """Return each client's number of calls of each BN layer in training, ``[C, layers]``."""
    return torch.stack([cohort.buffers[name] for name in cohort.names("counter")], 1)
