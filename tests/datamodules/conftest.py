"""Images in class folders, and which of them were decoded."""

import numpy as np
import pytest

from fl_lightning.datamodules import image_files
from tests.support.colour_folders import save


@pytest.fixture
def tree(tmp_path):
    """Two classes, created out of order; image i of class c is a plain colour (10 * i, 100 * c, 7 + i)."""
    root = tmp_path / "tree"
    for split, count in (("train", 6), ("test", 3)):
        for label, name in ((1, "zebra"), (0, "ant")):
            for index in range(count):
                colour = np.full((8, 8, 3), (10 * index, 100 * label, 7 + index))
                save(root / split / name / f"{index}.png", colour)
    return root


@pytest.fixture
def decoded(monkeypatch):
    """The paths that were decoded, in order."""
    paths = []

    def spy(path, size, decode=image_files.decode, **settings):
        paths.append(path)
        return decode(path, size, **settings)

    monkeypatch.setattr(image_files, "decode", spy)
    return paths
