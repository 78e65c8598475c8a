"""Whether a model has an output for each class of the data, which a loss of too many outputs never tells."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning.batch_norm.swapping import evaluating
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.round.context import RunContext
from fl_lightning.round.metrics import measure
from fl_lightning.round.tasks import Classification, Segmentation

_SAMPLES = 2


class OutputCheck:
    """A check of the outputs that are first evaluated, or of those for two training samples where nothing is evaluated before round 1.

    Args:
        applies: Whether outputs are class scores: not where a module defines ``client_loss`` or ``evaluate_batch`` itself.
    """

    def __init__(self, applies: bool) -> None:
        self.applies = applies
        self._passed: int | None = None  # with so many classes

    def check(self, run: RunContext, outputs: Any, targets: Any) -> None:
        """Check outputs of a model for labelled samples.

        A task of the user's own is never refused, nor are data whose number of classes is not known.

        Args:
            run: The run.
            outputs: The model's, such as class scores ``[b, classes, ...]``.
            targets: Such as labels ``[b, ...]``.

        Raises:
            ConfigurationError: The task is one of classes, and the model has more or fewer outputs than the data have classes.
        """
        if (classes := self._classes(run)) is None:
            return
        scores = run.task.scores(outputs)
        labelled = isinstance(targets, Tensor) and not targets.is_floating_point()
        if not labelled or scores.dim() < 2 or targets.dim() != scores.dim() - 1:
            return
        if scores.shape[1] != classes:
            data = type(run.data).__name__
            raise ConfigurationError(
                f"model: {type(run.model).__name__} has {scores.shape[1]} outputs, but {data} has {classes} classes; make the model with "
                f"{classes} outputs (fl_lightning.models.library_model does so for a function of torchvision), or use a task of your own"
            )
        self._passed = classes

    def before_training(self, run: RunContext) -> None:
        """Check the outputs for training samples in eval mode, and that metrics can be computed from them.

        The model and the generators stay as they are. An evaluation before round 1 has checked the number of outputs.

        Raises:
            ConfigurationError: As for :meth:`check`, or a metric of ``model.metrics`` cannot be computed.
        """
        measured = run.task.measured if self.applies else {}
        if self._classes(run) in (None, self._passed) and not measured:
            return
        found: tuple[Any, Any] | None = None
        clients, _ = replace(run.plan, failures=None).trained(1)
        with isolate_rng(), suppress(Exception):  # which round 1 will raise, and tell where
            batch = run.data.cohort_batch(clients[:1], [0]).map(run.on_device).batches()[0]
            if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[0], Tensor):
                return
            inputs, targets = (part[:_SAMPLES] for part in batch)
            with (
                torch.no_grad(),
                evaluating(run.model),
                run.trainer.precision_plugin.val_step_context(),
            ):
                found = run.model(inputs), targets
        if found is not None:
            self.check(run, *found)
            outputs, targets = found
            if measured:
                measure(measured, *run.task.measurable(run.task.scores(outputs), targets))

    def _classes(self, run: RunContext) -> int | None:
        """The number of classes that outputs are to have, None where it is not known."""
        if not self.applies or type(run.task) not in (Classification, Segmentation):
            return None
        data = getattr(getattr(run, "_trainer", None), "datamodule", None)
        return data.num_classes if isinstance(data, FederatedDataModule) else None
