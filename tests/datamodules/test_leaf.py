"""FEMNIST as LEAF writes it: writers, labels, duplicates, the cache and own test data."""

import json

import numpy as np
import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import FEMNIST
from tests.support.layouts import leaf_writer


@pytest.fixture
def root(tmp_path):
    """Five writers in two files, in no order; the second image of f0 is entered twice."""
    rng = np.random.default_rng(0)
    sizes = {"f3": 6, "f0": 5, "f1": 4, "f4": 9, "f2": 7}
    root = tmp_path / "femnist"
    for split, factor in (("train", 1), ("test", 0.5)):
        (root / split).mkdir(parents=True)
        for number, names in enumerate((("f3", "f0"), ("f1", "f4", "f2"))):
            users = {name: leaf_writer(rng, int(sizes[name] * factor), [number, 10, 61]) for name in names}
            if split == "train" and "f0" in users:
                for part in users["f0"].values():
                    part.append(part[1])
            text = json.dumps({"users": list(users), "num_samples": [0] * len(users), "user_data": users})
            (root / split / f"all_data_{number}_niid_0_keep_0_{split}_9.json").write_text(text)
    return root


def made(root, **settings):
    data = FEMNIST(str(root), cache_dir=str(root / "cache"), **{"batch_size": 2, **settings})
    data.prepare_data()
    data.setup("fit")
    return data


def content(root, split, name):
    for path in (root / split).glob("*.json"):
        users = json.loads(path.read_text())["user_data"]
        if name in users:
            return np.array(users[name]["x"]), users[name]["y"]
    raise KeyError(name)


def test_each_writer_is_a_client_with_its_images_and_own_test_data(root):
    data = made(root)
    assert [data.num_examples(client) for client in range(5)] == [5, 4, 7, 6, 9]
    assert data.describe_partition() == "Natural(), 5 clients"
    for client, name in enumerate(("f0", "f1", "f2", "f3", "f4")):
        x, y = content(root, "train", name)
        mine = data.clients[client].indices
        pixels = torch.from_numpy((x * 255).round()).to(torch.uint8).view(-1, 28, 28, 1)
        kept = [i for i in range(len(y)) if not (name == "f0" and i == 5)]
        assert torch.equal(data.samples.inputs[mine], pixels[kept])
        assert data.samples.labels[mine].tolist() == [y[i] for i in kept]
        x, y = content(root, "test", name)
        own = [*data.own_dataloader(client, "test")]
        assert torch.cat([labels for _, labels in own]).tolist() == y
        assert data.own_dataloader(client, "val") is None


def test_later_runs_read_the_cache_and_none_that_is_damaged(root, monkeypatch):
    first = made(root).fingerprint()
    (cache,) = (root / "cache").iterdir()
    monkeypatch.setattr("fl_lightning.datamodules.leaf._writers", lambda path: pytest.fail("read again"))
    assert made(root).fingerprint() == first
    monkeypatch.undo()
    content = cache.read_bytes()
    cache.write_bytes(content[: len(content) // 2])
    assert made(root).fingerprint() == first


def test_small_writers_can_be_left_out_and_other_partitions_taken(root):
    from fl_lightning.datamodules import IID

    data = made(root, min_examples=6)
    assert [data.num_examples(client) for client in range(data.num_clients)] == [7, 6, 9]
    assert len(data.distribution.test) == 3 + 3 + 4
    assert len(next(iter(data.own_dataloader(0, "test")))[1]) == 3
    data = made(root, partition=IID(), num_clients=4)
    assert data.num_clients == 4
    assert data.own_dataloader(0, "test") is None
    with pytest.raises(ConfigurationError, match="min_examples=10 leaves no writer; use at most 9,"):
        made(root, min_examples=10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda user: user["x"].pop(), r"\(3, 784\) for 4 labels"),
        (lambda user: user["x"][0].pop(), "ValueError"),
        (lambda user: user["x"][0].__setitem__(0, 255.0), r"expected 784 values in \[0, 1\]"),
        (lambda user: user.clear(), "KeyError"),
        (lambda user: user["y"].__setitem__(0, 3.7), "user f1 has labels that are no whole numbers"),
        (lambda user: user["y"].__setitem__(0, float("nan")), "user f1 has labels that are no whole numbers"),
        (lambda user: user["y"].__setitem__(0, None), "user f1 has labels that are no whole numbers"),
    ],
)
def test_a_file_with_other_contents_is_named(root, change, message):
    path = next((root / "train").glob("all_data_1*"))
    data = json.loads(path.read_text())
    change(data["user_data"]["f1"])
    path.write_text(json.dumps(data))
    with pytest.raises(
        ConfigurationError, match=rf"all_data_1_niid_0_keep_0_train_9.json cannot be read .*{message}"
    ):
        made(root)


def test_a_label_beyond_the_62_classes_is_refused(root):
    path = next((root / "train").glob("all_data_1*"))
    data = json.loads(path.read_text())
    data["user_data"]["f1"]["y"][0] = 62
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigurationError, match=r"train_labels of FEMNIST are 0 to 62, but its classes are"):
        made(root)


def test_a_missing_folder_or_half_of_the_layout_is_one_line(root, tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"data_dir=.*nowhere does not exist; expected LEAF's layout"
    ):
        FEMNIST(str(tmp_path / "nowhere"))
    for path in (root / "test").iterdir():
        path.unlink()
    with pytest.raises(ConfigurationError, match=r"holds no test/\*\.json"):
        FEMNIST(str(root))
