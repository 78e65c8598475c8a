"""CIFAR-10: torchvision's files and class folders give the same data set, and nothing is downloaded unasked."""

import hashlib
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import CIFAR10
from tests.support.command_line import run, write_config

FILES = {"data_batch_1": 60, "data_batch_2": 40, "test_batch": 20}


@pytest.fixture
def pixels():
    """Pictures of every file, [N, 32, 32, 3]; image i has class i % 10."""
    random = np.random.default_rng(0)
    return {
        name: random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8) for name, count in FILES.items()
    }


@pytest.fixture
def pickles(tmp_path, pixels, monkeypatch):
    """A small ``cifar-10-batches-py`` that torchvision takes for the real one."""
    folder = tmp_path / "torchvision" / "cifar-10-batches-py"
    folder.mkdir(parents=True)

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    sums = {
        name: write(
            name, {"data": images.transpose(0, 3, 1, 2).reshape(len(images), -1), "labels": labels(images)}
        )
        for name, images in pixels.items()
    }
    files = torchvision.datasets.CIFAR10
    monkeypatch.setattr(files, "train_list", [[name, sums[name]] for name in FILES if name != "test_batch"])
    monkeypatch.setattr(files, "test_list", [["test_batch", sums["test_batch"]]])
    names = {"label_names": list(CIFAR10.class_names)}
    meta = {"filename": "batches.meta", "key": "label_names", "md5": write("batches.meta", names)}
    monkeypatch.setattr(files, "meta", meta)
    return folder.parent


@pytest.fixture
def folders(tmp_path, pixels):
    """The same images in class folders, in the order of the files."""
    root = tmp_path / "folders"
    for name, images in pixels.items():
        for index, (image, label) in enumerate(zip(images, labels(images), strict=True)):
            split = "test" if name == "test_batch" else "train"
            folder = root / split / CIFAR10.class_names[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{name}-{index:03}.png")
    return root


def labels(images):
    return [index % 10 for index in range(len(images))]


def by_class(images, targets):
    return images[targets.argsort(stable=True)], targets.sort().values


@pytest.mark.parametrize("size", [32, 16])
def test_torchvision_files_and_class_folders_hold_the_same_images(pickles, folders, size):
    one = CIFAR10(str(pickles), image_size=size).load()
    other = CIFAR10(str(folders), image_size=size).load()
    assert one.train_images.shape == (100, 3, size, size)
    assert one.test_images.shape == (20, 3, size, size)
    for split in ("train", "test"):
        images, targets = by_class(getattr(one, f"{split}_images"), getattr(one, f"{split}_labels"))
        assert torch.equal(images, getattr(other, f"{split}_images"))
        assert torch.equal(targets, getattr(other, f"{split}_labels"))


def test_images_are_those_of_the_files(pickles, pixels):
    data = CIFAR10(str(pickles)).load()
    expected = np.concatenate([pixels["data_batch_1"], pixels["data_batch_2"]])
    assert torch.equal(data.train_images, torch.from_numpy(expected).permute(0, 3, 1, 2))
    assert data.train_images.is_contiguous()


def test_missing_data_are_not_downloaded_unasked(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torchvision.datasets.utils.download_url", lambda *_args, **_kwargs: pytest.fail("download")
    )
    with pytest.raises(ConfigurationError, match=r"data_dir=nowhere holds neither .* set download: true"):
        CIFAR10("nowhere")
    assert list(tmp_path.iterdir()) == []


def test_download_goes_to_the_data_folder_when_asked(pickles, tmp_path, monkeypatch):
    fetched = []

    def fetch(url, root, **_kwargs):
        fetched.append((url, Path(root)))
        (tmp_path / "new").mkdir(exist_ok=True)
        (pickles / "cifar-10-batches-py").rename(tmp_path / "new" / "cifar-10-batches-py")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fetch)
    datamodule = CIFAR10(str(tmp_path / "new"), download=True)
    datamodule.prepare_data()
    datamodule.prepare_data()
    assert [root for _, root in fetched] == [tmp_path / "new"]
    assert len(datamodule.load().train_labels) == 100


def test_of_two_runs_that_start_together_one_downloads(pickles, tmp_path, monkeypatch):
    fetched = []

    def fetch(url, root, **_kwargs):
        fetched.append(url)
        time.sleep(0.1)
        (pickles / "cifar-10-batches-py").rename(tmp_path / "new" / "cifar-10-batches-py")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fetch)
    with ThreadPoolExecutor(2) as pool:
        runs = [CIFAR10(str(tmp_path / "new"), download=True) for _ in range(2)]
        list(pool.map(CIFAR10.prepare_data, runs))
    assert len(fetched) == 1


def test_download_without_a_network_says_what_to_do(tmp_path, monkeypatch):
    def offline(*_args, **_kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", offline)
    with pytest.raises(ConfigurationError, match=r"download: .*no route to host.* by hand"):
        CIFAR10(str(tmp_path / "new" / "cifar10"), download=True).prepare_data()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_damaged_files_are_told(pickles):
    with (pickles / "cifar-10-batches-py" / "data_batch_2").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigurationError, match=r"data_dir=.* damaged or incomplete.* set download: true"):
        CIFAR10(str(pickles)).load()


def test_data_and_cache_may_lie_in_the_home_of_the_user(folders, monkeypatch):
    monkeypatch.setenv("HOME", str(folders.parent))
    CIFAR10("~/folders", cache_dir="~/cache").load()
    assert len(list((folders.parent / "cache").glob("*.pt"))) == 1
    assert not Path("~").exists()


def test_a_read_only_folder_is_enough(pickles):
    pickles.chmod(0o555)
    try:
        assert len(CIFAR10(str(pickles)).load().train_labels) == 100
        assert sorted(path.name for path in pickles.iterdir()) == ["cifar-10-batches-py"]
    finally:
        pickles.chmod(0o755)


def test_other_class_folders_are_refused(folders):
    (folders / "train" / "cat").rename(folders / "train" / "caterpillar")
    (folders / "test" / "cat").rename(folders / "test" / "caterpillar")
    for download in (False, True):
        with pytest.raises(ConfigurationError, match=r"caterpillar.*use ImageFolder"):
            CIFAR10(str(folders), download=download)


def test_defaults_are_those_of_the_fixbn_paper(pickles):
    datamodule = CIFAR10(str(pickles))
    assert (datamodule.num_clients, datamodule.batch_size) == (5, 20)
    assert (datamodule.crop_padding, datamodule.horizontal_flip) == (2, True)
    assert (datamodule.num_classes, datamodule.in_channels, datamodule.image_size) == (10, 3, 32)


def test_impossible_size_is_refused(pickles):
    with pytest.raises(ConfigurationError, match="image_size must be at least 1"):
        CIFAR10(str(pickles), image_size=0)


def test_a_run_from_the_command_line(pickles):
    write_config(
        {
            "model.model": {"class_path": "ResNet8", "init_args": {"width": 4}},
            "data": {"class_path": "CIFAR10", "init_args": {"data_dir": str(pickles), "batch_size": 4}},
        }
    )
    cli = run("--trainer.max_epochs", 2)
    assert cli.model.record.samples == 2 * 5 * 2 * 4  # rounds, clients, local steps, batch size
    assert "test/accuracy" in cli.model.metrics


def test_second_start_reads_the_cache(folders):
    CIFAR10(str(folders)).load()
    (cache,) = Path("data/cache").glob("*.pt")
    written = cache.stat().st_mtime_ns
    time.sleep(0.01)
    CIFAR10(str(folders)).load()
    assert cache.stat().st_mtime_ns == written
