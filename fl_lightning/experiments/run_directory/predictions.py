"""Predictions of a trained model as files: a table, images and overlays."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fl_lightning.batch_norm.swapping import evaluating
from fl_lightning.client_data.new_samples import NewSamples
from fl_lightning.clients.tasks import Segmentation, enlarged
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import atomic_write, unused, write_text
from fl_lightning.methods.run_report import Report
from fl_lightning.pictures.overlays import colours, default_palette, overlay_figure
from fl_lightning.round.final_evaluation import has_batches
from fl_lightning.round.module import FederatedModule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 4
_MOST_OUTPUTS = 100  # for each sample in test_predictions.csv
_NO_ROWS = "predict: the outputs are no tensors with a row for each sample, all of one shape; return such tensors from predict_step"
_IGNORED = 255  # label that the picture shows in black


class KeptBatches(L.Callback):
    """Callback that keeps what a file of predictions needs of each batch: its size and targets.

    A loader may draw other batches when it is read again.
    """

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_predict_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: int
    ) -> None:
        """Keep the targets of a pair ``(inputs, targets)``, and the number of inputs of a tensor."""
        if isinstance(batch, Tensor):
            batch = torch.empty(len(batch), 0)
        elif isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
            batch = None, batch[1].cpu()
        self.batches.append(batch)


def write_predictions(
    folder: Path, table: Path, outputs: Sequence[Any], batches: Iterable[Any], data: Any, values: bool = False
) -> str:
    """Write predictions as a table; for a segmentation, as ``<folder>/<index>.png``.

    An image shows each pixel in the colour of its predicted class.

    Args:
        folder: The folder of images. If it exists, ``.2`` is appended.
        table: The CSV file, such as ``runs/mine/1f0c9a7e-s0/predictions_round_12.csv``. If it exists,
            ``.2`` is appended to its stem.
        outputs: Class scores ``[b, classes]`` or ``[b, classes, H, W]`` of each batch, or values.
        batches: Batches ``(inputs, targets)``, in the order of ``outputs``. If a batch is a tensor
            of inputs, the table has no targets.
        data: The data module. Its attribute ``palette``, if any, sets the colours of the classes.
        values: Whether the outputs are values, as of a ``predict_step``, and no class scores.

    Returns:
        A message with the number of predictions and the path.

    Raises:
        ConfigurationError: There are no outputs, or they do not have a row for each sample.
    """
    if not outputs:
        raise ConfigurationError(
            "predict: no batch is predicted; give the run test data, and leave trainer.limit_predict_batches: 0 out"
        )
    images, folder, targets = 0, unused(folder), []
    for scores, batch in zip(outputs, batches, strict=True):
        paired = isinstance(batch, list | tuple) and len(batch) == 2
        if not isinstance(scores, Tensor) or not (paired or isinstance(batch, Tensor)):
            raise ConfigurationError(
                f"predict writes tensors for batches (inputs, targets), but outputs are {type(scores).__name__} and batches "
                f"{type(batch).__name__}; return a tensor from predict_step, or use Trainer.predict from Python"
            )
        if not scores.ndim or len(scores) != len(batch[1] if paired else batch):
            raise ConfigurationError(_NO_ROWS)
        targets += [batch[1]] if paired else []
        if not values and paired and scores.ndim == 4 and batch[1].ndim == 3:
            # enlarge scores to the size of the labels, as evaluations do
            for guess in enlarged(scores, batch[1]).argmax(1):
                with atomic_write(folder / f"{images:05}.png") as file:
                    Image.fromarray(colours(guess.cpu(), palette(data, scores.shape[1]))).save(file, "png")
                images += 1
    if images:
        return f"{images:,} predictions written to {folder}"
    labels, names = torch.cat(targets) if targets else None, None if values else data.class_names
    counted = labels is not None and labels.ndim == 1 and not labels.is_floating_point()
    if names is None and counted and not values:
        names = [*map(str, range(outputs[0][0].numel()))]
    count = sum(map(len, outputs))
    samples = NewSamples("index", range(count), torch.arange(count).__getitem__, labels)
    return write_rows(table, samples, outputs, names)


def write_rows(
    path: Path,
    samples: NewSamples,
    outputs: Sequence[Any],
    class_names: Sequence[str] | None,
    columns: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Write a line for each sample: place, target if known, class and probabilities, or values.

    Args:
        path: The CSV file. If it exists, ``.2`` is appended to its stem.
        samples: The samples.
        outputs: Outputs of each batch, ``[b, ...]``.
        class_names: Names of the classes if the outputs are class scores; None: they are values.
        columns: Further columns after the place.

    Returns:
        A message with the number of predictions and the path.

    Raises:
        ConfigurationError: The outputs do not have a row for each sample, or scores are not finite.
    """
    rows = [x for x in outputs if isinstance(x, Tensor) and x.ndim]
    if sum(map(len, rows)) != len(samples.places) or len({x.shape[1:] for x in rows}) > 1:
        raise ConfigurationError(_NO_ROWS)
    values = torch.cat(rows).cpu()
    if class_names is not None and values.shape[1:] == (len(class_names),):
        for row in (~values.isfinite().all(1)).nonzero()[:1].flatten().tolist():
            raise ConfigurationError(
                f"predict: the model's scores for {samples.unit} {samples.places[row]} are not finite; correct its values, or use a "
                "checkpoint of before the run diverged"
            )
    table = _rows_frame({samples.unit: samples.places, **columns}, samples.targets, values, class_names)
    write_text(path := unused(path), table.to_csv(index=False, lineterminator="\n"))
    return f"{len(table):,} predictions written to {path}"


