"""Clients from a file: those of a saved run bit for bit, own evaluation data, and one line for what cannot be."""

import hashlib
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import (
    IID,
    Dirichlet,
    FromFile,
    GammaSimilarity,
    ImageData,
    InMemoryDataModule,
    Natural,
    Shards,
)
from tests.support.pages import blocks

TRAIN, TEST = 60, 20
LABELS = torch.arange(TRAIN + TEST) % 4


class Numbered(InMemoryDataModule):
    """60 training and 20 test images whose first pixel is the sample's number; five groups."""

    num_classes = 4

    def load(self):
        images = torch.randint(100, 256, (TRAIN + TEST, 1, 4, 4), generator=torch.Generator().manual_seed(0))
        images[:, 0, 0, 0] = torch.arange(TRAIN + TEST)
        images = images.to(torch.uint8)
        groups = torch.arange(TRAIN + TEST) // 2 % 5
        return ImageData(
            images[:TRAIN], LABELS[:TRAIN], images[TRAIN:], LABELS[TRAIN:], groups[:TRAIN], groups[TRAIN:]
        )


def made(partition, **settings):
    data = Numbered(**{"num_clients": 3, "batch_size": 2, "partition": partition, **settings})
    data.setup("fit")
    return data


def numbers(data, loader):
    """The samples that a loader yields."""
    normalize = data.samples.normalize
    pixels = torch.cat([x for x, _ in loader]) * normalize.std + normalize.mean
    return pixels[:, 0, 0, 0].mul(255).round().long().tolist()


def trained(data):
    """The samples that each client trains on."""
    found = []
    for client in data.clients:
        batches = [client.train_batch(step) for step in range(20 * client.steps_per_epoch)]
        found.append(sorted({*numbers(data, batches)}))
    return found


def content(clients, space="train", **changes):
    labels = LABELS[: TRAIN if space == "train" else TRAIN + TEST]
    return {
        "format": "fl_lightning.partition/1",
        "dataset": "numbered",
        "space": space,
        "examples": len(labels),
        "labels_sha256": hashlib.sha256(labels.numpy().tobytes()).hexdigest(),
        "clients": clients,
        **changes,
    }


def from_file(*arguments, **changes):
    Path("clients.json").write_text(json.dumps(content(*arguments, **changes)))
    return FromFile("clients.json")


@pytest.mark.parametrize("settings", [{}, {"val_fraction": 0.2}, {"val_fraction": 0.25, "max_examples": 40}])
@pytest.mark.parametrize(
    "partition",
    [IID(), Dirichlet(0.5), Shards(0.5), Shards(0.5, tail=2), GammaSimilarity(0.3), Natural()],
    ids=str,
)
def test_a_saved_partition_gives_the_same_clients_batches_and_evaluation_data(partition, settings):
    data = made(partition, seed=3, **settings)
    saved = data.distribution.as_file("numbered", {"program": "this"})
    assert saved["overlap"] == bool(getattr(partition, "tail", 0))
    Path("clients.json").write_text(json.dumps(saved))
    again = made(FromFile("clients.json"), seed=3, num_clients=99, **settings)
    assert again.num_clients == data.num_clients
    assert again.partition_record()["sha256"] == data.partition_record()["sha256"]
    assert again.class_histograms() == data.class_histograms()
    assert again.fingerprint() == data.fingerprint()
    everyone = range(data.num_clients)
    for step in range(3):
        batches = [one.cohort_batch(everyone, [step] * len(everyone)).stack() for one in (data, again)]
        assert all(map(torch.equal, *batches))
    assert numbers(again, again.val_dataloader()) == numbers(data, data.val_dataloader())
    for client in everyone:
        loaders = [one.own_dataloader(client, "test") for one in (data, again)]
        own = [loader and numbers(data, loader) for loader in loaders]
        assert own[0] == own[1]
        assert (own[0] is None) == (not isinstance(partition, Natural))


def test_a_clients_val_and_test_samples_are_its_own_evaluation_data():
    clients = [
        {"train": [7, 3, 5], "val": [1], "test": [9, 8]},
        {"id": "b", "train": [0, 2, 59], "test": []},
    ]
    data = made(from_file(clients), eval_batch_size=1)
    assert trained(data) == [[3, 5, 7], [0, 2, 59]]
    assert numbers(data, data.own_dataloader(0, "val")) == [1]
    assert numbers(data, data.own_dataloader(0, "test")) == [8, 9]
    assert data.own_dataloader(1, "test") == []
    assert data.own_dataloader(1, "val") == []
    assert numbers(data, data.test_dataloader()) == list(range(TRAIN, TRAIN + TEST))
    digest = hashlib.sha256(np.array([3, 5, 7], dtype="<i8").tobytes()).hexdigest()
    assert data.partition_record()["sha256"]["clients"][0] == digest


