"""Evaluation of the final server model at the end of a run."""

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.data import sized_len

from fl_lightning.round.module import FederatedModule


def final_metrics(module: FederatedModule) -> dict[str, float]:
    """Evaluate the final server model, and return the metrics by name, such as ``test/accuracy``.

    Args:
        module: The trained module.
    """
    trainer, data, client = module.trainer, module.data, module.client
    metrics = {
        n: value for n, value in module.metrics.items() if n.startswith("val/") or n in client.logged_names
    }
    measured = {client.metric_name("val", n): value for n, value in module.evaluation.metrics.items()}
    # a finished run that is resumed has its checkpoint's metrics, but has not evaluated the model
    known = measured and measured.items() <= metrics.items()
    evaluations = []
    if not known and data.fit_split == "val" and has_batches(data.val_dataloader()):
        # these calls return no metrics if limit_val_batches or limit_test_batches is 0
        evaluations += trainer.validate(module, datamodule=data, verbose=False)
    data.setup("test")
    if has_batches(data.test_dataloader()) and client.has_test:
        evaluations += trainer.test(module, datamodule=data, verbose=False)
    for evaluation in evaluations:
        metrics |= evaluation
    return metrics


def has_batches(loader: Any) -> bool:
    """Return whether a loader has batches; True for a loader of unknown length."""
    return loader is not None and sized_len(loader) != 0


def final_classes(module: FederatedModule, metrics: Mapping[str, float]) -> dict[str, object] | None:
    """Return the main metric of the final server model for each class.

    If there are no test data, the metric is measured on the validation data.

    Args:
        module: The trained module.
        metrics: The module's metrics from :func:`final_metrics`.

    Returns:
        A dict with the keys ``split``, ``classes``, ``samples`` and the name of the metric, such as
        ``accuracy``. All values except ``split`` are lists with one entry per class. None if no
        evaluation has measured the metric.
    """
    task = module.task
    split = next((split for split in ("test", "val") if f"{split}/{task.quality}" in metrics), None)
    if split is None:
        return None
    evaluation, names = module.evaluation, module.data.class_names
    count = len(evaluation.class_quality)
    return {
        "split": split,
        "classes": list(names) if names is not None and len(names) == count else list(map(str, range(count))),
        task.by_class: evaluation.class_quality,
        "samples": evaluation.class_samples,
    }
