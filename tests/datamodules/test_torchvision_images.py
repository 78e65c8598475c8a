"""Data sets that torchvision reads: its files are made here, a few images each."""

import gzip
import pickle
import struct

import numpy as np
import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import CIFAR100, FashionMNIST, TorchvisionImages


@pytest.fixture
def fashion(tmp_path):
    """FashionMNIST's IDX files with 12 training and 6 test images."""
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, count in (("train", 12), ("t10k", 6)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes()
        )
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.tobytes())
    return tmp_path


def test_fashion_mnist_is_read_from_idx_files(fashion):
    data = FashionMNIST(str(fashion), num_clients=3, batch_size=2)
    found = data.load()
    assert found.train_images.shape == (12, 1, 28, 28)
    assert found.train_labels.tolist() == [*range(10), 0, 1]
    expected = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
    assert torch.equal(found.train_images[:, 0], torch.from_numpy(expected))
    data.setup("fit")
    assert [data.num_examples(client) for client in range(3)] == [4, 4, 4]
    assert (data.num_classes, data.in_channels, data.image_size, data.class_names[9]) == (
        10,
        1,
        28,
        "ankle boot",
    )
    assert FashionMNIST(str(fashion), image_size=14).load().train_images.shape == (12, 1, 14, 14)
    assert TorchvisionImages("FashionMNIST", 10, str(fashion)).load().train_images.shape == (12, 3, 32, 32)


def test_missing_files_say_what_to_do(fashion, tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"has no CIFAR100, or a damaged or incomplete one .*set download: true"
    ):
        CIFAR100(str(tmp_path / "none"))
    with pytest.raises(
        ConfigurationError, match=r"torchvision.datasets has no 'Nothing' with a training and a test part"
    ):
        TorchvisionImages("Nothing", 10, str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"has no 'VisionDataset' with a training and a test part"):
        TorchvisionImages("VisionDataset", 10, str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"in_channels must be 1 or 3, found 2"):
        TorchvisionImages("FashionMNIST", 10, str(fashion), image_size=28, in_channels=2)


def test_cifar100_is_read_from_its_pickles(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, count in (("train", 200), ("test", 100)):
        content = {
            "data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
            "fine_labels": [i % 100 for i in range(count)],
        }
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(i) for i in range(100)]}))
    monkeypatch.setattr("torchvision.datasets.CIFAR100._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    found = CIFAR100(str(tmp_path)).load()
    assert found.train_images.shape == (200, 3, 32, 32)
    assert found.test_labels.tolist() == [*range(100)]


def test_compressed_idx_files_are_not_taken_for_missing_ones_silently(fashion):
    path = fashion / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"has no FashionMNIST, or a damaged or incomplete one"):
        FashionMNIST(str(fashion))
