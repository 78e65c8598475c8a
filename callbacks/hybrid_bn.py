"""HBN: Chen, Xu, Wu and Kittler, "Hybrid Batch Normalisation", ICML 2025, arXiv 2505.21877."""

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from typing import Literal

import lightning as L
import torch
from torch import Tensor, nn

from fl_lightning import Cohort, FederatedModule, SwappedBatchNorm, swap_batch_norm
from fl_lightning.batch_norm import batch_norm_layers, evaluating, total_variance
from fl_lightning.cohort import ClientMemory, StateSlots
from fl_lightning.errors import check_number
from fl_lightning.methods import VariantEvaluation
from fl_lightning.randomness import derive_seed, seeded


class HybridBatchNorm(SwappedBatchNorm):
    """BN layer that normalises with a mixture of the server's and the batch's statistics."""

    method = "HybridBN"
    scratch = ("sent_mean", "sent_var")
    settings: "HybridBN"
    mix: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise with ``(1 - a) m + a u`` and ``(1 - a) v + a s^2`` in training."""
        if not self.training:
            return super().forward(inputs)
        m, v, steps = map(self.get_buffer, ("running_mean", "running_var", "num_batches_tracked"))
        a = self.mix.sigmoid() if self.settings.mix is None else self.settings.mix
        values = self.values(inputs)
        u, s = values.mean(1), values.var(1, correction=0)
        mean, var = (1 - a) * m + a * u, (1 - a) * v + a * s
        sent = (mean, var) if self.settings.collect == "mixed" else (u, s)
        self.sent_mean, self.sent_var = sent[0].detach(), sent[1].detach()
        self.num_batches_tracked = steps + 1
        scale = (var + self.eps).rsqrt()
        return self.scaled(inputs, scale, -mean * scale)


class HybridBN(VariantEvaluation):
    """HBN: clients normalise with a trained mixture of the server's and the batch's statistics.

    In training, a layer normalises with the mean ``(1 - a) m + a u`` and the variance ``(1 - a) v +
    a s^2``. m and v are the server's statistics. u and s^2 (biased) are the batch's. The mixing
    factor ``a = sigmoid(w)`` of each channel is trained, starts from 1/2, and stays at the client.

    Each client makes a pass over its first samples of the round, before its local steps, with the
    broadcast weights and its own a. The pass uses complete batches of the round's local steps. The
    client sends the mixed statistics of the pass. The server computes their total variance with
    divisor N - 1, where N is the number of samples, and moves m and v by ``rate``. This follows the
    authors' code. The code also averages w, and gives the average to new clients; here, new clients
    start from the initial w.

    Evaluation normalises with m and v. The authors evaluate after another pass of the round's
    clients, with the new weights and the rate 1: ``val/accuracy_pass``. The pass is not counted in
    the traffic.

    Args:
        mix: Mixing factor a in [0, 1] of all channels. Default: trained. With 1, training is BN. With
            0, training is FixBN after T*.
        rate: Weight of a round in m and v.
        samples: Number of samples in a client's pass, at least; all of the round if it has fewer.
        collect: Statistics that a client sends: ``"mixed"``, or ``"batch"`` for u and s^2.

    Raises:
        ConfigurationError: A setting is out of range, or the model has no BN layer with running
            statistics.

    Example:
        >>> from fl_lightning.testing import blobs, distance, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[method := HybridBN()])
        >>> sorted(method.memory[0])  # client 0 keeps w of both BN layers
        ['batch_norm@1.mix', 'batch_norm@4.mix']
    """

    paper = "Chen et al., arXiv 2505.21877 (HBN)"
    equalities = ("equal_passes",)
    examples = ({"samples": 16}, {"samples": 8, "mix": 0.5, "collect": "batch", "rate": 0.5})
    saved = ("memory", "passed")

    def __init__(
        self,
        mix: float | None = None,
        rate: float = 0.002,
        samples: int = 64,
        collect: Literal["mixed", "batch"] = "mixed",
    ) -> None:
        check_number("HybridBN.mix", 0.0 if mix is None else mix, " (or null: trained)", least=0, most=1)
        check_number("HybridBN.rate", rate, least=0, most=1)
        check_number("HybridBN.samples", samples, least=2)
        self.mix, self.rate, self.samples, self.collect = mix, rate, samples, collect
        self.memory, self.passed = ClientMemory(), dict[str, Tensor]()
        self._parts: list[str] = []

    def extend_model(self, model: nn.Module) -> None:
        """Add the parameter w of each BN layer."""
        for layer in batch_norm_layers(model).values() if self.mix is None else ():
            layer.register_parameter("mix", nn.Parameter(torch.zeros(layer.num_features)))

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Replace BN layers by layers that mix statistics."""
        self._parts = [f"{x}.mix" for x in batch_norm_layers(pl_module.model)] if self.mix is None else []
        swap_batch_norm(pl_module.model, HybridBatchNorm, settings=self)

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that w is local, and that this method computes the server's statistics."""
        return {"mean": "pooled", "var": "pooled", **dict.fromkeys(self._parts, "local")}

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Restore each client's w, and make the clients' passes."""
        cohort.recall(self.memory)

        def restored(row: int) -> dict[str, Tensor]:
            return {**cohort.params.row(row), **cohort.buffers.row(row)}

        cohort.extra |= self._passes(pl_module, cohort, restored)

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Store each client's w."""
        cohort.remember(self.memory)

    def on_round_end(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Move the server's statistics, and make the passes for the evaluation."""
        layers = batch_norm_layers(pl_module.model)
        for name, statistics in _pooled(cohort.extra, layers).items():
            pl_module.model.get_buffer(name).lerp_(statistics, self.rate)

        def factors(row: int) -> dict[str, Tensor]:
            own = self.memory.get(cohort.client_ids[row], {}).items()
            parts = ((block.rpartition("@")[2], x) for block, x in own)  # not MTFL's gamma and beta
            return {part: x.to(pl_module.device) for part, x in parts if part in self._parts}

        self.passed = _pooled(self._passes(pl_module, cohort, factors), layers)

    def variants(self, trainer: L.Trainer, pl_module: FederatedModule) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the statistics of another pass of the round's clients as the variant ``pass``."""
        return {"pass": self.passed}

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Return the numbers of floats that a client sends (the number of samples of its pass) and receives."""
        return 1, 0

    def _passes(
        self, pl_module: FederatedModule, cohort: Cohort, state: Callable[[int], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the clients' numbers of samples, ``[C]``, and each layer's statistics, ``[C, 2, channels]``."""
        layers = batch_norm_layers(pl_module.model)
        data, plan = pl_module.data, pl_module.plan

        def sent(row: int) -> dict[str, Tensor]:
            client = cohort.client_ids[row]
            first = plan.first_step(client, cohort.round)
            count = ceil(self.samples / data.samples_per_step(client))
            count = min(count, plan.steps(client, cohort.round))
            batches = data.cohort_batch([client] * count, [*range(first, first + count)])
            with (
                torch.no_grad(),
                seeded(derive_seed(pl_module.seed, "HybridBN pass", cohort.round, client)),
                StateSlots(pl_module.model).filled(state(row)),
                evaluating(pl_module.model),
            ):
                for layer in layers.values():
                    layer.training = True
                pl_module.client.losses_apart(pl_module.on_device(batches.union().batches()[0]))
                found = {
                    f"HybridBN {name}": torch.stack([*map(layer.get_buffer, HybridBatchNorm.scratch)]).cpu()
                    for name, layer in layers.items()
                }
            return {"HybridBN samples": torch.tensor(float(sum(batches.sizes()))), **found}

        passes = pl_module.ranks.map(sent, range(len(cohort)))
        return {x: torch.stack([sent[x] for sent in passes]).to(pl_module.device) for x in passes[0]}


def _pooled(passes: Mapping[str, Tensor], layers: Iterable[str]) -> dict[str, Tensor]:
    """Return the running statistics, ``[channels]``, of all samples of the clients' passes."""
    counts, pooled = passes["HybridBN samples"], dict[str, Tensor]()
    total = counts.sum()
    for name in layers:
        means, variances = passes[f"HybridBN {name}"].unbind(1)
        mean, variance = total_variance(means, variances, counts / total)
        pooled |= {f"{name}.running_mean": mean, f"{name}.running_var": variance * total / (total - 1)}
    return pooled