def test_the_servers_validation_data_are_samples_that_no_client_has():
    clients = [{"train": list(range(30)), "test": [30, 31]}, {"train": list(range(32, 48))}]
    data = made(from_file(clients), val_fraction=0.1)
    val = numbers(data, data.val_dataloader())
    assert len(val) == 6
    assert set(val) <= set(range(48, 60))
    with pytest.raises(
        ConfigurationError, match=r"val_fraction=0.5 takes 30 .* leaves 12 that .* at most 0.2$"
    ):
        made(from_file(clients), val_fraction=0.5)
    with pytest.raises(ConfigurationError, match=r"^max_examples=20 leaves out the sample \d+ of FromFile"):
        made(from_file(clients), max_examples=20)


def test_clients_may_share_out_the_test_samples_too():
    rest = [*range(6, 60), *range(66, 80)]
    clients = [
        {"train": [0, 61, 1], "test": [2, 62]},
        {"train": [3, 63], "val": [65], "test": [64]},
        {"train": rest},
    ]
    data = made(from_file(clients, "train+test"), val_fraction=0.03)
    # the clients' test samples, and test sample 60, which nobody has
    assert numbers(data, data.test_dataloader()) == [2, 60, 62, 64]
    assert set(numbers(data, data.val_dataloader())) == {4, 5}
    assert numbers(data, data.own_dataloader(0, "test")) == [2, 62]
    assert numbers(data, data.own_dataloader(1, "val")) == [65]
    assert trained(data) == [[0, 1, 61], [3, 63], rest]
    assert data.distribution.as_file("numbered", {})["clients"][1] == {
        "id": "1",
        "train": [3, 63],
        "val": [65],
        "test": [64],
    }
    everything = [{"train": list(range(80))}]
    with pytest.raises(ConfigurationError, match="gives all test samples to training"):
        made(from_file(everything, "train+test"))


def test_clients_share_samples_only_where_the_file_says_so():
    clients = [{"train": [1, 2, 3]}, {"id": "b", "train": [3, 4]}]
    with pytest.raises(ConfigurationError, match=r"clients 0 and b both have the sample 3; .*overlap"):
        made(from_file(clients))
    assert made(from_file(clients, overlap=True)).num_clients == 2
    with pytest.raises(ConfigurationError, match="client b has the sample 4 twice; list it once"):
        made(from_file([clients[0], {"id": "b", "train": [3, 4], "test": [4]}], overlap=True))


def test_no_sample_of_a_client_that_never_trains_scales_the_inputs():
    parts = [{"id": str(i), "train": [*range(i, 40, 4)], "val": [40 + i, 44 + i]} for i in range(4)]
    data = made(from_file(parts), held_out=1)
    client = int(data.distribution.clients[-1][0])
    assert {*range(client, 40, 4), 40 + client, 44 + client}.isdisjoint(data.trained().tolist())
    assert len(data.trained()) == TRAIN - 12
    images = data.load().train_images[data.trained()] / 255
    assert float(data.samples.normalize.mean) == pytest.approx(float(images.mean()), abs=1e-6)


LABELS_OF = {True: np.arange(TRAIN) % 4, False: np.arange(TEST) % 4}
"""The labels of a data set's training and test part in the programs that a partition comes from."""


def exported(script):
    """The data set with the partition that a script of the page writes."""
    exec(script, {})  # noqa: S102  # our own page
    return made(FromFile("clients.json"))


def test_a_partition_of_fl_bench_is_exported_as_the_page_says(monkeypatch):
    datasets = SimpleNamespace(CIFAR10=lambda root, train: SimpleNamespace(targets=[*LABELS_OF[train]]))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(datasets=datasets))
    order = np.random.default_rng(0).permutation(TRAIN + TEST).astype(np.int32)
    parts = [
        {"train": order[:30], "val": order[:0], "test": order[30:40]},
        {"train": [int(x) for x in order[40:70]], "val": [], "test": [int(x) for x in order[70:]]},
    ]
    separation = {"train": [0, 1], "val": [0, 1], "test": [0, 1], "total": 2}
    folder = Path("data/cifar10")
    folder.mkdir(parents=True)
    (folder / "partition.pkl").write_bytes(pickle.dumps({"separation": separation, "data_indices": parts}))
    (folder / "args.json").write_text(json.dumps({"alpha": 0.1, "client_num": 2}))
    data = exported(blocks("docs/data.md", "python")[0])
    assert trained(data) == [sorted(own["train"]) for own in parts]
    for client, own in enumerate(parts):
        assert numbers(data, data.own_dataloader(client, "test")) == sorted(own["test"])
    assert numbers(data, data.test_dataloader()) == sorted([*parts[0]["test"], *parts[1]["test"]])
    origin = json.loads(Path("clients.json").read_text())["origin"]
    assert origin["settings"] == {"alpha": 0.1, "client_num": 2}


