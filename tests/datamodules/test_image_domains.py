"""A folder for each domain: who the clients are, their own test data, and images of any kind."""

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning import ConfigurationError, FederatedModule
from fl_lightning.callbacks import FedBN
from fl_lightning.datamodules import IID, ImageDomains
from tests.support.helpers import SGD, fit, small_cnn

COLOURS = {"amazon": 40, "dslr": 120, "webcam": 200}
"""The red of every image of a domain; its size and number of classes differ, too."""


def write(root, split):
    """Two classes a domain, ``mug`` only at the last two; images ``(red, 100 * class, index)`` of the domain's own size."""
    for size, (domain, red) in enumerate(COLOURS.items(), 8):
        classes = ("bike", "mug") if size > 8 else ("bike",)
        for label, name in enumerate(classes):
            for part, count in (("train", 6), ("test", 2)) if split else (("", 8),):
                folder = root / domain / part / name
                folder.mkdir(parents=True)
                for index in range(count):
                    pixels = np.full((size, 2 * size, 3), (red, 100 * label, index), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{index}.png")
    return str(root)


@pytest.mark.parametrize("test_fraction", [None, 0.25])
def test_each_domain_is_a_client_with_its_own_test_data(tmp_path, test_fraction):
    root = write(tmp_path / "office", split=test_fraction is None)
    data = ImageDomains(root, 8, test_fraction=test_fraction, batch_size=2)
    data.prepare_data()
    data.setup("fit")
    assert data.class_names == ["bike", "mug"]
    assert data.partition_record()["clients"] == list(COLOURS)
    assert data.class_histograms() == [[6, 0], [6, 6], [6, 6]]
    assert data.samples.labels[data.distribution.test].bincount().tolist() == [6, 4]
    for client, red in enumerate(COLOURS.values()):
        images, labels = data.clients[client].train_batch(0)
        own, own_labels = next(iter(data.own_dataloader(client, "test")))
        for pixels, classes in ((images, labels), (own, own_labels)):
            normal = data.samples.normalize
            raw = (pixels * normal.std + normal.mean) * 255
            assert raw[:, 0].round().unique().tolist() == [red]
            assert torch.equal(raw[:, 1, 0, 0].round().long(), 100 * classes)


def test_the_split_of_a_domain_does_not_depend_on_the_others(tmp_path):
    root = write(tmp_path / "office", split=False)
    whole = ImageDomains(root, 8, test_fraction=0.25).load()
    for image in (tmp_path / "office" / "webcam" / "mug").iterdir():
        image.rename(image.with_name("b" + image.name))
    (tmp_path / "office" / "webcam" / "mug" / "b0.png").unlink()
    again = ImageDomains(root, 8, test_fraction=0.25).load()
    assert torch.equal(again.test_images[:6], whole.test_images[:6])
    assert not torch.equal(whole.test_images[2:6, 2], whole.test_images[6:, 2])  # the images' numbers


def test_fedbn_trains_on_them(tmp_path):
    data = ImageDomains(write(tmp_path / "office", split=True), 6, batch_size=2)
    module = FederatedModule(small_cnn(classes=2, channels=3), SGD, local_steps=1)
    fit(module, data, 1, [FedBN()], precision="32-true")
    assert module.record.samples == 3 * 2


def test_another_layout_is_refused_with_the_one_expected(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"nowhere does not exist; expected a folder for each domain"
    ):
        ImageDomains(str(tmp_path / "nowhere"), 8)
    root = write(tmp_path / "office", split=False)
    with pytest.raises(ConfigurationError, match=r"data_dir=.*amazon holds no train/; expected the layout"):
        ImageDomains(root, 8)
    assert ImageDomains(root, 8, test_fraction=0.5, partition=IID(), num_clients=2).num_clients == 2
