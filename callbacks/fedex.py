"""FedEx that decides when BN freezes: Khodak et al., "Federated Hyperparameter Tuning", arXiv 2106.04502.

The paper appeared at NeurIPS 2021. Appendix B.6 of the FixBN paper names FedEx as a way to find T*,
the last round before BN freezes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning import Cohort, FederatedModule
from fl_lightning.batch_norm import SwappedBatchNorm, batch_norm_layers, evaluating, swap_batch_norm
from fl_lightning.errors import check_number
from fl_lightning.methods import FoundFreezing
from fl_lightning.randomness import derive_seed, generator, seeded

_BATCH, _FREEZE = 0, 1
_LOSS = "FedEx loss"  # key in ``cohort.extra``


class ChosenBatchNorm(SwappedBatchNorm):
    """BN layer that uses running statistics for some clients, and the batch for others."""

    method = "FedExFixBN"
    scratch = ("frozen",)

    def prepare(self) -> None:
        """Register ``frozen``, a bool buffer with a separate value for each client."""
        self.register_buffer("frozen", torch.zeros_like(self.running_mean[0], dtype=torch.bool), False)  # type: ignore[index]  # swap_batch_norm has checked it

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs, normalised with running statistics or with the batch."""
        if not self.training:
            return super().forward(inputs)
        frozen, buffers = self.get_buffer("frozen"), dict(self.named_buffers(recurse=False))
        before = {name: buffers[name].clone() for name in buffers if name not in self.scratch}
        mean, variance = before["running_mean"], before["running_var"]
        shared = F.batch_norm(inputs, mean, variance, self.weight, self.bias, False, 0.0, self.eps)
        # set clones: the backward pass of ``shared`` needs the old buffers unchanged
        for name, old in before.items():
            setattr(self, name, old.clone())
        by_batch = super().forward(inputs)
        for name, old in before.items():
            setattr(self, name, torch.where(frozen, old, self.get_buffer(name)))
        return torch.where(frozen, shared, by_batch)


