"""Inference of a client's label mix from what the client sends."""

from collections.abc import Mapping

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning import Cohort, ConfigurationError, FederatedModule
from fl_lightning.callbacks.observers.gradient_deviation import cohort_beside
from fl_lightning.callbacks.observers.simulated_steps import SENT, Step, simulated_step
from fl_lightning.client_data import every_batch
from fl_lightning.errors import check_at_least
from fl_lightning.methods import Observer, Report


class LabelInference(Report, Observer):
    """Observer: how well the label mix of a client can be told from its update and BN statistics.

    The attack runs in rounds that an evaluation follows, and in the last round. The attacker is a
    server with a few validation samples of each class. It computes what a client would send that
    had only samples of one class, with the server's model and the method of the round. What a real
    client sends is then explained as a mixture of these, by least squares with shares of at least 0,
    scaled to the sum 1. For one local step of a model without BN, the update is such a mixture,
    apart from differences between samples.

    The metrics are means over the clients of the round. The error of a label mix is half the sum of
    the absolute differences of the shares of all classes: 0 is exact, and 1 is the worst.

    - ``privacy/label_error_update``: Error from the update of the parameters alone.
    - ``privacy/label_error_statistics``: Error from the running means of BN alone. With a joint
      forward pass (FedTAN), the batch means are used, which clients exchange.
    - ``privacy/label_error_both``: Error from both. Both parts have equal weight.
    - ``privacy/label_error_guess``: Error of the label mix of the validation data, without an attack.

    The true label mix is that of the client's training data. If the data module has no class
    histograms, it is that of the client's first batch of the round.

    Errors with BN statistics are logged only if clients send them. A failed attack proves nothing,
    because a stronger one may succeed.

    Args:
        samples: Largest number of validation samples of each class that the attacker uses.

    Raises:
        ConfigurationError: ``samples`` is below 1, or the validation data lack a class or have no
            label of each sample.
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
        """Compute what a client with a single class would send, if an evaluation follows."""
        self._of_classes: Step | None = None
        if not pl_module.evaluates_now:
            return
        inputs, labels = self._validation_samples(pl_module)
        rows = [*range(len(cohort))]
        own = [batch[1] for batch in pl_module.client_batches(cohort, rows, 0).batches()]
        classes = int(max(int(each.max()) for each in (labels, *own))) + 1
        self._guess = labels.bincount(minlength=classes).double()
        self._mixes = torch.stack([each.bincount(minlength=classes) for each in own]).double().cpu()
        if histograms := pl_module.data.class_histograms():
            self._mixes = torch.tensor([histograms[client] for client in cohort.client_ids]).double()
        chosen = [(labels == label).nonzero()[: self.samples, 0] for label in range(classes)]
        if not all(map(len, chosen)):
            raise ConfigurationError(
                f"LabelInference: the validation data have no sample of class {[*map(len, chosen)].index(0)}; the attack needs samples "
                "of every class, so enlarge data.val_fraction"
            )
        most = max(map(len, chosen))
        index = torch.stack([one.repeat(most)[:most] for one in chosen])
        batch = pl_module.on_device((inputs[index], labels[index]))
        with isolate_rng():
            server = cohort_beside(pl_module, cohort, common=True)
            self._of_classes = _detached(simulated_step(pl_module, server, [0] * len(chosen), batch))
            self._exchanged: Step | None = None
            if pl_module.joint_method is not None:
                batches = pl_module.client_batches(cohort, rows, 0).stack()
                self._exchanged = _detached(simulated_step(pl_module, cohort, rows, batches))

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Attack what the clients send."""
        if self._of_classes is None:
            return
        names, treatments = [*self._of_classes.gradients], cohort.treatments
        gradients = _joined([self._of_classes.gradients[name] for name in names])
        updates = _joined([cohort.server[name] - cohort.params[name] for name in names])
        parts = {"update": (gradients, updates)}
        means = {f"{layer}.running_mean": value for layer, value in self._of_classes.means.items()}
        if sent := [name for name in means if treatments[name] in SENT]:
            server = [cohort.server_buffers[name] for name in sent]
            clients = [cohort.buffers[name] for name in sent]
            if self._exchanged is not None:
                clients = [
                    self._exchanged.means[name.removesuffix(".running_mean")][cohort.rows] for name in sent
                ]
            parts["statistics"] = (
                _joined([means[name] - mean for name, mean in zip(sent, server, strict=True)]),
                _joined([value - mean for value, mean in zip(clients, server, strict=True)]),
            )
        mixes = self._mixes[cohort.rows]
        mixes = mixes / mixes.sum(1, keepdim=True)
        found = {name: [_shares(signs, sent) for sent in sents] for name, (signs, sents) in parts.items()}
        if len(parts) > 1:
            found["both"] = [
                _shares(
                    torch.cat([signs / signs.norm() for signs, _ in parts.values()], 1),
                    torch.cat(
                        [
                            sents[row] / (signs.norm() * found[name][row].sum().clamp(min=1e-12))
                            for name, (signs, sents) in parts.items()
                        ]
                    ),
                )
                for row in range(len(cohort))
            ]
        found["guess"] = [self._guess] * len(cohort)
        self.newest = {}
        for name, shares in found.items():
            guesses = torch.stack(shares)
            guesses = torch.where(guesses.sum(1, keepdim=True) > 0, guesses, torch.ones_like(guesses))
            errors = (guesses / guesses.sum(1, keepdim=True) - mixes).abs().sum(1) / 2
            self.newest[f"privacy/label_error_{name}"] = float(errors.mean())
        pl_module.log_numbers(self.newest)

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
        if not labels or len(labels) < len(batches) or labels[0].dim() != 1 or labels[0].is_floating_point():
            raise ConfigurationError(
                "LabelInference: the server needs validation data of inputs and a label of each sample; set data.val_fraction, or "
                "leave it out of trainer.callbacks"
            )
        return torch.cat([inputs for inputs, _ in pairs]), torch.cat(labels).long()


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
