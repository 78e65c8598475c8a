"""Check that a model has one output per class. Losses silently accept additional outputs."""

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
    """Check of a model's number of outputs.

    The check uses the outputs of the first evaluation, or of two training samples before round 1.

    Args:
        applies: Whether the outputs are class scores. With False, nothing is checked. Modules that
            override ``client_loss`` or ``evaluate_batch`` need False.
    """

    def __init__(self, applies: bool) -> None:
        self.applies = applies
        self._passed: int | None = None  # number of classes in the last successful check

    def check(self, run: RunContext, outputs: Any, targets: Any) -> None:
        """Check the number of a model's outputs.

        The check is skipped if the task is user-defined or the number of classes is unknown.

        Args:
            run: The run.
            outputs: The model's outputs, such as class scores ``[b, classes, ...]``.
            targets: The batch's targets, such as labels ``[b, ...]``.

        Raises:
            ConfigurationError: The number of outputs differs from the number of classes of the
                data.
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
        """Check the model's outputs for two training samples.

        The metrics of ``model.metrics`` are computed as well. The model is in eval mode. The model
        and the random generators do not change. If an evaluation has already checked the number of
        outputs, only the metrics are computed.

        Raises:
            ConfigurationError: The number of outputs is wrong, or a metric cannot be computed.
        """
        measured = run.task.measured if self.applies else {}
        if self._classes(run) in (None, self._passed) and not measured:
            return
        labelled: tuple[Any, Any] | None = None
        clients, _ = replace(run.plan, failures=None).trained(1)
        with isolate_rng(), suppress(Exception):  # ignore errors here: round 1 raises them again
            batch = run.data.cohort_batch(clients[:1], [0]).map(run.on_device).batches()[0]
            if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[0], Tensor):
                return
            inputs, targets = (part[:_SAMPLES] for part in batch)
            with (
                torch.no_grad(),
                evaluating(run.model),
                run.trainer.precision_plugin.val_step_context(),
            ):
                labelled = run.model(inputs), targets
        if labelled is not None:
            self.check(run, *labelled)
            if measured:
                outputs, targets = labelled
                measure(measured, *run.task.measurable(run.task.scores(outputs), targets))

    def _classes(self, run: RunContext) -> int | None:
        """Return the number of outputs that the model must have; None if it is unknown."""
        if not self.applies or type(run.task) not in (Classification, Segmentation):
            return None
        data = getattr(getattr(run, "_trainer", None), "datamodule", None)
        return data.num_classes if isinstance(data, FederatedDataModule) else None
