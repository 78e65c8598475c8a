"""FedTAN: Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", arXiv 2301.02982."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import lightning as L
import torch
from torch import Tensor

from fl_lightning import FederatedCallback
from fl_lightning.aggregation import require_weighted_mean
from fl_lightning.batch_norm import SwappedBatchNorm, cohort_mean, swap_batch_norm
from fl_lightning.errors import check_choice
from fl_lightning.randomness import generator

if TYPE_CHECKING:
    from fl_lightning import Cohort, FederatedModule

Backward = Literal["aggregated", "own", "none"]
Correction = Literal["union", "official"]


@dataclass(frozen=True)
class JointStep:
    """Joint step of ``clients`` clients with the settings of :class:`FedTAN`."""

    clients: int
    backward: Backward
    var_correction: Correction

    def mean(self, statistic: Tensor) -> Tensor:
        """Return the cohort's mean of a client's statistic; ``backward`` decides its gradient."""
        mean: Tensor = cohort_mean(statistic, self.clients)
        if self.backward == "aggregated":
            return mean
        return mean.detach() if self.backward == "none" else statistic + (mean - statistic).detach()

    def unbiased(self, variance: Tensor, inputs: Tensor) -> Tensor:
        """Return the unbiased variance of the union, given one client's inputs ``[b, channels, ...]``."""
        count = len(inputs)
        if self.var_correction == "union":
            count = self.clients * inputs[:, 0].numel()
        if count < 2:
            raise ValueError("expected more than 1 value per channel")
        return variance * (count / (count - 1))


