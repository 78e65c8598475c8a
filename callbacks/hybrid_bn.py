"""HBN: Chen, Xu, Wu and Kittler, "Hybrid Batch Normalisation", ICML 2025, arXiv 2505.21877."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from fl_lightning import Cohort, FederatedModule, SwappedBatchNorm, swap_batch_norm
from fl_lightning.batch_norm import (
    batch_norm_layers,
    evaluating,
    restore_batch_norm,
    total_variance,
)
from fl_lightning.cohort import ClientMemory, StateSlots
from fl_lightning.errors import check_number
from fl_lightning.methods import VariantEvaluation
from fl_lightning.randomness import derive_seed, seeded

Statistics = dict[str, tuple[Tensor, Tensor]]


class HybridBatchNorm(SwappedBatchNorm):
    """BN layer that normalises with a mixture of the server's and the batch's statistics."""

    method = "HybridBN"
    scratch = ("sent_mean", "sent_var", "settings")
    settings: tuple[float | None, bool]
    mix: Tensor

    def prepare(self) -> None:
        """Register the statistics that a client would send; the method sets ``settings``."""
        for name in self.scratch[:2]:
            self.register_buffer(name, torch.zeros_like(self.get_buffer("running_mean")), False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise with ``(1 - a) m + a u`` and ``(1 - a) v + a s^2`` in training."""
        if not self.training:
            return super().forward(inputs)
        mix, mixed = self.settings
        m, v, steps = map(self.get_buffer, ("running_mean", "running_var", "num_batches_tracked"))
        a = self.mix.sigmoid() if mix is None else mix
        values = inputs.transpose(0, 1).flatten(1).to(m.dtype)
        u, s = values.mean(1), values.var(1, correction=0)
        mean, var = (1 - a) * m + a * u, (1 - a) * v + a * s
        self.sent_mean, self.sent_var = (mean.detach(), var.detach()) if mixed else (u.detach(), s.detach())
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
    claims = ("equal_passes",)
    examples = ({"samples": 16}, {"samples": 8, "mix": 0.5, "collect": "batch", "rate": 0.5})
    saved = ("memory", "clients", "last_round")

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
        self.memory, self.last_round = ClientMemory(), 0
        self.clients: dict[int, list[int]] = {}
        self._parts: list[str] = []

    def extend_model(self, model: nn.Module) -> None:
        """Add the parameter w of each BN layer."""
        for layer in batch_norm_layers(model).values() if self.mix is None else ():
            layer.register_parameter("mix", nn.Parameter(torch.zeros(layer.num_features)))

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Replace BN layers by layers that mix statistics."""
        self._parts = [f"{x}.mix" for x in batch_norm_layers(pl_module.model)] if self.mix is None else []
        for layer in swap_batch_norm(pl_module.model, HybridBatchNorm):
            layer.settings = (self.mix, self.collect == "mixed")

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that w is local, and that this method computes the server's statistics."""
        return {"mean": "pooled", "var": "pooled", **dict.fromkeys(self._parts, "local")}

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Restore each client's w, and make the clients' passes."""
        cohort.recall(self.memory)

        def sent(row: int) -> tuple[int, Statistics]:
            state, client = {**cohort.params.row(row), **cohort.buffers.row(row)}, cohort.client_ids[row]
            return self._pass(pl_module, client, cohort.round, self._steps(pl_module, client, cohort), state)

        passes = pl_module.ranks.map(sent, range(len(cohort)))
        device = pl_module.device
        cohort.extra["HybridBN samples"] = torch.tensor([float(n) for n, _ in passes], device=device)
        for name in passes[0][1]:
            rows = [torch.stack(statistics[name]) for _, statistics in passes]
            cohort.extra[f"HybridBN {name}"] = torch.stack(rows).to(device)

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Store each client's w."""
        cohort.remember(self.memory)

    def on_round_end(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Move the server's statistics towards the statistics of the passes."""
        self.clients = {client: self._steps(pl_module, client, cohort) for client in cohort.client_ids}
        self.last_round = cohort.round
        counts = cohort.extra["HybridBN samples"]
        for name, layer in batch_norm_layers(pl_module.model).items():
            mean, variance = _pooled(cohort.extra[f"HybridBN {name}"], counts)
            layer.get_buffer("running_mean").lerp_(mean, self.rate)
            layer.get_buffer("running_var").lerp_(variance, self.rate)

    def variants(self, trainer: L.Trainer, pl_module: FederatedModule) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the statistics of another pass of the round's clients as the variant ``pass``."""
        if not self.clients:
            return {"pass": {}}
        fitting = trainer.state.fn == TrainerFn.FITTING
        if not fitting:  # a test has neither clients nor layers that mix statistics
            pl_module.data.setup("fit")
            self.configure_batch_norm(pl_module)

        def sent(client: int) -> tuple[int, Statistics]:
            own = self.memory.get(client, {})
            blocks = {block.split("@")[1]: x for block, x in own.items()}  # a block of a head has two @
            state = {part: blocks[part].to(pl_module.device) for part in self._parts if own}
            return self._pass(pl_module, client, self.last_round, self.clients[client], state)

        passes, tensors = pl_module.ranks.map(sent, [*self.clients]), dict[str, Tensor]()
        if not fitting:
            restore_batch_norm(pl_module.model)
        for name in passes[0][1]:
            rows = torch.stack([torch.stack(statistics[name]) for _, statistics in passes])
            mean, variance = _pooled(rows, torch.tensor([float(n) for n, _ in passes]).to(rows))
            tensors |= {f"{name}.running_mean": mean, f"{name}.running_var": variance}
        return {"pass": tensors}

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Return the numbers of floats that a client sends (the number of samples of its pass) and receives."""
        return 1, 0

    def _steps(self, pl_module: FederatedModule, client: int, cohort: Cohort) -> list[int]:
        """Return the local steps of the round whose batches a client's pass reads."""
        first = pl_module.plan.first_step(client, cohort.round)
        count = ceil(self.samples / pl_module.data.samples_per_step(client))
        return [*range(first, first + min(count, pl_module.plan.steps(client, cohort.round)))]

    def _pass(
        self,
        pl_module: FederatedModule,
        client: int,
        round_number: int,
        steps: Sequence[int],
        state: Mapping[str, Tensor],
    ) -> tuple[int, Statistics]:
        """Return the number of samples in a client's pass, and the statistics of each layer."""
        model, layers = pl_module.model, batch_norm_layers(pl_module.model)
        batches = pl_module.data.cohort_batch([client] * len(steps), steps)
        with (
            torch.no_grad(),
            seeded(derive_seed(pl_module.seed, "HybridBN pass", round_number, client)),
            StateSlots(model).filled(state),
            evaluating(model),
        ):
            for layer in layers.values():
                layer.training = True
            pl_module.client_loss(pl_module.on_device(batches.union().batches()[0]))
            sent = {
                name: (layer.get_buffer("sent_mean"), layer.get_buffer("sent_var"))
                for name, layer in layers.items()
            }
        return sum(batches.sizes()), {name: (mean.cpu(), var.cpu()) for name, (mean, var) in sent.items()}


def _pooled(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance, ``[channels]``, of clients' statistics ``[C, 2, channels]``."""
    total = counts.sum()
    mean, variance = total_variance(rows[:, 0], rows[:, 1], counts / total)
    return mean, variance * total / (total - 1)
