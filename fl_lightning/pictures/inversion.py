"""Figure of training images beside their reconstructions."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from torch import Tensor

from fl_lightning.pictures.style import new_figure, paper_style


@paper_style()
def inversion_figure(images: Mapping[str, Mapping[str, Tensor]], title: Sequence[str]) -> Figure:
    """Draw training images and reconstructions: a row for each label, and columns for each heading.

    Args:
        images: Images ``[images, C, H, W]`` by heading of their columns, then by label of their row.
            The first row of a heading decides the range of grey values or colours.
        title: Lines of the title.
    """
    labels = [*dict.fromkeys(label for rows in images.values() for label in rows)]
    columns = sum(len(next(iter(rows.values()))) for rows in images.values())
    figure = new_figure(len(labels) * 6 / columns + 0.4, title)
    panels = figure.subplots(len(labels), columns, squeeze=False)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[], frame_on=False)
    first = 0
    for heading, rows in images.items():
        shown = next(iter(rows.values()))
        low, high = shown.min(), shown.max()
        panels[0][first].set_title(heading, loc="left")
        for label, parts in rows.items():
            for place, image in enumerate(parts):
                pixels = ((image - low) / (high - low).clamp(min=1e-12)).clamp(0, 1).movedim(0, -1).numpy()
                axes = panels[labels.index(label)][first + place]
                axes.imshow(pixels if len(image) == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
        first += len(shown)
    for row, label in zip(panels, labels, strict=True):
        row[0].set_ylabel(label)
    return figure