class FedExFixBN(FoundFreezing):
    """FixBN with FedEx: clients try batch and frozen statistics, and T* follows from their losses.

    This is our adaptation of FedEx, which tunes settings that may differ between the clients of a
    round. T*, the last round before BN freezes, is one number for the entire run. The search
    therefore compares two configurations of a client:

    - Train with batch statistics.
    - Train with the server's running statistics, without changing them (frozen).

    Each client samples a configuration from the server's distribution theta. After the local steps,
    each client reports the loss on the client's next batch, in eval mode with the client's running
    statistics. The paper uses validation data; after the first epoch, our client has already
    trained on the samples of the next batch. The server uses the losses for an exponentiated
    gradient step on theta. Losses that are not finite are ignored.

    The search ends once the entropy of theta is below ``cutoff``. If frozen statistics are then
    more probable, T* is the current round, and the statistics of all clients freeze from the next
    round on. If batch statistics are more probable, all clients train with batch statistics to the
    end.

    The search is myopic: it compares losses after the local steps of a round, not final accuracies.
    Each gradient step subtracts a baseline from the losses: the mean loss of earlier rounds. The
    first round takes no step, because no earlier round exists. In the paper, the first round takes
    a step with the baseline 0.

    Each round of the search logs ``fedex/probability_freeze`` and ``fedex/entropy`` (nats). After a
    search that ends with frozen statistics, each round logs ``fixbn/freeze_round``.

    Args:
        schedule: Schedule of the step sizes, see :func:`step_size`.
        discount: Discount of older losses in the baseline, in [0, 1]. A round's loss has
            ``discount`` times the weight of the next round's loss.
        cutoff: Entropy of theta in nats below which the search ends, in [0, ln 2). With 0, the
            search never ends.

    Raises:
        ConfigurationError: A setting is out of range, or the model has no BN layer with running
            statistics.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=3, callbacks=[method := FedExFixBN()])
        >>> method.freeze_round is None  # T* is not found yet
        True
    """

    paper = "Khodak et al., arXiv 2106.04502 (adapted)"
    examples = ({}, {"schedule": "aggressive", "cutoff": 0.6})
    saved = ("log_theta", "past_losses", "past_steps", "batch_round")

    def __init__(
        self,
        schedule: Literal["auto", "adaptive", "aggressive", "constant"] = "auto",
        discount: float = 0.9,
        cutoff: float = 0.1,
    ) -> None:
        check_number("FedExFixBN.discount", discount, least=0, most=1)
        check_number(
            "FedExFixBN.cutoff", cutoff, ", ln 2: there the search starts", least=0, below=math.log(2)
        )
        self.schedule, self.discount, self.cutoff = schedule, discount, cutoff
        self.log_theta = torch.full((2,), -math.log(2), dtype=torch.float64)
        self.past_losses: list[float] = []
        self.past_steps = 0.0
        self.batch_round: int | None = None

    def undecided(self) -> Mapping[str, str]:
        """Declare that statistics may still freeze, unless the search chose batch statistics."""
        return super().undecided() if self.batch_round is None else {}

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Replace BN layers by layers that follow each client's sampled configuration."""
        swap_batch_norm(pl_module.model, ChosenBatchNorm)

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Sample each client's configuration."""
        super().on_round_start(trainer, pl_module, cohort)
        if self._searches(cohort.round):
            frozen = self._choices(pl_module, cohort) == _FREEZE
            for name in batch_norm_layers(pl_module.model):
                cohort.buffers[f"{name}.frozen"].copy_(frozen)
            cohort.extra[_LOSS] = torch.zeros(len(cohort), dtype=torch.float64, device=pl_module.device)

    def on_local_step_end(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Measure the losses of clients that finish, before a method such as FedNova changes updates."""
        done = [row for row, steps in enumerate(cohort.local_steps) if steps == step + 1]
        if done and self._searches(cohort.round):
            for row, loss in zip(done, held_out_losses(pl_module, cohort, done), strict=True):
                cohort.extra[_LOSS][row] = loss  # a list of rows as an index would make the CPU wait

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Update theta from the losses that the clients report."""
        if not self._searches(cohort.round):
            return
        losses, weights = cohort.extra[_LOSS].cpu(), cohort.weights.double().cpu()
        if bool((finite := losses.isfinite()).any()):
            losses, weights = losses[finite], weights[finite] / weights[finite].sum()
            theta = self.log_theta.exp()
            if self.past_losses:
                baseline = discounted_mean(self.past_losses, self.discount)
                choices = self._choices(pl_module, cohort)[finite]
                gradient = gradient_estimate(losses, choices, weights, theta, baseline)
                size, self.past_steps = step_size(gradient, self.schedule, self.past_steps)
                self.log_theta = exponentiated_step(self.log_theta, gradient, size)
            self.past_losses.append(float(weights @ losses))
        pl_module.log("fedex/probability_freeze", float(self.log_theta[_FREEZE].exp()))
        pl_module.log("fedex/entropy", entropy(self.log_theta))
        if entropy(self.log_theta) >= self.cutoff:
            return
        if self.log_theta.argmax() == _FREEZE:
            self.freeze_after(pl_module, cohort.round)
        else:
            self.batch_round = cohort.round
            pl_module.print(
                f"FedExFixBN: batch statistics have won in round {cohort.round}; BN is not frozen."
            )
        self.past_losses.clear()

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Return the numbers of floats sent (a client's loss) and received (a configuration).

        Both numbers are 1 during the search, and 0 after the search.
        """
        return (1, 1) if self._searches(cohort.round) else (0, 0)

    def _searches(self, round_number: int) -> bool:
        decided = self.freeze_round if self.batch_round is None else self.batch_round
        return decided is None or round_number <= decided

    def _choices(self, pl_module: FederatedModule, cohort: Cohort) -> Tensor:
        """Return each client's configuration, int64 ``[C]``.

        0 means batch statistics, and 1 means frozen statistics. The random choice depends only on
        theta, seed, round and client.
        """
        theta = self.log_theta.exp()
        draws = [
            torch.multinomial(theta, 1, generator=generator(pl_module.seed, "FedEx", cohort.round, client))
            for client in cohort.client_ids
        ]
        return torch.cat(draws)


def gradient_estimate(
    losses: Tensor, choices: Tensor, weights: Tensor, theta: Tensor, baseline: float
) -> Tensor:
    """Estimate the gradient of the expected loss with respect to theta, ``[k]``.

    The estimate weights each client's loss by the inverse probability of the client's choice
    (importance weighting).

    Args:
        losses: Loss of each client, ``[C]``.
        choices: Index of the configuration that each client sampled, int64 ``[C]``.
        weights: Aggregation weights ``[C]``, sum 1.
        theta: Probability of each of the k configurations, ``[k]``.
        baseline: Number to subtract from every loss. It reduces the variance of the estimate
            without changing the expected step.
    """
    shares = weights * (losses - baseline) / theta[choices]
    return torch.zeros_like(theta).index_add(0, choices, shares)


def discounted_mean(past: Sequence[float], discount: float) -> float:
    """Return a weighted mean of values, of which the oldest value is the first.

    The newest value has the weight 1. Every other value has ``discount`` times the weight of the
    next value.
    """
    weights = torch.tensor(discount, dtype=torch.float64) ** torch.arange(len(past) - 1, -1, -1)
    return float(weights @ torch.tensor(past, dtype=torch.float64) / weights.sum())


def step_size(gradient: Tensor, schedule: str, past: float) -> tuple[float, float]:
    """Return the step size ``sqrt(2 ln k) / scale``, and the updated ``past``.

    The schedule chooses the scale. Let a be the largest absolute entry of a gradient.

    - ``"constant"``: 1.
    - ``"auto"``: The square root of the number of steps so far.
    - ``"adaptive"``: The square root of the sum of a^2 over all steps so far.
    - ``"aggressive"``: The number a of this step.

    Args:
        gradient: Gradient estimate of this step, ``[k]`` for k configurations.
        schedule: Name of the schedule.
        past: 0 in the first step; in later steps, the ``past`` that the previous step returned. For
            ``"auto"``, it is the number of earlier steps; for ``"adaptive"``, the sum of their a^2.
    """
    largest = float(gradient.abs().max())
    past += {"auto": 1.0, "adaptive": largest**2}.get(schedule, 0.0)
    scale = {"constant": 1.0, "aggressive": largest}.get(schedule, math.sqrt(past))
    return math.sqrt(2 * math.log(len(gradient))) / (scale or 1.0), past


def exponentiated_step(log_theta: Tensor, gradient: Tensor, size: float) -> Tensor:
    """Return log theta after one step of exponentiated gradient descent, ``[k]``.

    Args:
        log_theta: Logarithms of the k probabilities, ``[k]``.
        gradient: Gradient of the loss with respect to theta, ``[k]``.
        size: Step size.
    """
    moved = log_theta - size * gradient
    return moved - moved.logsumexp(0)


def entropy(log_theta: Tensor) -> float:
    """Return the entropy in nats of a distribution, given its log probabilities ``[k]``."""
    return float(-torch.special.xlogy(log_theta.exp(), log_theta.exp()).sum())


@torch.no_grad()
def held_out_losses(pl_module: FederatedModule, cohort: Cohort, rows: Sequence[int]) -> Tensor:
    """Return the loss of some clients on their next batch, float64 ``[len(rows)]``.

    The client's model is in eval mode and uses the client's running statistics.

    Args:
        pl_module: The federated module.
        cohort: The cohort, directly after the last local step of these clients.
        rows: The rows of the clients.
    """

    def loss(row: int) -> Tensor:
        client = cohort.client_ids[row]
        position = pl_module.plan.first_step(client, cohort.round) + cohort.local_steps[row]
        (batch,) = pl_module.data.cohort_batch([client], [position]).batches()
        state = {**cohort.params.row(row), **cohort.buffers.row(row)}
        seed = derive_seed(pl_module.seed, "FedEx loss", cohort.round, client)
        # evaluating last: layers that merge weights in eval mode must merge the client's
        with seeded(seed), pl_module.client.slots.filled(state), evaluating(pl_module.model):
            return pl_module.client.losses_apart(pl_module.on_device(batch))[0].double()

    return torch.stack([loss(row) for row in rows])
