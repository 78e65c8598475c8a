"""Inference of a client's label mix from what the client sends."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning import Cohort, ConfigurationError, FederatedModule
from fl_lightning.callbacks.observers.gradient_deviation import cohort_beside
from fl_lightning.callbacks.observers.simulated_steps import (
    SENT,
    Step,
    checked_pairs,
    first_batches,
    simulated_step,
)
from fl_lightning.client_data import every_batch
from fl_lightning.clients import label_weights
from fl_lightning.errors import check_at_least
from fl_lightning.methods import Observer, Report


class LabelInference(Report, Observer):
    """Observer: how well a client's label mix can be inferred from its update and BN statistics.

    The attack runs in rounds that an evaluation follows, and in the last round. The attacker is a
    server with a few evaluation samples of each class, which are the server's validation samples, or
    its test samples if there are no others. For each class, the server simulates a local
    step on its samples of this class, with its model and with BN as in this round. The server then
    fits what a real client sends as a mixture of the simulated updates, by least squares with shares
    of at least 0, and scales the shares to the sum 1. A class without such samples gets the
    share 0. If all shares are 0, all classes get the same share.

    The update is such a mixture for one local step of SGD without weight decay and without BN, with
    the same learning rate for all parameters, apart from differences between samples. If a method
    corrects gradients at the client (SCAFFOLD), or with other optimizers, the attack is weaker than
    it could be. Class weights of the loss are taken into account.

    The true label mix is that of the client's first batch in this round. The metrics are means over
    the clients of the round. The error of a label mix is half the sum of the absolute differences of
    the shares of all classes: 0 is exact, and 1 is the worst.

    - ``privacy/label_error_update``: Error from the update of the parameters alone.
    - ``privacy/label_error_statistics``: Error from the running means of BN alone. With a joint
      forward pass (FedTAN), the batch means are used, which clients exchange.
    - ``privacy/label_error_both``: Error from both. The two parts have equal weight, so this error
      can be larger than the error from one part alone.
    - ``privacy/label_error_guess``: Error of the label mix of the evaluation data, without an attack.

    Errors with BN statistics are logged only if clients send running means. HybridBN sends other
    statistics. A failed attack does not show that the label mix is safe, because a stronger attack
    may succeed.

    Args:
        samples: Largest number of evaluation samples of each class that the attacker uses. All
            classes are computed together, with a gradient for each.

    Raises:
        ConfigurationError: ``samples`` is below 1, the samples have no whole numbers as labels, or
            the model cannot be simulated.
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
        """Simulate a client of each class, in round 1 and if an evaluation follows."""
        self._of_classes: Step | None = None
        self._exchanged: Step | None = None
        if not pl_module.evaluates_now and cohort.round > 1:
            return
        batches = first_batches(pl_module, cohort, "LabelInference")
        labels, chosen = self._evaluation_samples(pl_module)
        own = [_counted(pl_module, targets, "the clients'")[1] for _, targets in batches]
        classes = torch.tensor(sorted({*torch.cat([labels, *own]).tolist()}))
        mixes = [
            torch.searchsorted(classes, each).bincount(minlength=len(classes)) for each in (labels, *own)
        ]
        self._guess, *rest = (mix.double() for mix in mixes)
        self._mixes, self._known = torch.stack(rest), self._guess.nonzero()[:, 0].tolist()
        known = classes[self._known]
        weights = label_weights(pl_module.client.loss)
        self._weights = torch.ones(len(known)) if weights is None else weights.cpu()[known]
        samples = [chosen[label] for label in known.tolist()]
        most = max(map(len, samples))
        inputs = torch.stack([one[torch.arange(most) % len(one)] for one in samples])
        batch = pl_module.on_device((inputs, known[:, None].expand(-1, most)))
        with isolate_rng():
            server = cohort_beside(pl_module, cohort, common=True)
            self._of_classes = self._step(pl_module, server, [0] * len(samples), batch)
            if pl_module.joint_method is not None:
                stacked = tuple(torch.stack(part) for part in zip(*batches, strict=True))
                self._exchanged = self._step(pl_module, cohort, [*range(len(cohort))], stacked)

    def _step(self, pl_module: FederatedModule, cohort: Cohort, rows: list[int], batch: Any) -> Step:
        setting = f"LabelInference.samples: {self.samples}"
        return simulated_step(pl_module, cohort, rows, batch, setting, differentiable=False)

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Attack what the clients send, if an evaluation follows."""
        if self._of_classes is None or not pl_module.evaluates_now:
            return
        parts = self._sent(cohort, self._of_classes)
        # clients without a finite update or without a sample are left out
        mixes, finite = (
            self._mixes[cohort.rows],
            torch.stack([sent.isfinite().all(1) & known.isfinite().all() for known, sent in parts.values()]),
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
        gradients = _joined([of_classes.gradients[name] for name in names])
        parts = {"update": (self._weights[:, None] * gradients, updates)}
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
            return {"inferred label mix": "no client could be attacked"}
        error, blind = (self.newest[f"privacy/label_error_{name}"] for name in ("update", "guess"))
        return {"inferred label mix": f"error {error:.3g} from the update (a guess: {blind:.3g})"}

    def _evaluation_samples(self, pl_module: FederatedModule) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the labels of the server's evaluation data, and some inputs of each label."""
        labels, chosen = [], dict[int, Tensor]()
        batches = every_batch(pl_module.data.val_dataloader() or [])
        for inputs, targets in checked_pairs(batches, "LabelInference", "the server's"):
            counted, known = _counted(pl_module, targets, "the server's")
            labels.append(known)
            for label in {*known.tolist()}:
                found = inputs[counted][known == label]
                chosen[label] = torch.cat([chosen.get(label, found[:0]), found])[: self.samples]
        if not chosen:
            raise ConfigurationError(
                "LabelInference: the server has no evaluation data with labels; set data.val_fraction, or leave LabelInference out of "
                "trainer.callbacks"
            )
        return torch.cat(labels), chosen


def _counted(pl_module: FederatedModule, targets: Tensor, whose: str) -> tuple[Tensor, Tensor]:
    """Return which targets ``[n]`` count, and those labels, on the CPU."""
    if targets.dim() != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
        raise ConfigurationError(
            f"LabelInference: {whose} targets are {[*targets.shape]} ({targets.dtype}), but the attack needs a label of each sample, a whole number; "
            "leave LabelInference out of trainer.callbacks"
        )
    labels = targets.long().cpu()
    counted = (labels >= 0) & (labels != pl_module.client.task.ignored)
    return counted, labels[counted]


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
