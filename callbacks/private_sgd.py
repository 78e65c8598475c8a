"""DP-SGD: Abadi et al., "Deep Learning with Differential Privacy", arXiv 1607.00133."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import lightning as L

from fl_lightning import Cohort, ConfigurationError, FederatedModule
from fl_lightning.batch_norm import batch_norm_layers
from fl_lightning.clients import label_weights
from fl_lightning.errors import check_at_least, check_number
from fl_lightning.execution import Executor, filled_batches, per_sample_executor
from fl_lightning.methods import PrivateMethod, epsilon_of, noise_for, release_statistics


class PrivateSGD(PrivateMethod):
    """DP-SGD at the clients: each sample's gradient is clipped, and noise is added to their sum.

    Every local step of a client uses the gradient ``(1 / b) (sum_j min(1, C / |g_j|) g_j + N(0,
    sigma^2 C^2 I))``. The sum is over the samples of a Poisson batch: each of the client's n samples is
    in it with probability b / n (the setting ``data.sampling: poisson``). What a client sends is
    then (epsilon, delta)-differentially private: it hardly depends on any single record of the client.
    Subjects with several records have a weaker guarantee.

    A layer that normalises with its batch has no gradient of a single sample, so BN is refused
    unless its statistics are frozen: start from public or pretrained weights with ``FixBN`` and
    ``freeze_round: 0``, or use Group Normalization or no norm layer.

    Training losses, metrics and the mean and standard deviation by which inputs are scaled are not
    protected. The guarantee is that of a simulation: torch's random numbers are not cryptographic.

    Args:
        clip: Largest norm C of a sample's gradient over all parameters, above 0. Infinity: no
            clipping, which needs ``noise: 0``.
        noise: Noise multiplier sigma. With 0, there is no privacy.
        epsilon: Epsilon of every client at the end of the planned rounds, at most. The noise is
            computed from it. Give either ``noise`` or ``epsilon``.
        delta: Delta, in (0, 1). It should be below 1 / the number of a client's samples.
        accountant: Accountant of Opacus: ``"rdp"``, or ``"prv"``, which is tighter and slower.
        statistics_noise: Noise multiplier of a release of BN statistics before round 1 (see
            :func:`~fl_lightning.methods.private_statistics.release_statistics`), which is part of
            epsilon. None: the model's own statistics.
        statistics_clip: Largest norm of a sample's channel means and mean squares in this release.
        second_stage_only: Whether rounds in which BN normalises with batches are allowed. They train
            without protection, and epsilon is of the other rounds alone. Such a run has no
            guarantee, and its result says so.
        samples_at_once: Number of samples whose gradients are computed together. Each needs the memory
            of a gradient.

    Attributes:
        unprotected: Last round without protection; 0 if there is none.

    Raises:
        ConfigurationError: A setting is out of range, the data, the model or another method do not
            suit, or Opacus is not installed.

    Example:
        >>> import torch
        >>> from fl_lightning.datamodules import TensorData
        >>> from fl_lightning.testing import train
        >>> features, targets = torch.randn(200, 3), torch.arange(200) % 2
        >>> data = TensorData(features, targets, num_clients=2, batch_size=20, sampling="poisson")
        >>> private = PrivateSGD(clip=1.0, noise=1.0)
        >>> state = train(torch.nn.Linear(3, 2), data, 4, [private])
        >>> private.result_lines()["privacy"]
        'epsilon 4.87 at delta 1e-05 (the largest of 2 clients, RDP); unit: one record of a client'
    """

    paper = "Abadi et al., arXiv 1607.00133"
    examples = ({"clip": 1.0, "noise": 0.5}, {"clip": 0.5, "epsilon": 8.0})
    takes = ("the noise of differential privacy",)
    unit = "one record of a client"
    per_sample = True
    saved = ("unprotected",)

    def __init__(
        self,
        clip: float,
        noise: float | None = None,
        epsilon: float | None = None,
        delta: float = 1e-5,
        accountant: Literal["rdp", "prv"] = "rdp",
        statistics_noise: float | None = None,
        statistics_clip: float = 10.0,
        second_stage_only: bool = False,
        samples_at_once: int = 32,
    ) -> None:
        super().__init__(clip, noise, epsilon, delta, accountant)
        check_at_least(1, **{"PrivateSGD.samples_at_once": samples_at_once})
        self.second_stage_only, self.samples_at_once = second_stage_only, samples_at_once
        check_number("PrivateSGD.statistics_noise", statistics_noise or 0.0, " (0 is no privacy)", least=0)
        check_number("PrivateSGD.statistics_clip", statistics_clip, "", above=0)
        self.statistics_noise, self.statistics_clip = statistics_noise, statistics_clip
        self._rates: dict[int, float] = {}
        self._executor: Any = None
        if second_stage_only:
            self.metric = "privacy/epsilon_of_second_stage"
        self.unprotected = self._released = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # a run's module has this type
        """Check that the run suits, and compute the noise."""
        data = pl_module.data
        self._refuse(pl_module)
        rates = {client: data.sampling_rate(client) for client in range(data.num_clients)}
        for client, rate in rates.items():
            if rate is None:
                raise ConfigurationError(
                    f"PrivateSGD: the batches of {data.named(client)} are no Poisson samples, for which alone its accountant is right; "
                    "set data.sampling: poisson (data in memory), or declare sampling_rate in a data module of your own"
                )
            self._rates[client] = rate
        if (most := data.most_of_a_subject()) > 1:
            self.unit = f"one record of a client, not a subject, who has up to {most} records"
        self.names = {client: data.named(client) for client in rates}
        self.start(pl_module, partial(self._noise_of_plan, pl_module))
        expected = {client: rate * data.num_examples(client) for client, rate in self._rates.items()}
        self._executor = per_sample_executor(self.clip, self.planned_noise, expected, self.samples_at_once)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # a run's module has this type
        """Release the BN statistics before round 1."""
        if self.statistics_noise is not None and pl_module.round == 1:
            self._released = release_statistics(pl_module, self.statistics_clip, self.statistics_noise)
            for client in self._rates:
                self.count(client, self.statistics_noise, 1.0, 1)

    def extra_traffic(self, cohort: Cohort) -> Mapping[int, tuple[int, int]]:
        """Return the statistics that every client sends before round 1. The broadcast brings them back."""
        return dict.fromkeys(self._rates, (self._released, 0)) if cohort.round == 1 and self._released else {}

    def _refuse(self, pl_module: FederatedModule) -> None:
        """Raise a ConfigurationError if the run's module or another method do not suit."""
        reason = ""
        if pl_module.client.logs_itself:
            reason = "a LightningModule's training_step sees whole batches; give the network itself as model.model, with model.loss"
        elif pl_module.weighting == "samples":
            reason = "model.weighting: samples tells the server how many samples were drawn; use examples or uniform"
        elif label_weights(pl_module.client.loss) is not None:
            reason = (
                "the mean of a single sample has no weight; use model.loss without weights of the classes"
            )
        self.refuse(pl_module, reason)

    def _noise_of_plan(self, pl_module: FederatedModule, epsilon: float) -> float:
        """Return the noise with which no client exceeds ``epsilon`` in the planned rounds."""
        steps: dict[int, int] = {}
        for number in range(1, pl_module.planned_rounds + 1):
            for client, count in zip(*pl_module.plan.trained(number), strict=True):
                steps[client] = steps.get(client, 0) + count
        most: dict[float, int] = {}
        for client, count in steps.items():
            most[self._rates[client]] = max(most.get(self._rates[client], 0), count)
        release = () if self.statistics_noise is None else ((self.statistics_noise, 1.0, 1),)
        noise = 0.0
        for rate, n in sorted(most.items(), reverse=True):
            # one client decides: the search takes seconds
            if not noise or epsilon_of((*release, (noise, rate, n)), self.delta, self.accountant) > epsilon:
                noise = noise_for(epsilon, self.delta, rate, n, self.accountant, release)
        if not noise:
            raise ConfigurationError(
                "PrivateSGD.epsilon: no client trains in the planned rounds; train longer, or set noise"
            )
        return noise

    def step_executor(self, pl_module: FederatedModule, executor: Executor) -> Executor:
        """Return the executor that clips and adds noise, except in rounds without protection."""
        self._executor.clients = executor
        return filled_batches(executor) if self.unprotected == pl_module.round else self._executor

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Check the BN layers, and count the steps of this round."""
        self.begin_round(pl_module)
        for name, layer in batch_norm_layers(pl_module.model).items():
            if layer.training or layer.running_mean is None:
                if self.second_stage_only:
                    self.unprotected = cohort.round
                    return
                raise ConfigurationError(
                    f"PrivateSGD: BN layer {name!r} normalises with its batch in round {cohort.round}, so that a sample has no gradient of its "
                    "own; use FixBN with freeze_round: 0 and public weights, norm: gn, norm: none, or second_stage_only: true (no guarantee)"
                )
        for client, steps in zip(cohort.client_ids, cohort.local_steps, strict=True):
            self.count(client, self.planned_noise, self._rates[client], steps)

    def on_round_skipped(
        self, trainer: L.Trainer, pl_module: FederatedModule
    ) -> tuple[Mapping[int, tuple[int, int]], int]:
        """Note the round."""
        self.begin_round(pl_module)
        return {}, 0

    def on_round_end(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Log the largest epsilon."""
        self.log_epsilon(pl_module)

    def result_lines(self) -> Mapping[str, str]:
        """Return the guarantee in words, or that no guarantee exists."""
        lines = dict(super().result_lines())
        if self.unprotected:
            found = lines.pop("privacy", "no round is protected")
            lines.pop("privacy audit", None)  # it attacks both stages
            lines = {
                "privacy": f"no guarantee: rounds 1 to {self.unprotected} trained without protection; second stage: {found}",
                **lines,
            }
        return lines
