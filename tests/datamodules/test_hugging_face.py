"""Hugging Face's ``datasets`` on the disk: columns, groups, both layouts, and what is refused."""

import shlex
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import IID, HuggingFaceImages, Natural
from tests.support.command_line import main
from tests.support.pages import OURS, blocks


def test_without_the_package_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigurationError, match=r"needs the package datasets; pip install 'fl_lightning\[hf\]'"
    ):
        HuggingFaceImages(str(tmp_path), 8)


def pictures(split, count):
    rng = np.random.default_rng(len(split))
    return [Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(count)]


SIZES = {"train": 9, "test": 4}
LABELS = {"train": [0, 1, 2] * 3, "test": [2, 1, 0, 0]}
PATIENTS = {"train": [f"P{number // 3}" for number in range(9)], "test": ["Q", "Q", "R", "R"]}
WHO = {"train": [10, 9, 9, 10, 9, 2, 10, 2, 2], "test": [9, 2, 10, 9]}


@pytest.fixture
def library(monkeypatch):
    pytest.importorskip("datasets.arrow_dataset")  # the folder of these tests has its name, too
    found = sys.modules["datasets"]
    found.disable_progress_bars()
    monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("the network"))
    return found


def parts(library, **columns):
    kind = {
        "img": library.Image(),
        "label": library.ClassLabel(names=["ant", "bee", "cow"]),
        "who": library.Value("int64"),
        "word": library.Value("string"),
        "gap": library.Value("float64"),
        "hole": library.Value("string"),
        "pair": library.List(library.Value("int64")),
        "patient": library.Value("string"),
    }
    return library.DatasetDict(
        {
            split: library.Dataset.from_dict(
                {
                    "img": columns.get("img", pictures)(split, size),
                    "label": LABELS[split],
                    "who": WHO[split],
                    "word": ["xyz"[label] for label in LABELS[split]],
                    "gap": [label or float("nan") for label in LABELS[split]],
                    "hole": ["yz"[label - 1] if label else None for label in LABELS[split]],
                    "pair": [[label] for label in LABELS[split]],
                    "patient": PATIENTS[split],
                },
                features=library.Features(kind),
            )
            for split, size in SIZES.items()
        }
    )


def write(library, root, layout="save_to_disk", **columns):
    found = parts(library, **columns)
    if layout == "save_to_disk":
        found.save_to_disk(str(root))
    for split, part in found.items() if layout == "parquet" else ():
        (root / "data").mkdir(parents=True, exist_ok=True)
        for shard in range(2):
            path = root / "data" / f"{split}-0000{shard}-of-00002.parquet"
            part.shard(2, shard, contiguous=True).to_parquet(str(path))
    return str(root)


@pytest.mark.parametrize("layout", ["save_to_disk", "parquet"])
def test_both_layouts_give_images_labels_and_a_client_for_each_group(library, layout, tmp_path):
    root = write(library, tmp_path / "set", layout)
    data = HuggingFaceImages(root, 8, group_column="who", partition=Natural(), batch_size=2)
    data.prepare_data()
    data.setup("fit")
    assert (data.num_classes, data.class_names) == (3, ["ant", "bee", "cow"])
    assert data.partition_record()["clients"] == ["2", "9", "10"]
    expected = torch.stack([torch.from_numpy(np.array(image)) for image in pictures("train", 9)])
    for client, who in enumerate((2, 9, 10)):
        mine = data.clients[client].indices
        assert mine.tolist() == [index for index in range(9) if WHO["train"][index] == who]
        assert torch.equal(data.samples.inputs[mine], expected[mine])
        own = torch.cat([labels for _, labels in data.own_dataloader(client, "test")])
        assert own.tolist() == [
            label for label, x in zip(LABELS["test"], WHO["test"], strict=True) if x == who
        ]
    assert data.samples.labels.tolist() == LABELS["train"] + LABELS["test"]


def test_later_runs_read_the_cache(library, tmp_path, monkeypatch):
    root = write(library, tmp_path / "set")
    first = HuggingFaceImages(root, 8).load()
    monkeypatch.setattr(
        "fl_lightning.datamodules.hugging_face.decode", lambda *a, **k: pytest.fail("read again")
    )
    assert torch.equal(HuggingFaceImages(root, 8).load().train_images, first.train_images)