def write_own_predictions(path: Path, module: FederatedModule) -> None:
    """Write a line for each of the clients' own test samples: place, client, target and prediction.

    There is no file if the clients have no names, if no observer has evaluated their models, or if a
    sample has several targets or more than 100 outputs.

    Args:
        path: The CSV file, ``test_predictions.csv``.
        module: The module after its final evaluation.
    """
    import pandas as pd  # only predictions need pandas

    reports = [x.predictions() for x in module.federated_callbacks if isinstance(x, Report)]
    data, frames = module.data, []
    for client, batches in next(filter(None, reports), {}).items() if data.client_names else ():
        scores, targets = (torch.cat(x) for x in zip(*batches, strict=True))
        if targets.ndim > 1 or scores.numel() // max(len(scores), 1) > _MOST_OUTPUTS:
            return
        places = data.own_samples(client, "test") or {"index": range(len(targets))}
        columns = {**places, "client": [data.client_names[client]] * len(targets)}
        classes = scores.ndim == 2 and not targets.is_floating_point()
        names = (data.class_names or [*map(str, range(scores.shape[1]))]) if classes else None
        frames.append(_rows_frame(columns, targets, scores, names))
    if frames:
        write_text(path, pd.concat(frames).to_csv(index=False, lineterminator="\n"))


def _rows_frame(
    columns: Mapping[str, Sequence[Any]],
    targets: Tensor | None,
    values: Tensor,
    class_names: Sequence[str] | None,
) -> Any:
    """Return a frame with columns, targets, and predicted classes with probabilities, or values."""
    import pandas as pd  # only predictions need pandas

    table = pd.DataFrame(columns)
    if targets is not None and targets.ndim == 1:
        table["target"] = targets.tolist()
    if class_names is None or values.shape[1:] != (len(class_names),):
        values = values.reshape(len(values), -1)
        further = [f"value_{number}" for number in range(values.shape[1])]
    else:
        known = dict(enumerate(class_names))
        table = table.replace({"target": known})
        table["prediction"] = [known[guess] for guess in values.argmax(1).tolist()]
        further, values = [f"probability_{name}" for name in class_names], values.float().softmax(1)
    table[further] = values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()
    return table


def palette(data: Any, classes: int) -> Sequence[tuple[int, int, int]]:
    """Return the data module's palette, or a default palette with a colour for each class."""
    return getattr(data, "palette", None) or default_palette(classes)


@torch.no_grad()
def overlays(module: FederatedModule, title: Sequence[str]) -> "Figure | None":
    """Draw the first evaluation images of a segmentation, with their labels and predictions.

    Return None for other tasks, and if there are no evaluation data.
    """
    if not isinstance(module.task, Segmentation):
        return None
    images: list[Any] = []
    truths: list[Any] = []
    guesses: list[Any] = []
    classes = 0
    loader = module.data.test_dataloader()
    if not has_batches(loader):
        loader = module.data.val_dataloader()
    with evaluating(module.model):
        for inputs, targets in loader if has_batches(loader) else ():
            scores = enlarged(module.task.scores(module.model(module.on_device(inputs))).cpu(), targets)
            classes = scores.shape[1]
            images += [_look(module.data, image) for image in inputs]
            labels = targets.long()  # int64, because uint8 cannot represent -100
            truths += [*labels.where(labels != module.task.ignored, _IGNORED).numpy()]
            guesses += [*scores.argmax(1).numpy()]
            if len(images) >= _SHOWN:
                break
    if not images:
        return None
    shown = slice(0, _SHOWN)
    names = module.data.class_names
    return overlay_figure(
        images[shown], truths[shown], guesses[shown], palette(module.data, classes), names, title
    )


def _look(data: Any, image: Tensor) -> Any:
    if hasattr(data, "picture"):
        return data.picture(image).numpy()
    low, high = image.min(), image.max()
    pixels = ((image - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8)
    return np.moveaxis(pixels[:3].expand(3, -1, -1).numpy(), 0, -1)
