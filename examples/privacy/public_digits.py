"""Public data for private digits: digits of fonts, in the format of scikit-learn's digits.

``python -m examples.privacy.public_digits`` trains a ResNet-8 with each norm on them, and writes the
weights to ``data/public_digits/``. The weights depend on no handwritten digit.
"""

from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from fl_lightning.datamodules import Digits
from fl_lightning.models import ResNet8

NORMS = ("bn", "gn", "scaled_ws", "none")
MEAN, STD = 0.275, 0.3425


class PrivateDigits(Digits):
    """Digits whose pixels are scaled by mean and standard deviation of the public digits."""

    mean, std = (MEAN,), (STD,)


def public_digits(per_class: int = 1000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images ``[N, 1, 8, 8]`` with values 0 to 16, and their labels ``[N]``.

    A digit of a random font is turned by up to 15 degrees and sheared. Its bounding box is scaled to
    the height of 32 pixels, and a pixel of the result counts the ink in 4x4 pixels.
    """
    folder = Path(matplotlib.get_data_path(), "fonts/ttf")
    fonts = sorted(font for font in folder.glob("DejaVuS*.ttf") if "Display" not in font.name)
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(10).repeat(per_class)
    images = torch.zeros(len(labels), 1, 8, 8)
    for index, label in enumerate(labels.tolist()):
        font = fonts[int(torch.randint(len(fonts), (), generator=draw))]
        angle, shear, width = (torch.rand(3, generator=draw) * 2 - 1).tolist()
        canvas = Image.new("L", (128, 128))
        ImageDraw.Draw(canvas).text((40, 24), str(label), 255, ImageFont.truetype(font, 64))
        canvas = canvas.rotate(15 * angle, Image.Resampling.BILINEAR)
        canvas = canvas.transform(canvas.size, Image.Transform.AFFINE, (1, 0.3 * shear, -19 * shear, 0, 1, 0))
        narrow = round(24 + 6 * width)
        ink = canvas.crop(canvas.getbbox()).resize((narrow, 32))
        paper = Image.new("L", (32, 32))
        paper.paste(ink, ((32 - narrow) // 2, 0))
        pixels = torch.from_numpy(np.array(paper))[None] > 127
        images[index] = 16 * F.avg_pool2d(pixels.float(), 4)
    return images, labels


def pretrained(norm: str, images: Tensor, labels: Tensor, epochs: int = 10, seed: int = 0) -> nn.Module:
    """Return a ResNet-8 of width 8 after training on the public digits."""
    torch.manual_seed(seed)
    model = ResNet8(in_channels=1, norm=norm, width=8)
    inputs = (images / 16 - MEAN) / STD
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    return model


if __name__ == "__main__":
    images, labels = public_digits()
    folder = Path("data/public_digits")
    folder.mkdir(parents=True, exist_ok=True)
    for norm in NORMS:
        torch.save(pretrained(norm, images, labels).state_dict(), folder / f"{norm}.pt")
        print(f"wrote {folder / norm}.pt")
