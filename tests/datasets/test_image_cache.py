"""The cache of decoded images: whom it serves, and when it is built anew."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from colour_folders import cache_file, load, save

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import ImageFolder
from fl_lightning.datamodules import image_files as cache_module


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


@pytest.mark.parametrize("change", ["added", "removed", "rewritten", "touched", "renamed"])
def test_a_changed_tree_is_decoded_again(tree, decoded, change):
    load(tree)
    file = tree / "train" / "ant" / "0.png"
    if change == "added":
        save(file.with_name("new.png"), np.zeros((8, 8, 3)))
    elif change == "removed":
        file.unlink()
    elif change == "rewritten":
        save(file, np.random.default_rng(0).integers(0, 255, (8, 8, 3)))
    elif change == "touched":
        os.utime(file, (1, 1))
    else:
        file.rename(file.with_name("00.png"))
    decoded.clear()
    found = load(tree)
    assert len(decoded) == 18 + (change == "added") - (change == "removed")
    cache_file().unlink()
    assert torch.equal(found.train_images, load(tree).train_images)


@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "empty", "other object", "text"])
def test_a_damaged_cache_is_rebuilt_not_trusted(tree, decoded, damage):
    expected = load(tree)
    cache = cache_file()
    content = cache.read_bytes()
    if damage == "truncated":
        cache.write_bytes(content[: len(content) // 2])
    elif damage == "flipped bit":
        pixels = content.index(expected.train_images.numpy().tobytes())
        cache.write_bytes(content[:pixels] + bytes([content[pixels] ^ 1]) + content[pixels + 1 :])
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


def test_a_cache_with_any_damage_is_rebuilt(tree):
    before = load(tree)
    path = cache_file()
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    for _ in range(150):
        content = bytearray(whole)
        for place in draw.integers(len(whole), size=4):
            content[place] = draw.integers(256)
        # what names the parts of the archive is short: it would seldom be hit
        content[len(whole) - int(draw.integers(1, 400))] = draw.integers(256)
        path.write_bytes(content)
        after = load(tree)
        assert torch.equal(after.train_images, before.train_images)
        assert torch.equal(after.test_images, before.test_images)


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
    def killed(path, size):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "decode", killed)
        with pytest.raises(KeyboardInterrupt):
            load(tree)
    assert not list(Path("data/cache").glob("*.pt"))
    assert len(load(tree).train_labels) == 12


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(tree):
    Path("occupied").write_text("a file")
    for folder in ("occupied", "occupied/cache"):
        with pytest.raises(
            ConfigurationError, match=r"occupied.* cannot be written: .*; free space or choose"
        ):
            load(tree, cache_dir=folder)


def test_failed_build_leaves_no_folder(tree):
    before = sorted(Path.cwd().iterdir())
    (tree / "train" / "ant" / "2.png").write_bytes(b"no image")
    with pytest.raises(ConfigurationError):
        load(tree)
    assert sorted(Path.cwd().iterdir()) == before


def test_a_folder_that_cannot_be_locked_is_read_all_the_same(tree, monkeypatch):
    def refuse(*_):
        raise OSError(9, "Bad file descriptor")  # what some network file systems say of a folder

    monkeypatch.setattr("fl_lightning.files.fcntl.flock", refuse)
    assert load(tree).train_labels.tolist() == [0] * 6 + [1] * 6
