"""Figure of predicted segmentations beside the ground truth."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fl_lightning.pictures.style import literal, new_figure, paper_style


def colours(labels: Any, palette: Sequence[tuple[int, int, int]]) -> Any:
    """Convert labels ``[H, W]`` to colours, uint8 ``[H, W, 3]``. Unknown labels become black."""
    table = np.zeros((256, 3), dtype=np.uint8)
    table[: len(palette)] = palette
    return table[np.asarray(labels, dtype=np.uint8)]


def default_palette(classes: int) -> list[tuple[int, int, int]]:
    """Return a colour for each class, for data sets without a palette."""
    colors = colormaps["tab20"](np.arange(classes) % 20)[:, :3]
    return [(int(r * 255), int(g * 255), int(b * 255)) for r, g, b in colors]


@paper_style()
def overlay_figure(
    images: Sequence[Any],
    truths: Sequence[Any],
    guesses: Sequence[Any],
    palette: Sequence[tuple[int, int, int]],
    class_names: Sequence[str] | None,
    title: Sequence[str],
) -> Figure:
    """Draw images, labels and predictions, one row per image; ignored pixels are black.

    Args:
        images: uint8 ``[H, W, 3]``.
        truths: Labels ``[H, W]``. Labels of at least ``len(palette)`` mark ignored pixels.
        guesses: Predicted labels ``[H, W]``.
        palette: Colour of each class.
        class_names: Name of each class; None to show class numbers.
        title: Lines of the title.
    """
    height, width = np.asarray(images[0]).shape[:2]
    figure = new_figure(len(images) * 2.2 * height / width + 0.9, title)
    panels = figure.subplots(len(images), 3, squeeze=False)
    seen: set[int] = set()
    for row, image, truth, guess in zip(panels, images, truths, guesses, strict=True):
        known = np.where(np.asarray(truth) < len(palette), guess, 255)
        seen |= {int(label) for label in np.unique([truth, known]) if label < len(palette)}
        for axes, pixels in zip(row, (image, colours(truth, palette), colours(known, palette)), strict=True):
            axes.imshow(pixels, interpolation="nearest")
            axes.set_axis_off()
    for axes, text in zip(panels[0], ("image", "labels", "prediction"), strict=True):
        axes.set_title(text, loc="left")
    names = class_names or [str(number) for number in range(len(palette))]
    patches = [
        Patch(color="#{:02x}{:02x}{:02x}".format(*palette[label]), label=literal(names[label]))
        for label in sorted(seen)
    ]
    figure.legend(handles=patches, loc="outside lower left", ncols=6, frameon=False)
    return figure
