"""DP-FedAvg: McMahan et al., "Learning Differentially Private Recurrent Language Models", arXiv 1710.06963."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from fl_lightning import Cohort, ConfigurationError, FederatedCallback, FederatedModule
from fl_lightning.aggregation import WeightedMean
from fl_lightning.cohort import treatments
from fl_lightning.methods import PrivateMethod, noise_for
from fl_lightning.randomness import generator
from fl_lightning.round import policy_stages, resolve_policy

_AT_THE_SERVER = ("on_before_aggregate", "on_after_aggregate", "on_round_end")


class PrivateFedAvg(PrivateMethod):
    """DP-FedAvg: each client's update is clipped, and the server adds noise to their sum.

    The server moves by ``(1 / (q n)) (sum_i min(1, C / |u_i|) u_i + N(0, sigma^2 C^2 I))``. u_i is the whole
    update of client i: averaged parameters and averaged BN statistics. Each of the n clients takes
    part with probability q, independently of the others (the settings ``participation: q`` and
    ``cohort_sampling: poisson``). The divisor q n is fixed, so the number of clients stays private. A
    round without clients adds noise alone. The server's models are then
    (epsilon, delta)-differentially private: they hardly depend on any single client.

    BN is possible in all rounds. A running variance that the noise makes 0 or negative keeps its last
    value. If FixBN freezes the statistics, they are no longer in the update.

    Args:
        clip: Largest norm C of a client's update, above 0. Infinity: no clipping, which needs
            ``noise: 0``.
        noise: Noise multiplier sigma. With 0, there is no privacy.
        epsilon: Epsilon at the end of the planned rounds, at most. The noise is computed from it.
            Give either ``noise`` or ``epsilon``.
        delta: Delta, in (0, 1). It should be below 1 / the number of clients.
        accountant: Accountant of Opacus: ``"rdp"``, or ``"prv"``, which is tighter and slower.

    Raises:
        ConfigurationError: A setting is out of range, the run's settings or another method do not
            suit, or Opacus is not installed.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> private = PrivateFedAvg(clip=1.0, noise=1.0)
        >>> state = train(small_cnn(), blobs(), 4, [private], participation=0.9, **private.needs)
        >>> private.result_lines()["privacy"]
        'epsilon 10.2 at delta 1e-05 (RDP); unit: all records of a client'
    """

    paper = "McMahan et al., arXiv 1710.06963"
    examples = ({"clip": 1.0, "noise": 0.5}, {"clip": 0.3, "epsilon": 50.0})
    takes = ("the noise of differential privacy",)
    needs: ClassVar[Mapping[str, Any]] = {"weighting": "uniform", "cohort_sampling": "poisson"}
    unit = "all records of a client"

    _rate: float  # with which clients take part
    _before: dict[str, Tensor]  # running statistics that the server has sent

    def on_train_start(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # a run's module has this type
        """Check that the run suits, and compute the noise."""
        plan, reason = pl_module.plan, ""
        if plan.rate is None:
            reason = (
                "cohorts of a fixed size are not those of its accountant; set model.cohort_sampling: poisson"
            )
        elif pl_module.weighting != "uniform":
            reason = f"model.weighting: {pl_module.weighting} gives clients more weight than the clipping norm allows; use uniform"
        elif pl_module.min_clients > 1:
            reason = (
                f"model.min_clients: {pl_module.min_clients} lets one client decide about the others; use 1"
            )
        elif type(pl_module.aggregator) is not WeightedMean or not pl_module.statistics.is_mean:
            reason = "its noise is that of a mean; leave model.aggregator and model.statistics_aggregator out"
        for _, policy in policy_stages(pl_module.federated_callbacks, pl_module.planned_rounds):
            for kind, treatment in policy.items():
                if kind != "counter" and treatment not in ("averaged", "frozen", "discarded"):
                    reason = f"it cannot be combined with a method that treats {kind!r} as {treatment}, which reaches the server without noise"
        for method in pl_module.federated_callbacks:
            name = type(method).__name__
            reads = any(is_overridden(hook, method, FederatedCallback) for hook in _AT_THE_SERVER)
            if method is not self and method.role != "observer" and reads:
                reason = f"it and {name} cannot be combined: {name} uses or changes what clients send after it is clipped, or before the noise is added; leave one of the two out, or derive a callback that only measures from Observer"
        self.refuse(pl_module, reason)
        self._rate = plan.rate or 0.0
        self.start(
            pl_module,
            lambda epsilon: noise_for(
                epsilon, self.delta, self._rate, pl_module.planned_rounds, self.accountant
            ),
        )

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Count the round, and keep the statistics that the server sends."""
        self._count_round(pl_module)
        self._before = {
            name: cohort.server_buffers[name].clone() for name in self._statistics(cohort.treatments)
        }

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Clip each client's update."""
        for name, kind in cohort.buffer_kinds.items():
            if kind == "buffer" and not bool((cohort.buffers[name] == cohort.server_buffers[name]).all()):
                raise ConfigurationError(
                    f"PrivateFedAvg: local steps change the buffer {name!r}, which reaches the server without noise; leave the layer out"
                )
        if math.isinf(self.clip):
            return
        sent = {
            name: block
            for name, block in cohort.params.blocks.items()
            if cohort.treatment(name) == "averaged"
        }
        moved = [cohort.updates(name) for name in sent]
        moved += [(cohort.buffers[name] - before).flatten(1) for name, before in self._before.items()]
        norms = torch.linalg.vector_norm(torch.cat([x.double() for x in moved], 1), dim=1)
        factors = (self.clip / norms).clamp(max=1.0)
        for name, block in sent.items():
            block.copy_(
                cohort.server_rows.blocks[name] + factors.to(block.dtype).unsqueeze(1) * cohort.updates(name)
            )
        for name, before in self._before.items():
            rows = cohort.buffers[name]
            scales = factors.to(rows.dtype).view(-1, *[1] * before.dim())
            rows.copy_(before + scales * (rows - before))

    def on_after_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Divide the sum of the updates by the expected number of clients, and add noise."""
        statistics = {name: cohort.server_buffers[name] - before for name, before in self._before.items()}
        gradients = cohort.pseudo_gradient.row(0)
        for moved in (*gradients.values(), *statistics.values()):
            moved *= len(cohort) / self._expected(pl_module)
        self._add_noise(pl_module, {**gradients, **statistics})
        for name, moved in statistics.items():
            self._set_statistic(name, cohort.server_buffers[name], self._before[name], moved)

    def on_round_end(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Log epsilon."""
        self.log_epsilon(pl_module)

    def on_round_skipped(
        self, trainer: L.Trainer, pl_module: FederatedModule
    ) -> tuple[Mapping[int, tuple[int, int]], int]:
        """Add noise in a round without clients: otherwise the server's model would tell that there were none."""
        self._count_round(pl_module)
        model = pl_module.model
        policy = resolve_policy(pl_module.federated_callbacks, pl_module.round, pl_module.planned_rounds)
        treated = treatments(model, policy)
        trained = {n: x for n, x in model.named_parameters() if x.requires_grad and treated[n] == "averaged"}
        statistics = {name: model.get_buffer(name) for name in self._statistics(treated)}
        moved = {name: torch.zeros_like(x) for name, x in (trained | statistics).items()}
        self._add_noise(pl_module, moved)
        for name, parameter in trained.items():
            parameter.grad = moved[name]
        trainer.optimizers[0].step()  # not Lightning's step, which would count a further round
        for name, buffer in statistics.items():
            self._set_statistic(name, buffer, buffer.clone(), moved[name])
        self.log_epsilon(pl_module)
        return {}, 0

    @staticmethod
    def _statistics(treated: Mapping[str, str]) -> list[str]:
        kinds = ("running_mean", "running_var")
        return [
            name for name, treatment in treated.items() if treatment == "averaged" and name.endswith(kinds)
        ]

    def _expected(self, pl_module: FederatedModule) -> float:
        return self._rate * pl_module.data.num_clients

    def _add_noise(self, pl_module: FederatedModule, moved: Mapping[str, Tensor]) -> None:
        if not self.planned_noise:
            return
        draws = generator(pl_module.seed, "private noise", pl_module.round)
        scale = self.planned_noise * self.clip / self._expected(pl_module)
        for values in moved.values():
            drawn = torch.randn(values.shape, generator=draws, dtype=values.dtype)
            values += scale * drawn.to(values.device)

    @staticmethod
    def _set_statistic(name: str, place: Tensor, before: Tensor, moved: Tensor) -> None:
        new = before + moved
        # a variance that is not positive keeps its last value
        place.copy_(torch.where(new > 0, new, before) if name.endswith("running_var") else new)

    def _count_round(self, pl_module: FederatedModule) -> None:
        if self.begin_round(pl_module):  # a round may be skipped after its start
            self.count(-1, self.planned_noise, self._rate, 1)
