"""Inference of a client's label mix from what the client sends."""

from collections.abc import Mapping

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning import Cohort, ConfigurationError, FederatedModule
from fl_lightning.callbacks.observers.gradient_deviation import cohort_beside
from fl_lightning.callbacks.observers.simulated_steps import SENT, Step, first_batches, simulated_step
from fl_lightning.client_data import every_batch
from fl_lightning.errors import check_at_least
from fl_lightning.methods import Observer, Report


class LabelInference(Report, Observer):
    """Observer: how well a client's label mix can be inferred from its update and BN statistics.

    The attack runs in rounds that an evaluation follows, and in the last round. The attacker is a
    server with a few validation samples of each class. From them it computes, with its model and
    with BN as in this round, what a client would send that had samples of one class only. What a
    real client sends is then explained as a mixture of these, by least squares with shares of at
    least 0, scaled to the sum 1. A class without validation samples gets the share 0.

    The update is such a mixture for one local step of SGD without weight decay and without BN, apart
    from differences between samples. If a method corrects gradients at the client (SCAFFOLD), or
    with other optimizers, the attack is weaker than it could be.

    The true label mix is that of the client's first batch in this round. The metrics are means over
    the clients of the round. The error of a label mix is half the sum of the absolute differences of
    the shares of all classes: 0 is exact, and 1 is the worst.

    - ``privacy/label_error_update``: Error from the update of the parameters alone.
    - ``privacy/label_error_statistics``: Error from the running means of BN alone. With a joint
      forward pass (FedTAN), the batch means are used, which clients exchange.
    - ``privacy/label_error_both``: Error from both. The two parts have equal weight, so this error
      may be larger than one of them.
    - ``privacy/label_error_guess``: Error of the label mix of the validation data, without an attack.

    Errors with BN statistics are logged only if clients send running means. HybridBN sends other
    statistics. A failed attack is no proof, because a stronger one may succeed.

    Args:
        samples: Largest number of validation samples of each class that the attacker uses.

    Raises:
        ConfigurationError: ``samples`` is below 1, the data have no label of each sample, or the
            model cannot be simulated.
    """

    examples = ({}, {"samples": 2})
    saved = ("newest",)

    def __init__(self, samples: int = 20) -> None:
        check_at_least(1, **{"LabelInference.samples": samples})
        self.samples = samples
        self.newest: dict[str, float] = {}

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Check the clients' training, and forget an earlier run unless it is resumed."""
        if pl_module.client.logs_itself:
            raise ConfigurationError(
                "LabelInference: the server cannot simulate a LightningModule's training_step; give the network itself as "
                "model.model, with model.loss"
            )
        if not pl_module.trainer.current_epoch:
            self.newest = {}

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Compute what clients of one class would send, in round 1 and if an evaluation follows."""
        self._of_classes: Step | None = None
        self._exchanged: Step | None = None
        if not pl_module.evaluates_now and cohort.round > 1:
            return
        batches = first_batches(pl_module, cohort, "LabelInference")
        inputs, labels = self._validation_samples(pl_module)
        own = [_counted(targets) for _, targets in batches]
        classes = int(max(each.max() for each in (labels, *own) if len(each))) + 1
        self._mixes = torch.stack([each.bincount(minlength=classes) for each in own]).double()
        self._guess = labels.bincount(minlength=classes).double()
        self._known = self._guess.nonzero()[:, 0].tolist()
        chosen = [(labels == label).nonzero()[: self.samples, 0] for label in self._known]
        most = max(map(len, chosen))
        index = torch.stack([one.repeat(most)[:most] for one in chosen])
        batch = pl_module.on_device((inputs[index], labels[index]))
        setting = f"LabelInference.samples: {self.samples}"
        with isolate_rng():
            server = cohort_beside(pl_module, cohort, common=True)
            rows = [0] * len(chosen)
            self._of_classes = _detached(simulated_step(pl_module, server, rows, batch, setting))
            if pl_module.joint_method is not None:
                stacked = tuple(torch.stack(part) for part in zip(*batches, strict=True))
                rows = [*range(len(cohort))]
                self._exchanged = _detached(simulated_step(pl_module, cohort, rows, stacked, setting))

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Attack what the clients send, if an evaluation follows."""
        if self._of_classes is None or not pl_module.evaluates_now:
            return
        parts = self._sent(cohort, self._of_classes)
        # clients without a finite update or without a sample are left out
        mixes, finite = (
            self._mixes[cohort.rows],
            torch.stack([sent.isfinite().all(1) for _, sent in parts.values()]),
        )
        rows = [row for row in range(len(cohort)) if finite[:, row].all() and mixes[row].sum() > 0]
        found = {
            name: [_shares(signatures, sent[row]) for row in rows]
            for name, (signatures, sent) in parts.items()
        }
        if len(parts) > 1:
            found["both"] = [
                self._of_both([(*parts[name], found[name][place].sum()) for name in parts], row)
                for place, row in enumerate(rows)
            ]
        self.newest = {}
        for name, shares in (
            {**found, "guess": [self._guess[self._known]] * len(rows)}.items() if rows else ()
        ):
            guesses = torch.zeros(len(rows), self._mixes.shape[1], dtype=torch.float64)
            guesses[:, self._known] = torch.stack(shares)
            guesses[guesses.sum(1) == 0] = 1
            true = mixes[rows] / mixes[rows].sum(1, keepdim=True)
            errors = (guesses / guesses.sum(1, keepdim=True) - true).abs().sum(1) / 2
            self.newest[f"privacy/label_error_{name}"] = float(errors.mean())
        pl_module.log_numbers(self.newest)

    def _of_both(self, parts: list[tuple[Tensor, Tensor, Tensor]], row: int) -> Tensor:
        """Return the shares from several parts: signatures, what clients send, and the sum of the part's shares."""
        useful = [
            (signatures / (size := signatures.norm()), sent[row] / (size * total))
            for signatures, sent, total in parts
            if total > 0
        ]
        if not useful:
            return torch.zeros(len(self._known), dtype=torch.float64)
        signatures, sent = zip(*useful, strict=True)
        return _shares(torch.cat(signatures, 1), torch.cat(sent))

    def _sent(self, cohort: Cohort, of_classes: Step) -> dict[str, tuple[Tensor, Tensor]]:
        """Return what clients of one class would send, and what the clients send, by part."""
        names, treatments = [*of_classes.gradients], cohort.treatments
        updates = _joined([cohort.server[name] - cohort.params[name] for name in names])
        parts = {"update": (_joined([of_classes.gradients[name] for name in names]), updates)}
        layers = [layer for layer in of_classes.means if treatments[f"{layer}.running_mean"] in SENT]
        if layers:
            server = {layer: cohort.server_buffers[f"{layer}.running_mean"] for layer in layers}
            if self._exchanged is not None:
                clients = {layer: self._exchanged.means[layer][cohort.rows] for layer in layers}
            else:
                clients = {layer: cohort.buffers[f"{layer}.running_mean"] for layer in layers}
            moved = _joined([clients[layer] - server[layer] for layer in layers])
            if moved.any():
                signatures = _joined([of_classes.means[layer] - server[layer] for layer in layers])
                parts["statistics"] = signatures, moved
        return parts

    def result(self) -> Mapping[str, float]:
        """Return the metrics of the newest attack."""
        return self.newest

    def result_lines(self) -> Mapping[str, str]:
        """Return the error from the update as text."""
        if not self.newest:
            return {}
        error, blind = (self.newest[f"privacy/label_error_{name}"] for name in ("update", "guess"))
        return {"inferred label mix": f"error {error:.3g} from the update (a guess: {blind:.3g})"}

    def _validation_samples(self, pl_module: FederatedModule) -> tuple[Tensor, Tensor]:
        """Return the inputs and the labels of the server's validation data."""
        batches = [*every_batch(pl_module.data.val_dataloader() or [])]
        pairs = [batch for batch in batches if isinstance(batch, tuple | list) and len(batch) == 2]
        labels = [pair[1] for pair in pairs if isinstance(pair[1], Tensor)]
        if (
            not labels
            or len(labels) < len(batches)
            or labels[0].dim() != 1
            or labels[0].is_floating_point()
            or not (kept := torch.cat(labels) >= 0).any()
        ):
            raise ConfigurationError(
                "LabelInference: the server needs validation data of inputs and a label of each sample; set data.val_fraction, or "
                "leave it out of trainer.callbacks"
            )
        return torch.cat([inputs for inputs, _ in pairs])[kept], torch.cat(labels)[kept].long()


def _counted(labels: Tensor) -> Tensor:
    """Return the labels ``[n]`` that count, on the CPU."""
    return labels[labels >= 0].cpu()


def _detached(step: Step) -> Step:
    return Step(*({name: value.detach() for name, value in each.items()} for each in step))


def _joined(tensors: list[Tensor]) -> Tensor:
    """Return tensors ``[n, ...]`` as one matrix ``[n, floats]``."""
    return torch.cat([tensor.flatten(1) for tensor in tensors], 1).double().cpu()


def _shares(of_classes: Tensor, sent: Tensor) -> Tensor:
    """Return shares x >= 0 that minimise ``|sent - x @ of_classes|``, ``[classes]``.

    Args:
        of_classes: What clients with a single class would send, ``[classes, floats]``.
        sent: What a client sends, ``[floats]``, up to a positive factor.
    """
    from scipy.optimize import nnls  # slow to import

    basis, triangle = torch.linalg.qr(of_classes.T)
    return torch.from_numpy(nnls(triangle.numpy(), (basis.T @ sent).numpy())[0])