def test_a_label_of_another_kind_is_numbered_in_its_order(library, tmp_path):
    data = HuggingFaceImages(write(library, tmp_path / "set"), 4, label_column="word")
    assert data.class_names == ["x", "y", "z"]
    assert data.load().test_labels.tolist() == LABELS["test"]
    assert data.load().train_images.shape == (9, 3, 4, 4)
    assert HuggingFaceImages(str(tmp_path / "set"), 4, label_column="who").class_names == ["2", "9", "10"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"image_column": "image"},
            r"image_column: 'image' is no column, .* set one of img, label, who, word, gap, hole, pair",
        ),
        ({"group_column": "writer"}, r"group_column: 'writer' is no column"),
        ({"label_column": "gap"}, r"the column 'gap' of .*set has the value nan, which is no valid value"),
        ({"label_column": "hole"}, r"the column 'hole' of .*set has the value None, which is no valid value"),
        (
            {"group_column": "pair"},
            r"the column 'pair' of .*set has the value \[0\], which is no valid value",
        ),
        (
            {"image_column": "word"},
            r"image 0 of train in .* cannot be read|image_column: 'word' holds no images",
        ),
        ({"test_split": "validation"}, r"data_dir=.* holds no validation; expected what DatasetDict"),
        ({"data_dir": "nowhere"}, r"data_dir=nowhere does not exist; expected what"),
    ],
)
def test_wrong_settings_are_one_line(library, tmp_path, settings, message):
    root = write(library, tmp_path / "set")
    with pytest.raises(ConfigurationError, match=message) as refused:
        HuggingFaceImages(**{"data_dir": root, "image_size": 8, **settings}).load()
    assert "\n" not in str(refused.value)


def test_a_damaged_image_and_a_damaged_file_are_named(library, tmp_path):
    def damaged(split, count):
        return [*pictures(split, count - 1), {"bytes": b"no image", "path": None}]

    root = write(library, tmp_path / "set", img=damaged)
    with pytest.raises(ConfigurationError, match=r"image 8 of train in .*set cannot be read as an image"):
        HuggingFaceImages(root, 8).load()
    root = write(library, tmp_path / "other", "parquet")
    for path in (tmp_path / "other" / "data").glob("test*"):
        path.write_bytes(b"no parquet")
    with pytest.raises(ConfigurationError, match=r"test of .*other cannot be read \(ArrowInvalid"):
        HuggingFaceImages(root, 8)


def test_the_command_of_the_page_on_own_data_runs(library, tmp_path):
    (line,) = [
        line
        for block in blocks("docs/own-data.md", "text")
        for line in block.splitlines()
        if line.startswith(OURS)
    ]
    write(library, tmp_path / "data" / "hf-cifar10")
    smaller = ["--data.image_size", "8", "--data.num_clients", "2", "--data.batch_size", "2"]
    cli = main([*shlex.split(line.removeprefix(OURS)), *smaller, "--trainer.max_epochs", "1"])
    assert cli.trainer.global_step == 1


@pytest.mark.parametrize("layout", ["save_to_disk", "parquet"])
def test_images_are_upright_and_deep_images_keep_their_contrast(library, layout, tmp_path):
    scene = np.arange(64).reshape(8, 8)
    exif = Image.Exif()
    exif[0x0112] = 6

    def stored(split, count):
        level = 900 if split == "train" else 9000
        deep = [Image.fromarray((scene * 2 + level).astype(np.uint16)) for _ in range(count - 1)]
        path = tmp_path / f"{split}.png"
        Image.fromarray(np.rot90(scene).astype(np.uint8)).save(path, exif=exif)
        return [str(path), *deep]

    data = HuggingFaceImages(
        write(library, tmp_path / "set", layout, img=stored), 8, num_clients=1, batch_size=2
    )
    data.setup("fit")
    assert data.samples.inputs[0, :, :, 0].tolist() == scene.tolist()
    assert data.samples.inputs[1, :, :, 0].tolist() == np.rint(scene / 63 * 255).tolist()
    assert list(data.pixel_range) == [900, 1026]
    again = HuggingFaceImages(str(tmp_path / "set"), 8, num_clients=1, batch_size=2)
    again.setup("fit")
    assert list(again.pixel_range) == [900, 1026]  # from the cache


def test_images_of_a_subject_stay_together(library, tmp_path):
    write(library, tmp_path)
    settings = {"partition": IID(), "num_clients": 3, "batch_size": 2, "subject_column": "patient"}
    data = HuggingFaceImages(str(tmp_path), 8, **settings)
    data.setup("fit")
    owned = [{PATIENTS["train"][x] for x in part.tolist()} for part in data.distribution.clients]
    assert sorted(map(sorted, owned)) == [["P0"], ["P1"], ["P2"]]
    assert "13 samples of 5 subjects (data.subject_column patient)" in data.notes
    shared = HuggingFaceImages(str(tmp_path), 8, **settings | {"subject_column": "word"})
    with pytest.raises(ConfigurationError, match=r"data.subject_column word: subject x is in"):
        shared.setup("fit")
