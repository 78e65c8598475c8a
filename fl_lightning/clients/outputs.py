"""Check that a model has one output per class. Losses silently accept additional outputs."""

from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning.batch_norm.swapping import evaluating
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.clients.metrics import measure_batch
from fl_lightning.clients.tasks import Classification, Segmentation
from fl_lightning.errors import ConfigurationError

_SAMPLES = 2


def check_outputs(run: Any, outputs: Any, targets: Any) -> None:
    """Check the number of a model's outputs.

    The check is skipped if the task is user-defined or the number of classes is unknown.

    Args:
        run: The run.
        outputs: The model's outputs, such as class scores ``[b, classes, ...]``.
        targets: The batch's targets, such as labels ``[b, ...]``.

    Raises:
        ConfigurationError: The number of outputs differs from the number of classes of the data.
    """
    if (classes := _classes(run)) is None:
        return
    scores = run.task.scores(outputs)
    labelled = isinstance(targets, Tensor) and not targets.is_floating_point()
    if labelled and targets.dim() == scores.dim() - 1 > 0 and scores.shape[1] != classes:
        data = type(run.data).__name__
        raise ConfigurationError(
            f"model: {type(run.model).__name__} has {scores.shape[1]} outputs, but {data} has {classes} classes; make the model with "
            f"{classes} outputs (fl_lightning.models.library_model does so for a function of torchvision), or use a task of your own"
        )


def check_before_training(run: Any) -> None:
    """Check the model's outputs and the metrics of ``model.metrics`` for two training samples.

    The model is in eval mode. The model and the random generators do not change. The check is
    skipped if an evaluation has already checked the outputs.

    Raises:
        ConfigurationError: The number of outputs is wrong, or a metric cannot be computed.
    """
    measured = run.task.measured
    if run.evaluation.metrics or (_classes(run) is None and not measured):
        return
    labelled: tuple[Any, Any] | None = None
    clients, _ = run.plan.usual().trained(1)
    with (
        isolate_rng(),
        suppress(Exception),  # round 1 raises these errors again
        torch.no_grad(),
        evaluating(run.model),
        run.trainer.precision_plugin.val_step_context(),
    ):
        inputs, targets = run.data.cohort_batch(clients[:1], [0]).map(run.on_device).batches()[0]
        if isinstance(inputs, Tensor):  # a slice of other inputs need not be of samples
            labelled = run.model(inputs[:_SAMPLES]), targets[:_SAMPLES]
    if labelled is not None:
        outputs, targets = labelled
        check_outputs(run, outputs, targets)
        if measured:
            measure_batch(measured, *run.task.measurable(run.task.scores(outputs), targets))


def _classes(run: Any) -> int | None:
    if type(run.task) not in (Classification, Segmentation):
        return None
    data = getattr(getattr(run, "_trainer", None), "datamodule", None)
    return data.num_classes if isinstance(data, FederatedDataModule) else None