class TANBatchNorm(SwappedBatchNorm):
    """BN layer that normalises with the union of all clients' batches in a joint step.

    Attributes:
        joint: The present joint step; None for ordinary BN.
    """

    method = "FedTAN"
    scratch = ("joint",)
    joint: JointStep | None

    def prepare(self) -> None:
        """Start with ordinary BN."""
        self.joint = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return BN of the inputs; in a joint step with the mean and variance of the union."""
        if self.joint is None or not self.training:
            output: Tensor = super().forward(inputs)
            return output
        self._check_input_dim(inputs)  # type: ignore[no-untyped-call]  # torch gives it no types
        assert self.running_mean is not None
        each = [0, *range(2, inputs.dim())]
        values = inputs.to(self.running_mean.dtype)
        mean = self.joint.mean(values.mean(each, keepdim=True))
        # sum(x - mu) = 0 over the union, so no gradient flows from the variance to the mean
        variance = self.joint.mean((values - mean.detach()).square().mean(each, keepdim=True))
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

    In that step every BN layer uses the mean and variance of the union of all clients' batches, and
    the gradients that flow through them are averaged: three exchanges a layer, with all clients in
    lockstep. With one local step (E = 1) the round's mean gradient, and so the whole run, equals
    centralised training with BN on the union batches, for any model. Further local steps are
    ordinary and use the client's batch and running statistics.

    Under any executor the first step is one forward pass over all clients, with memory for all
    batches. Batches must have equal shapes. All clients have equal weight in this step, so the
    equality requires clients of one size or ``weighting: uniform``, the authors' 1/n.

    Args:
        backward: ``"aggregated"``: the method. ``"own"``: only the forward pass exchanges, and a
            client's gradient flows only through the client's own statistics. This is the paper's
            baseline "FedAvg + Algorithm 2", INFERRED since its text and code were not available.
            ``"none"``: as ``"own"``, but no gradient flows through statistics.
        var_correction: Factor that makes the running variance unbiased. ``"union"``: N/(N-1) with
            all N values per channel, as in centralised BN; ``"official"``: b/(b-1) with the b
            images of a client, as in the authors' code.
        affine_init: Initial gamma of BN. ``"ones"``: the model's; ``"uniform"``: in [0, 1), as in
            the authors' code, drawn from the module's seed if training starts without a checkpoint.
        restart_momentum: Whether clients restart their optimizer after the first step, as in the
            authors' code.

    Raises:
        ConfigurationError: Unknown setting, no BN, an aggregator other than the weighted mean, or
            another callback that keeps the momentum although FedTAN restarts it.

    Example:
        >>> from fl_lightning.testing import blobs, centralised, distance, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=3, callbacks=[FedTAN()])
        >>> distance(state, centralised(small_cnn(), blobs(), steps=3)) < 1e-12
        True
    """

    paper = "Wang et al., arXiv 2301.02982"
    needs_joint_forward = True
    claims: tuple[str, ...] = ("own_twin", "centralised_bn", "one_client_is_plain_training")
    examples = ({}, {"affine_init": "uniform"}, {"backward": "own"})

    def __init__(
        self,
        backward: Backward = "aggregated",
        var_correction: Correction = "union",
        affine_init: Literal["ones", "uniform"] = "ones",
        restart_momentum: bool = True,
    ) -> None:
        check_choice("FedTAN.backward", backward, ("aggregated", "own", "none"))
        check_choice("FedTAN.var_correction", var_correction, ("union", "official"))
        check_choice("FedTAN.affine_init", affine_init, ("ones", "uniform"))
        self.backward, self.var_correction = backward, var_correction
        self.affine_init, self.restart_momentum = affine_init, restart_momentum
        if restart_momentum:
            self.takes = {"the client optimizer's state": "set FedTAN.restart_momentum: false"}
        if backward != "aggregated":
            self.paper += "; FedAvg + Algorithm 2, inferred"
        if (backward, var_correction, affine_init) != ("aggregated", "union", "ones"):
            self.claims = ()

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare running statistics averaged, so that no other method may change their treatment."""
        return {"mean": "averaged", "var": "averaged"}

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Swap BN layers for layers that exchange in joint steps, and draw their initial gamma."""
        require_weighted_mean(pl_module, "FedTAN", "takes means inside of a local step")
        self.layers: list[TANBatchNorm] = swap_batch_norm(pl_module.model, TANBatchNorm)
        for index, layer in enumerate(self.layers):
            if self.affine_init == "uniform" and layer.affine:
                draw = generator(pl_module.seed, "FedTAN affine_init", index)
                layer.weight.data.copy_(torch.rand(layer.weight.shape, generator=draw))

    def on_train_start(self, trainer: L.Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]  # narrows pl_module
        """Print a note if the backward pass is not the method's."""
        if self.backward != "aggregated":
            pl_module.print(
                f"FedTAN(backward={self.backward}): 'FedAvg + Algorithm 2', inferred because its text was not available."
            )

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Make the first local step joint."""
        cohort.extra["calls"] = _calls(cohort)
        for layer in self.layers:
            layer.joint = JointStep(len(cohort), self.backward, self.var_correction)

    def on_local_step_end(
        self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort", step: int
    ) -> None:
        """Switch to ordinary BN after the first step, and restart the client optimizers if set."""
        if step == 0:
            cohort.extra["calls"].neg_().add_(_calls(cohort))
            for layer in self.layers:
                layer.joint = None
            if self.restart_momentum:
                cohort.restart_optimizer()

    def extra_payload(self, cohort: "Cohort") -> tuple[int, int]:
        """Return the exchanged floats: means, variances and gradients of all BN layers' calls."""
        channels = torch.tensor([layer.num_features for layer in self.layers])
        floats = int(cohort.extra["calls"][0].cpu() @ channels) * (4 if self.backward == "aggregated" else 2)
        return floats, floats

    def extra_exchanges(self, cohort: "Cohort") -> int:
        """Return the exchanges: 2 at each call of a BN layer, 3 if gradients are averaged."""
        return int(cohort.extra["calls"][0].sum()) * (3 if self.backward == "aggregated" else 2)


def _calls(cohort: "Cohort") -> Tensor:
    """Return how often each client updated its running statistics, ``[C, layers]``."""
    kinds = cohort.buffer_kinds
    return torch.stack([cohort.buffers[name] for name in kinds if kinds[name] == "counter"], 1)
