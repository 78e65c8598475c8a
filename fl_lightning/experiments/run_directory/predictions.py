"""Predictions of a trained model as files: a table, images and overlays."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fl_lightning.batch_norm.swapping import evaluating
from fl_lightning.client_data.raw_inputs import NewSamples
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import atomic_write, csv_text, unused, write_text
from fl_lightning.pictures.overlays import colours, default_palette, overlay_figure
from fl_lightning.round.final_evaluation import has_batches
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.tasks import Segmentation, enlarged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 4
_IGNORED = 255  # label that the picture shows in black


def write_predictions(path: Path, outputs: Sequence[Tensor], batches: Iterable[Any], data: Any) -> str:
    """Write predictions as ``<path>.csv``; for a segmentation, as ``<path>/<index>.png``.

    If the file or folder exists, ``.2`` is appended to its name.

    The columns of the CSV file are index, target, prediction, and probability of the prediction. An
    image shows each pixel in the colour of its predicted class.

    Args:
        path: Path without extension, such as ``runs/mine/1f0c9a7e-s0/predictions_round_12``.
        outputs: Class scores ``[b, classes]`` or ``[b, classes, H, W]`` of each batch.
        batches: Batches ``(inputs, targets)``, in the order of ``outputs``.
        data: The data module. Its attribute ``palette``, if any, sets the colours of the classes.

    Returns:
        A message with the number of predictions and the path.
    """
    lines, images, path = ["index,target,prediction,probability"], 0, unused(path)
    for scores, batch in zip(outputs, batches, strict=True):
        if not isinstance(scores, Tensor) or not isinstance(batch, list | tuple) or len(batch) != 2:
            raise ConfigurationError(
                f"predict writes predicted classes of batches (inputs, labels), but outputs are {type(scores).__name__} and batches "
                f"{type(batch).__name__}; use Trainer.predict from Python"
            )
        targets = batch[1]
        if scores.ndim == 4 and targets.ndim == 3:
            # enlarge scores to the size of the labels, as evaluations do
            scores = enlarged(scores, targets)
        if targets.is_floating_point() or targets.shape != scores.shape[:1] + scores.shape[2:]:
            raise ConfigurationError(
                f"predict writes predicted classes, but outputs {tuple(scores.shape)} and targets {tuple(targets.shape)} "
                f"({targets.dtype}) are not class scores and labels; use Trainer.predict from Python"
            )
        if scores.ndim > 2:
            for guess in scores.argmax(1):
                with atomic_write(path / f"{images:05}.png") as file:
                    Image.fromarray(colours(guess.cpu(), palette(data, scores.shape[1]))).save(file, "png")
                images += 1
            continue
        probability, prediction = scores.float().softmax(1).max(1)
        for target, guess, chance in zip(
            targets.tolist(), prediction.tolist(), probability.tolist(), strict=True
        ):
            lines.append(f"{len(lines) - 1},{target},{guess},{chance:.6g}")
    if images:
        return f"{images:,} predictions written to {path}"
    table = unused(path.with_name(f"{path.name}.csv"))
    write_text(table, "\n".join(lines) + "\n")
    return f"{len(lines) - 1:,} predictions written to {table}"


def write_rows(
    path: Path, samples: NewSamples, outputs: Sequence[Any], class_names: Sequence[str] | None
) -> Path:
    """Write a line for each new sample: its place, and its class or the values of the output.

    Args:
        path: The CSV file. If it exists, ``.2`` is appended to its stem.
        samples: The samples.
        outputs: Outputs of each batch, ``[b, ...]``.
        class_names: Names of the classes if the outputs are class scores ``[b, classes]``. Each
            class then has a column with its probability. None: the outputs are written as they are.

    Returns:
        Path of the written file.

    Raises:
        ConfigurationError: The outputs do not have a row for each sample.
    """
    if not all(isinstance(output, Tensor) and output.ndim for output in outputs):
        raise ConfigurationError(
            f"predict: outputs are {type(outputs[0]).__name__}, and not tensors with a row for each sample; return such a tensor from "
            "predict_step, or call Trainer.predict from Python"
        )
    values = torch.cat([*outputs]).detach().cpu()
    if len(values) != len(samples.places):
        raise ConfigurationError(
            f"predict: {len(values)} rows of outputs for {len(samples.places)} samples; return a row for each sample from predict_step"
        )
    if class_names is not None:
        columns = ["prediction", *(f"probability_{name}" for name in class_names)]
        guesses = [class_names[guess] for guess in values.argmax(1).tolist()]
        cells = [
            [guess, *row] for guess, row in zip(guesses, values.float().softmax(1).tolist(), strict=True)
        ]
    else:
        cells = values.flatten(1).tolist() if values.ndim > 1 else values[:, None].tolist()
        columns = ["value"] if len(cells[0]) == 1 else [f"value_{number}" for number in range(len(cells[0]))]
    rows = [[place, *row] for place, row in zip(samples.places, cells, strict=True)]
    write_text(path := unused(path), csv_text([[samples.unit, *columns], *rows]))
    return path


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
