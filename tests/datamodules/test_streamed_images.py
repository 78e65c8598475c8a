"""Images that are read when a batch needs them: which ones, in what form, and as a function of what."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fl_lightning.datamodules.streamed_images as streamed
from fl_lightning import ConfigurationError, FederatedModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.datamodules import Dirichlet, FromFile, ImageNet, Shards, StreamedImages
from tests.support.helpers import SGD, distance, fit, small_cnn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def picture(rng, size=(16, 20)):
    return Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))


@pytest.fixture
def root(tmp_path):
    """Two classes of eight training images, of several sizes and modes, and three of ``val``; a ``test`` without labels."""
    rng = np.random.default_rng(0)
    for wnid in ("n02", "n01"):
        for split, count in (("train", 8), ("val", 3)):
            folder = tmp_path / split / wnid
            folder.mkdir(parents=True)
            for index in range(count):
                image = picture(rng, (16 + index, 20))
                image.save(folder / f"{wnid}_{index}.JPEG", "png")
        folder = tmp_path / "train" / wnid
        picture(rng).convert("L").save(folder / f"{wnid}_1.JPEG")
        picture(rng).convert("CMYK").save(folder / f"{wnid}_2.JPEG")
        deep = rng.integers(0, 65536, (16, 20), dtype=np.uint16)
        (folder / f"{wnid}_3.JPEG").unlink()
        Image.fromarray(deep).save(folder / f"{wnid}_3.png")
    (tmp_path / "test").mkdir()
    picture(rng).save(tmp_path / "test" / "0.JPEG")
    return tmp_path


def made(root, **settings):
    data = ImageNet(str(root), **{"image_size": 6, "num_clients": 3, "batch_size": 2, **settings})
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.fixture
def read(monkeypatch):
    """The files that were read."""
    paths = []

    def spy(path, original=streamed.read_image, **settings):
        paths.append(path)
        return original(path, **settings)

    monkeypatch.setattr(streamed, "read_image", spy)
    return paths


def test_only_the_images_of_a_batch_are_read(root, read):
    data = made(root)
    assert read == []
    data.cohort_batch([0, 2], [0, 0])
    assert len(read) == 2 * len(set(read)) == 8  # a client's first batch is read twice
    assert (
        sum(value.nbytes for value in vars(data.train_images.files).values() if hasattr(value, "nbytes"))
        < 1000
    )


def test_a_client_sees_its_own_images_once_an_epoch(root, read):
    data = made(root, num_clients=2, batch_size=4)
    files = data.train_images.files
    for client in range(2):
        data.cohort_batch([client], [0])  # a client's first batch is read twice
        read.clear()
        labels = torch.cat([data.cohort_batch([client], [step]).batches()[0][1] for step in (0, 1)])
        own = [files.path(int(index)) for index in data.clients[client].samples.indices]
        assert sorted(read) == sorted(own)
        assert sorted(labels.tolist()) == sorted(["n01", "n02"].index(path.parent.name) for path in own)
    assert data.class_names == ["n01", "n02"]


@pytest.mark.parametrize("partition", [None, Dirichlet(0.5), Shards(0.5)])
def test_partitions_are_by_label(root, partition):
    data = made(root, partition=partition, num_clients=2, batch_size=1)
    histograms = data.class_histograms()
    assert np.sum(histograms, 0).tolist() == [8, 8]
    assert data.partition_record()["sizes"] == [sum(own) for own in histograms]
    if isinstance(partition, Shards):
        assert sorted(histograms) == [[0, 8], [8, 0]]


def test_batches_are_functions_of_seed_client_and_step_whatever_the_threads(root):
    first, second, other = made(root), made(root, threads=1), made(root, seed=1)
    ahead = [first.cohort_batch([0, 1], [step, 0]).batches()[0] for step in (0, 1, 5)]
    for step, (images, labels) in zip((5, 1, 0), reversed(ahead), strict=True):
        torch.rand(1)
        again = second.cohort_batch([0], [step]).batches()[0]
        assert torch.equal(images, again[0])
        assert torch.equal(labels, again[1])
    assert not torch.equal(ahead[0][0], ahead[2][0])
    assert not torch.equal(ahead[0][0], other.cohort_batch([0], [0]).batches()[0][0])


def test_a_training_image_is_a_part_that_is_enlarged_and_may_be_mirrored(tmp_path):
    columns = np.broadcast_to(np.arange(0, 240, 8, dtype=np.uint8)[None, :, None], (30, 30, 3))
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(columns.copy()).save(tmp_path / split / "a" / "0.png")
    data = StreamedImages(str(tmp_path), 10, crop_scale=(0.25, 0.25), num_clients=1, batch_size=1)
    data.setup("fit")
    seen = [data.train_images.picture(data.cohort_batch([0], [i]).batches()[0][0][0]) for i in range(30)]
    slopes = torch.stack([image[5, :, 0].float().diff().mean() for image in seen])
    assert set(slopes.sign().tolist()) == {-1.0, 1.0}
    assert (slopes.abs() < 8 * 30 * 0.62 / 10).all(), "a whole image would rise by 24 a pixel"
    assert len({float(image[5, 0, 0]) for image in seen}) > 10


def test_evaluation_takes_the_centre_of_the_resized_image(root):
    data = made(root, image_size=14)
    (images, labels), *rest = data.test_dataloader()
    assert not rest
    assert labels.tolist() == [0] * 3 + [1] * 3
    with Image.open(root / "val" / "n01" / "n01_0.JPEG") as image:
        pixels = torch.from_numpy(np.array(image))[1:15, 3:17].permute(2, 0, 1).float() / 255
    expected = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(images[0], expected)
    held_out = made(root, val_fraction=0.25, num_clients=2)
    ((first, classes),) = held_out.val_dataloader()
    assert classes.bincount().tolist() == [2, 2]
    assert torch.equal(first, next(iter(held_out.val_dataloader()))[0]), "no augmentation"
    assert held_out.fit_split == "val"


def test_sequential_and_vectorized_training_agree(root):
    states = []
    for executor in (SequentialExecutor(), VectorizedExecutor()):
        module = FederatedModule(small_cnn(classes=2, channels=3), SGD, local_steps=2, executor=executor)
        fit(module, made(root), 1, precision="32-true")
        states.append(module.state_dict())
    assert distance(*states) < 1e-5


def test_the_fingerprint_knows_names_labels_and_pixels(root):
    first = made(root).fingerprint()
    assert made(root).fingerprint() == first
    assert made(root, seed=1).fingerprint()["partition"] != first["partition"]
    (root / "train" / "n01" / "n01_5.JPEG").rename(root / "train" / "n01" / "n01_50.JPEG")
    assert made(root).fingerprint()["training"] != first["training"]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_damaged_image_is_named_when_it_is_needed(root, threads):
    (root / "train" / "n02" / "n02_6.JPEG").write_bytes(b"no image")
    data = made(root, num_clients=1, batch_size=16, threads=threads)
    with pytest.raises(ConfigurationError, match=r"train/n02/n02_6.JPEG cannot be read as an image"):
        data.cohort_batch([0], [0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"crop_scale": (0.5, 2.0)},
            r"crop_scale must be two shares such as \[0.08, 1.0\], found \[0.5, 2.0\]",
        ),
        ({"threads": 0}, r"threads must be at least 1, found 0"),
        ({"image_size": 0}, r"image_size must be at least 1, found 0"),
    ],
)
def test_wrong_settings_are_one_line(root, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        made(root, **settings)


def test_a_client_smaller_than_a_batch_has_all_its_images_in_one_batch(root):
    data = made(root, batch_size=6)
    sizes = [data.num_examples(client) for client in range(3)]
    assert min(sizes) < 6
    assert data.cohort_batch(range(3), [0] * 3).sizes() == [min(size, 6) for size in sizes]
    assert [data.samples_per_step(client) for client in range(3)] == [min(size, 6) for size in sizes]
    assert "fewer samples than batch_size=6" in data.notes[-1]


@pytest.mark.parametrize(("split", "message"), [("train", "train/n01"), ("val", "val/")])
def test_what_holds_no_image_is_named(root, split, message):
    for path in (root / split).rglob("n01*.*" if split == "train" else "*.JPEG"):
        path.unlink()
    with pytest.raises(ConfigurationError, match=rf"holds no image in {message}; expected train/<class>"):
        made(root)


def test_a_link_that_leads_back_is_named_and_not_followed_for_ever(root):
    (root / "train" / "n02" / "back").symlink_to(root / "train" / "n02")
    with pytest.raises(ConfigurationError, match=r"a link to the folder .*n02 that contains it"):
        made(root)


def test_images_in_folders_of_a_class_folder_belong_to_the_class(root):
    before = made(root).train_images.files
    deeper = root / "train" / "n02" / "more"
    deeper.mkdir()
    picture(np.random.default_rng(1)).save(deeper / "x.png")
    images = made(root).train_images.files
    (found,) = {*map(images.path, range(len(images)))} - {*map(before.path, range(len(before)))}
    assert found == deeper / "x.png"
    assert images.labels[[*map(images.path, range(len(images)))].index(found)] == 1


def test_what_lies_in_files_does_not_depend_on_the_seed_or_on_what_is_made_of_it(root):
    def loaded(**settings):
        data = ImageNet(str(root), num_clients=1, batch_size=1, **settings)
        data.setup("validate")
        return data.loaded

    before = loaded(image_size=7)
    assert before == loaded(image_size=4, seed=1, horizontal_flip=False)
    picture(np.random.default_rng(1)).save(root / "val/n02/n02_2.JPEG")
    assert before != loaded(image_size=7)


def test_clients_may_have_evaluation_images_of_their_own(root):
    data = made(root, num_clients=2)
    content = data.distribution.as_file("images", {})
    train, test = range(16), range(16, 22)
    content |= {"space": "train+test", "examples": 22}
    content["labels_sha256"] = sha256(data.distribution.labels.numpy().tobytes()).hexdigest()
    content["clients"] = [{"train": [*train[::2]], "test": [*test[:2]]}, {"train": [*train[1::2]]}]
    Path("clients.json").write_text(json.dumps(content))
    again = made(root, partition=FromFile("clients.json"))
    (batch,) = again.own_dataloader(0, "test")
    expected = next(iter(data.test_dataloader()))
    assert all(torch.equal(own, part[:2]) for own, part in zip(batch, expected, strict=True))
    assert again.own_dataloader(1, "test") == []
