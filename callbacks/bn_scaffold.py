"""BN-SCAFFOLD: Quintana et al., "BN-SCAFFOLD: controlling the drift of Batch Normalization statistics", arXiv 2410.03281."""

import lightning as L
import torch
from torch import Tensor

from fl_lightning import Cohort, FederatedModule, SwappedBatchNorm, swap_batch_norm
from fl_lightning.aggregation import require_weighted_mean
from fl_lightning.batch_norm import batch_norm_layers
from fl_lightning.callbacks.scaffold import SCAFFOLD
from fl_lightning.cohort import SERVER
from fl_lightning.errors import check_number

_WEIGHT = "weight of the clients in "
_MOMENTS = "moments of "


class CorrectedBatchNorm(SwappedBatchNorm):
    """BN layer that shifts the batch's statistics by ``k - k_i``."""

    method = "BNSCAFFOLD"
    scratch = ("mean_shift", "var_shift", "mean_sum", "var_sum", "calls", "floored")
    floor: float

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise with the corrected statistics of the batch in training."""
        if not self.training:
            return super().forward(inputs)
        buffers = dict(self.named_buffers(recurse=False))
        values = self.values(inputs)
        size, u, s = values.shape[1], values.mean(1), values.detach().var(1, correction=0)
        mean = u + buffers["mean_shift"]
        # the gradient of the variance is that of the mean square around a constant mean
        around = (values - mean.detach().unsqueeze(1)).square().mean(1)
        corrected, least = s + buffers["var_shift"], self.floor * s
        var = torch.maximum(corrected, least) + around - around.detach()
        seen: dict[str, Tensor | int] = {"mean_sum": u.detach(), "var_sum": s, "floored": corrected < least}
        seen |= {"calls": 1, "num_batches_tracked": 1}
        for name, value in seen.items():
            setattr(self, name, buffers[name] + value)
        rate, unbias = self.momentum or 0.0, size / (size - 1)
        self.running_mean = buffers["running_mean"].lerp(mean.detach(), rate)
        self.running_var = buffers["running_var"].lerp(var.detach() * unbias, rate)
        scale = (var + self.eps).rsqrt()
        return self.scaled(inputs, scale, -mean * scale)


class BNSCAFFOLD(SCAFFOLD):
    """BN-SCAFFOLD: SCAFFOLD with control variates for batch statistics too (our reading).

    Only the paper's abstract was at hand. This is our reading of it, and its exactness is tested.

    A BN layer of client i normalises with ``u - k_i^m + k^m`` and ``s^2 - k_i^v + k^v``. u and s^2
    (biased) are the statistics of the batch. k_i are the means of u and s^2 over the local steps of
    the client's last round. k^m is the weighted mean of all known k_i^m. k^v is the weighted mean of
    ``k_i^v + (k_i^m - k^m)^2``, and thus includes the variance between clients. A client that takes
    part for the first time has no k_i, and uses the batch alone. The corrected variance is at least
    ``floor * s^2``.

    k is constant in the backward pass. As in FedTAN with ``backward: own``, the gradient of the
    variance is that of the mean square around a constant mean. With constant weights and batches,
    layer l has the statistics of the union batch from round l + 1 on.

    ``bn_scaffold/floored`` is the share of variances at this limit. Running statistics average the
    corrected statistics. Gradients are corrected as in SCAFFOLD. The server's variates take the
    changes of the clients' variates, so that absent clients count.

    If the clients' inputs differ strongly, a run may diverge at a learning rate at which SCAFFOLD
    does not, because k is a round old. A lower rate or fewer local steps help.

    Args:
        gradients: Whether gradients are corrected. With both settings false, the method is FedAvg.
        statistics: Whether batch statistics are corrected. Without it, the method is SCAFFOLD.
        floor: Smallest share of the batch's variance that the corrected variance may have.

    Raises:
        ConfigurationError: A setting is out of range, the model has no BN layer with running
            statistics and momentum, or the aggregator is not the weighted mean.

    Example:
        >>> from fl_lightning.testing import blobs, distance, small_cnn, train
        >>> plain = train(small_cnn(), blobs(), rounds=2, callbacks=[BNSCAFFOLD(False, False)])
        >>> distance(plain, train(small_cnn(), blobs(), rounds=2)) < 1e-12  # FedAvg
        True
    """

    paper = "Quintana et al., arXiv 2410.03281 (our reading)"
    equalities = ("fedavg_on_identical_clients", "one_client_is_plain_training", "server_keeps_the_mean")
    examples = ({}, {"gradients": False, "floor": 0.5})

    def __init__(self, gradients: bool = True, statistics: bool = True, floor: float = 0.1) -> None:
        super().__init__()
        check_number("BNSCAFFOLD.floor", floor, above=0, most=1)
        self.gradients, self.statistics, self.floor = gradients, statistics, floor

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Replace BN layers by layers that correct the statistics of batches."""
        require_weighted_mean(pl_module, "BNSCAFFOLD", "averages control variates", ["aggregator"])
        swap_batch_norm(pl_module.model, CorrectedBatchNorm, momentum=True, floor=self.floor)

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Load the control variates, and tell the layers ``k - k_i``."""
        super().on_round_start(trainer, pl_module, cohort)
        if not self.gradients:
            self._own, self._correction = {}, {}
        server = self.memory.get(SERVER, {})
        for row, client in enumerate(cohort.client_ids if self.statistics else ()):
            for name, own in self._moments(client).items():
                layer = name.removeprefix(_MOMENTS)
                mean, variance = _statistics(server[name].cpu() / server[f"{_WEIGHT}{layer}"].cpu())
                own_mean, own_variance = _statistics(own)
                cohort.buffers[f"{layer}.mean_shift"][row] = mean - own_mean
                cohort.buffers[f"{layer}.var_shift"][row] = variance - own_variance

    def on_after_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Update the control variates of the clients and of the server."""
        super().on_after_aggregate(trainer, pl_module, cohort)
        if not self.statistics:
            return
        shares = pl_module.weight_share(cohort) * pl_module.usual_weights(cohort).double().cpu()
        server = dict(self.memory.get(SERVER, {}))
        for layer in batch_norm_layers(pl_module.model):
            calls = cohort.buffers[f"{layer}.calls"]
            if not bool(calls.all()):  # frozen
                continue
            mean, variance = (
                (cohort.buffers[f"{layer}.{name}"] / calls).double().cpu() for name in ("mean_sum", "var_sum")
            )
            name, rows = f"{_MOMENTS}{layer}", torch.cat([mean, variance + mean.square()], 1)
            before = [self._moments(client).get(name) for client in cohort.client_ids]
            new = torch.tensor([old is None for old in before]).double()
            changes = rows - torch.stack(
                [torch.zeros_like(rows[0]) if old is None else old for old in before]
            )
            server[f"{_WEIGHT}{layer}"] = server.get(f"{_WEIGHT}{layer}", 0.0) + shares @ new
            server[name] = server.get(name, 0.0) + shares @ changes
            cohort.store_vectors(self.memory, {name: rows})
        self.memory[SERVER] = server
        floored, calls = (
            torch.cat([cohort.buffers[f"{layer}.{name}"] for layer in batch_norm_layers(pl_module.model)], 1)
            for name in ("floored", "calls")
        )
        pl_module.log("bn_scaffold/floored", float(floored.sum() / calls.sum().clamp(min=1)))

    def _moments(self, client: int) -> dict[str, Tensor]:
        return {name: x.cpu() for name, x in self.memory.get(client, {}).items() if name.startswith(_MOMENTS)}

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Return the numbers of floats that a client sends (changes of c_i and k_i) and receives (c and k)."""
        statistics = sum(cohort.server_buffers[name].numel() for name in cohort.names("mean", "var"))
        gradients = super().extra_payload(cohort)[0] if self.gradients else 0
        floats = gradients + (statistics if self.statistics else 0)
        return floats, floats


def _statistics(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances of means and second moments ``[2 channels]``."""
    mean, square = moments.chunk(2)
    return mean, square - mean.square()