def test_a_partition_of_fedwsq_is_exported_as_the_page_says(monkeypatch):
    datasets = SimpleNamespace(CIFAR10=lambda root, train: SimpleNamespace(targets=[*LABELS_OF[train]]))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(datasets=datasets))
    order = np.random.default_rng(0).permutation(TRAIN).tolist()
    parts = {1: order[:30], 0: order[30:45], 2: order[45:]}
    folder = Path("client_data/CIFAR10/balanced")
    folder.mkdir(parents=True)
    (folder / "dirichlet0.3_clients100.txt").write_text(f"{parts}\n")
    data = exported(blocks("docs/data.md", "python")[2])
    assert trained(data) == [sorted(parts[client]) for client in range(3)]


def test_a_partition_of_flwr_datasets_is_exported_as_the_page_says(monkeypatch):
    hugging_face = pytest.importorskip("datasets")
    flwr = pytest.importorskip("flwr_datasets")
    both = {
        name: hugging_face.Dataset.from_dict({"img": list(range(len(labels))), "label": labels.tolist()})
        for name, labels in (("train", LABELS_OF[True]), ("test", LABELS_OF[False]))
    }
    monkeypatch.setattr(hugging_face, "load_dataset", lambda *_, **__: hugging_face.DatasetDict(both))
    script = blocks("docs/data.md", "python")[1]
    data = exported(script.replace("num_partitions=10", "num_partitions=2").replace("alpha=0.3", "alpha=9.0"))
    partitioner = flwr.partitioner.DirichletPartitioner(num_partitions=2, partition_by="label", alpha=9.0)
    federated = flwr.FederatedDataset(dataset="uoft-cs/cifar10", partitioners={"train": partitioner})
    assert trained(data) == [sorted(federated.load_partition(client)["img"]) for client in range(2)]


ONE = [{"train": [0, 1]}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (content(ONE, format="other/1"), "the format is 'other/1'; it must be 'fl_lightning.partition/1'"),
        ([1], "the format is None"),
        ("[" * 100_000, r"cannot be read as JSON \(RecursionError"),
        ("{", r"cannot be read as JSON \(JSONDecodeError"),
        (content(ONE, space="test"), "space: 'test' must be one of train, train[+]test"),
        (
            content(ONE, examples=50_000),
            r"examples is 50000 \(data set numbered\), but here it is 60",
        ),
        (content(ONE, labels_sha256="0a"), r"labels_sha256 is 0a \(.*\), but here it is [0-9a-f]{64}; use"),
        (content([]), "clients must be a list"),
        (content({"0": [1]}), "clients must be a list"),
        (content([*ONE, [1, 2]]), "clients must be a list"),
        (content([*ONE, {"id": "x", "train": []}]), "client x has no training sample"),
        (content([{"train": [0, 60]}]), "client 0, train has the sample 60; samples are 0 to 59"),
        (content([{"train": [0], "val": [-1]}]), "client 0, val has the sample -1"),
        (content([{"train": [0.5]}]), "client 0, train is no list of whole numbers"),
        (content([{"train": [[1, 2]]}]), "client 0, train is no list"),
        (content([{"train": [[1, 2], [3]]}]), "client 0, train is no list"),
        (content([{"train": [10**30]}]), "client 0, train has the sample 10+;"),
        (content([{"train": 5}]), "client 0, train is no list"),
        (content([{"train": [0], "validation": [1]}]), "a client has the key 'validation'; use id"),
        (content([{"train": [0], "id": "1"}, {"train": [1]}]), "2 clients have the id '1'"),
        (
            content([{"train": [0, 1]}, {"train": [0], "test": [1]}], overlap=True),
            "client 1 evaluates on the sample 1, which a client trains on",
        ),
    ],
)
def test_a_file_that_cannot_be_is_one_line(given, message):
    Path("clients.json").write_text(given if isinstance(given, str) else json.dumps(given))
    with pytest.raises(ConfigurationError, match=rf"^partition.path: clients.json.*{message}") as caught:
        made(FromFile("clients.json"))
    assert "\n" not in str(caught.value)


def test_no_pickle_is_opened_and_a_missing_file_is_named():
    Path("partition.pkl").write_bytes(pickle.dumps({"data_indices": []}))
    with pytest.raises(ConfigurationError, match=r"partition.pkl: cannot be read as JSON .*; write it anew"):
        made(FromFile("partition.pkl"))
    with pytest.raises(ConfigurationError, match=r"nowhere.json is no file; .* --save FILE.json"):
        FromFile("nowhere.json")
