"""The cache of decoded images: whom it serves, and when it is built anew."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import ImageFolder, image_cache, image_files
from tests.support.colour_folders import cache_file, load, save


def test_the_second_start_reads_the_cache(tree, decoded):
    first = load(tree)
    assert len(decoded) == 18
    second = load(tree)
    assert len(decoded) == 18
    assert torch.equal(first.train_images, second.train_images)
    assert torch.equal(first.test_images, second.test_images)
    assert cache_file().parent == Path("data/cache")


def test_cache_dir_says_where_the_cache_lies(tree, tmp_path):
    load(tree, cache_dir=str(tmp_path / "elsewhere"))
    assert len(list((tmp_path / "elsewhere").glob("tree-8px-*.pt"))) == 1
    assert not Path("data").exists()


@pytest.mark.parametrize("change", ["added", "removed", "rewritten", "longer", "touched", "renamed"])
def test_a_changed_tree_is_decoded_again(tree, decoded, change):
    load(tree)
    file = tree / "train" / "ant" / "0.png"
    if change == "added":
        save(file.with_name("new.png"), np.zeros((8, 8, 3)))
    elif change == "removed":
        file.unlink()
    elif change == "rewritten":
        save(file, np.random.default_rng(0).integers(0, 255, (8, 8, 3)))
    elif change == "longer":
        changed = file.stat().st_mtime_ns
        file.write_bytes(file.read_bytes() + b"\0")
        os.utime(file, ns=(changed, changed))
    elif change == "touched":
        os.utime(file, (1, 1))
    else:
        file.rename(file.with_name("00.png"))
    decoded.clear()
    found = load(tree)
    assert len(decoded) == 18 + (change == "added") - (change == "removed")
    cache_file().unlink()
    assert torch.equal(found.train_images, load(tree).train_images)


def test_an_image_that_is_truncated_after_the_cache_was_built_is_named(tree):
    load(tree)
    file = tree / "train" / "ant" / "0.png"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(ConfigurationError, match=r"train/ant/0\.png cannot be read as an image"):
        load(tree)


@pytest.mark.parametrize("damage", ["truncated", "without its end", "empty", "other object", "text"])
def test_a_damaged_cache_is_rebuilt_not_trusted(tree, decoded, damage):
    expected = load(tree)
    cache = cache_file()
    content = cache.read_bytes()
    if damage == "truncated":
        cache.write_bytes(content[: len(content) // 2])
    elif damage == "without its end":
        cache.write_bytes(content[:-1])
    elif damage == "empty":
        cache.write_bytes(b"")
    elif damage == "other object":
        torch.save([1, 2], cache)
    else:
        cache.write_text("not a cache")
    decoded.clear()
    found = load(tree)
    assert len(decoded) == 18
    assert torch.equal(found.train_images, expected.train_images)
    load(tree)
    assert len(decoded) == 18


def test_each_size_has_a_cache_of_its_own(tree, decoded):
    load(tree)
    ImageFolder(str(tree), 4).load()
    load(tree)
    assert len(decoded) == 36


def test_starts_at_the_same_time_decode_once(tree, decoded):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(load, [tree, tree])
    assert len(decoded) == 18
    assert torch.equal(first.train_images, second.train_images)
    assert list(Path("data/cache").iterdir()) == [cache_file()]


def test_a_killed_build_leaves_no_cache(tree, monkeypatch):
    def killed(path, size, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(image_files, "decode", killed)
        with pytest.raises(KeyboardInterrupt):
            load(tree)
    assert not list(Path("data/cache").glob("*.pt"))
    assert len(load(tree).train_labels) == 12


def test_an_interrupted_write_leaves_no_part_of_a_cache(tree, decoded, monkeypatch):
    def interrupted(content, file):
        file.write(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(image_cache.torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(tree)
    assert not list(Path().glob("data/**/*cache*/*"))
    load(tree)
    load(tree)
    assert len(decoded) == 2 * 18


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(tree):
    Path("occupied").write_text("a file")
    for folder in ("occupied", "occupied/cache"):
        with pytest.raises(
            ConfigurationError, match=r"occupied.* cannot be written: .*; free space or choose"
        ):
            load(tree, cache_dir=folder)


def test_a_folder_that_cannot_be_locked_is_read_all_the_same(tree, monkeypatch):
    def refuse(*_):
        raise OSError(9, "Bad file descriptor")  # what some network file systems say of a folder

    monkeypatch.setattr("fl_lightning.files.fcntl.flock", refuse)
    assert load(tree).train_labels.tolist() == [0] * 6 + [1] * 6
