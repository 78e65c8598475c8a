"""Measures of the bias of the server's classifier, and of the features before the classifier."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning import ConfigurationError, FederatedModule
from fl_lightning.callbacks.observers.calibration import (
    accuracy,
    accuracy_between,
    accuracy_within,
    client_classes,
    predicted_shares,
    shared_class,
    uniform_bias,
)
from fl_lightning.client_data import every_batch
from fl_lightning.cohort import StateSlots
from fl_lightning.errors import check_at_least
from fl_lightning.methods import Observer, evenly_spaced
from fl_lightning.models import read_weights
from fl_lightning.round import ServerEvaluation


class ClassifierBias(Observer):
    """Observer that shows whether the classifier's bias or the features cause a low accuracy.

    Each evaluation in ``fit``, ``validate`` and ``test`` logs these metrics under ``val/`` or
    ``test/``:

    - ``train_loss``, ``train_accuracy``: Loss and accuracy on a fixed sample of training batches,
      augmented as in training. The batches come from the clients' first epoch and are evenly spaced
      over all clients.
    - ``predicted_share_<class>``: Share of the samples that are predicted as this class.
    - ``accuracy_calibrated``: Accuracy with a bias added to the logits. With this bias, all C
      classes have the same mean probability, 1 / C. The bias is found without labels
      (:func:`~fl_lightning.callbacks.observers.calibration.uniform_bias`). The difference from
      ``accuracy`` is the effect of the classifier's bias. The metric is meant for evaluation data
      with equally frequent classes. If the search for the bias does not converge, the metric is
      left out.
    - ``accuracy_within_clients``: Mean accuracy over the clients if the model knows each sample's
      client. A client is evaluated on the samples of the client's classes. The prediction is the
      class with the highest logit among the client's classes.
    - ``accuracy_between_clients``: Share of the samples for which the right client is predicted.
      The predicted client is the client whose classes have the largest sum of probabilities. If two
      clients share a class, the metric is left out, and a message says so.

    A class belongs to a client if the client has enough samples of the class: at least a tenth of
    the number of samples in the client's most frequent class. ``accuracy_within_clients`` and
    ``accuracy_between_clients`` need a data module with class histograms.

    All metrics above, ``accuracy`` and ``loss`` are also logged for the mean of the newest server
    models, with names that end in ``_mean_model``. The mean gives all models equal weight. It
    includes parameters, running means and running variances. Counters are taken from the newest
    model.

    Samples with non-finite outputs count only in ``accuracy`` and ``loss``. The setting
    ``trainer.limit_val_batches`` has no effect here: all evaluation data are used.

    Args:
        mean_of: Number of the newest server models in the mean, at least 1. With 1, no mean is
            computed.
        train_samples: Approximate number of training samples in ``train_loss`` and
            ``train_accuracy``, at least 1.
        checkpoints: Files with checkpoints or state dicts. In ``test`` and ``validate``, the mean
            of these models replaces the mean of the newest models. Default: no files.

    Raises:
        ConfigurationError: A setting is out of its range, a file does not fit the model, or the
            task does not have exactly one label per sample.

    Attributes:
        models: The newest server models, in the order of their rounds.
    """

    saved = ("models",)

    def __init__(self, mean_of: int = 5, train_samples: int = 2000, checkpoints: Sequence[str] = ()) -> None:
        check_at_least(1, mean_of=mean_of, train_samples=train_samples)
        self.mean_of, self.train_samples, self.checkpoints = mean_of, train_samples, list(checkpoints)
        self.models: list[dict[str, Tensor]] = []
        self._said = False

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Forget the models of an earlier run, unless the run is resumed."""
        pl_module.client.require_outputs("ClassifierBias")
        if not pl_module.trainer.current_epoch:
            self.models = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: FederatedModule, *_: Any) -> None:  # type: ignore[override]  # narrows pl_module
        """Store the server's model after a round, also the unchanged model of a skipped round."""
        if self.mean_of > 1:
            state = pl_module.model.state_dict().items()
            model = {name: value.clone() for name, value in state if isinstance(value, Tensor)}
            self.models = [*self.models, model][-self.mean_of :]

    # data modules may cache tensors here, and training cannot use inference tensors
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Log all metrics of this observer."""
        split = "test" if trainer.testing else pl_module.data.fit_split
        if trainer.state.fn != TrainerFn.FITTING:
            pl_module.data.setup("fit")  # 'validate' and 'test' do not set up the clients' data
        slots = StateSlots(pl_module.model)
        setting = "ClassifierBias.checkpoints"
        models: list[Any] = [read_weights(pl_module.model, path, setting) for path in self.checkpoints]
        if trainer.state.fn == TrainerFn.FITTING or not models:
            models = self.models
        with isolate_rng(), pl_module.trainer.precision_plugin.val_step_context():
            self._log(pl_module, split)
            if models:  # no models are stored if ``mean_of`` is 1
                mean = _mean(models, pl_module.model.state_dict())
                pl_module.refuse_merged(type(self).__name__, mean)
                with slots.filled(mean):
                    self._log(pl_module, split, "_mean_model")

    on_test_epoch_end = on_validation_epoch_end  # type: ignore[assignment]  # narrows pl_module

    def _log(self, pl_module: FederatedModule, split: str, suffix: str = "") -> None:
        """Log the metrics of the module's current model, on all ranks.

        Args:
            pl_module: The federated module.
            split: Prefix of the metric names, ``"val"`` or ``"test"``.
            suffix: Suffix of the metric names.
        """
        data, train, outputs = pl_module.data, ServerEvaluation(), _Outputs()
        for index, (client, step) in enumerate(self._train_batches(pl_module)):
            batch = pl_module.on_device(data.cohort_batch([client], [step]).batches()[0])
            train.divide(pl_module, batch, index, pl_module.client.evaluate_batch)
        loader = data.test_dataloader() if pl_module.trainer.testing else data.val_dataloader()
        for index, batch in enumerate(every_batch(loader)):
            outputs.divide(pl_module, pl_module.on_device(batch), index, pl_module.client.evaluate_batch)
        metrics = {f"train_{name}": value for name, value in train.finish().items()}
        if suffix:
            metrics |= outputs.finish()
        metrics |= self._measures(pl_module, *outputs.gathered(pl_module))
        for name, value in metrics.items():
            pl_module.log(f"{split}/{name}{suffix}", value)

    def _train_batches(self, pl_module: FederatedModule) -> list[tuple[int, int]]:
        """Return the client and the local step of each batch in the training sample."""
        data = pl_module.data
        clients = range(data.num_clients)
        batches = [(client, step) for client in clients for step in range(data.steps_per_epoch(client))]
        size = sum(map(data.samples_per_step, clients)) / len(clients)
        count = max(1, round(self.train_samples / size))
        return [batches[index] for index in evenly_spaced(count, len(batches))]

    def _measures(self, pl_module: FederatedModule, logits: Tensor, labels: Tensor) -> dict[str, float]:
        finite = logits.isfinite().all(1)
        logits, labels = logits[finite], labels[finite]
        if not len(labels):
            return {}
        shares = predicted_shares(logits).tolist()
        measures: dict[str, float | None] = {f"predicted_share_{label}": x for label, x in enumerate(shares)}
        bias = uniform_bias(logits)
        measures["accuracy_calibrated"] = None if bias is None else accuracy(logits + bias, labels)
        groups = client_classes(pl_module.data.class_histograms()[: pl_module.data.num_clients])
        measures["accuracy_within_clients"] = accuracy_within(logits, labels, groups)
        if (shared := shared_class(groups)) is None:
            measures["accuracy_between_clients"] = accuracy_between(logits, labels, groups)
        elif not self._said:
            self._said = True
            reason = "clients {} and {} share class {}".format(*shared)
            pl_module.print(f"ClassifierBias: accuracy_between_clients is left out, as {reason}")
        return {name: value for name, value in measures.items() if value is not None}


class _Outputs(ServerEvaluation):
    """Evaluation that also stores the outputs and labels of this rank's batches."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, outputs: Any, targets: Tensor, *args: Any, **kwargs: Any) -> None:
        """Store a batch's outputs, and call :meth:`ServerEvaluation.update`."""
        super().update(outputs, targets, *args, **kwargs)
        scores = self._task.scores(outputs)
        if scores.dim() != 2 or targets.dim() != 1 or targets.is_floating_point():
            raise ConfigurationError(
                f"ClassifierBias needs a label of each sample, but outputs are {[*scores.shape]} and labels {[*targets.shape]} "
                f"({targets.dtype}); leave it out of trainer.callbacks"
            )
        counted = self._task.counted(scores, targets)
        self.outputs[self._batch] = scores[counted].double().cpu(), targets[counted].long().cpu()

    def gathered(self, pl_module: FederatedModule) -> tuple[Tensor, Tensor]:
        """Return logits ``[N, C]`` and labels ``[N]`` of all ranks, in the order of the data."""
        self.finish()  # if one rank has failed, all ranks raise an error
        parts: dict[int, tuple[Tensor, Tensor]] = {}
        for outputs in pl_module.ranks.exchange(lambda: self.outputs):
            parts |= outputs
        logits, labels = zip(*(parts[batch] for batch in sorted(parts)), strict=True)
        return torch.cat(logits), torch.cat(labels)


def _mean(models: Sequence[Mapping[str, Tensor]], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean of models, computed in float64.

    Integer tensors (counters) are taken from the last model.

    Args:
        models: State dicts of the models; the last model is the newest.
        like: State dict with the names, data types and devices of the result.
    """
    means = {}
    for name, tensor in ((name, value) for name, value in like.items() if isinstance(value, Tensor)):
        values = [model[name] for model in models]
        if tensor.is_floating_point():
            means[name] = torch.stack([value.double() for value in values]).mean(0).to(tensor)
        else:
            means[name] = values[-1].to(tensor)
    return means
