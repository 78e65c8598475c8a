"""A run never goes on with other data unnoticed: pixels, labels, one sample less, another partition."""

import json
import os
import shutil
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fl_lightning import ConfigurationError, FederatedDataModule, FederatedModule
from fl_lightning.client_data import fingerprint
from fl_lightning.client_data.fingerprint import files_digest
from fl_lightning.datamodules import InMemoryDataModule
from fl_lightning.datamodules.images import ImageData
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from tests.support.command_line import attempts, message_of, run
from tests.support.helpers import SGD, ArrayClient, SaveRounds, blobs, federated_run, fit, small_cnn


class Images(InMemoryDataModule):
    num_classes, in_channels, image_size = 3, 2, 6

    def __init__(self, change=lambda *tensors: tensors, **settings):
        super().__init__(num_clients=3, batch_size=5, **settings)
        self.change = change

    def load(self):
        draws = torch.Generator().manual_seed(0)
        train = torch.randint(256, (60, 2, 6, 6), generator=draws, dtype=torch.uint8)
        test = torch.randint(256, (20, 2, 6, 6), generator=draws, dtype=torch.uint8)
        labels = torch.arange(60) % 3
        return ImageData(*self.change(train, labels, test, torch.arange(20) % 3))


def pixel(train, labels, test, test_labels):
    train[7, 1, 3, 3] ^= 1
    return train, labels, test, test_labels


def swapped(train, labels, test, test_labels):
    labels[[4, 5]] = labels[[5, 4]]
    return train, labels, test, test_labels


def less(train, labels, test, test_labels):
    return train[:-1], labels[:-1], test, test_labels


def other_test(train, labels, test, test_labels):
    return train, labels, test.flip(0), test_labels


def checkpoint_on(data):
    """A checkpoint of round 1 of a run of 2 on some data."""
    fit(FederatedModule(small_cnn(), SGD, local_steps=1), data, 2, [SaveRounds(Path())])
    return "1.ckpt"


def resume(data, accept=False):
    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    module.accept_data = accept
    fit(module, data, 2, ckpt_path="1.ckpt")
    return module


@pytest.mark.parametrize(
    ("change", "settings", "parts"),
    [
        (pixel, {}, "training"),
        (swapped, {}, "training"),
        (less, {}, "training, partition"),
        (other_test, {}, "evaluation"),
        (lambda *tensors: tensors, {"seed": 1}, "partition"),
    ],
    ids=["a pixel", "two labels", "an image less", "test images", "another seed"],
)
def test_other_images_in_memory_are_refused_in_one_line(change, settings, parts):
    checkpoint_on(Images())
    with pytest.raises(ConfigurationError) as refused:
        resume(Images(change, **settings))
    assert str(refused.value) in (
        f"data: the checkpoint 1.ckpt was trained on other data, these differ in: {parts}; use its data and its "
        "seed_everything, or resume with these by --accept_data (in Python: accept_data = True of the module)"
    )


def test_other_data_that_are_accepted_are_kept_in_the_checkpoint():
    checkpoint_on(Images())
    before, after = Images(), Images(pixel)
    record = resume(after, accept=True).record
    before.setup("fit")
    (entry,) = record.continued_from
    assert (entry["checkpoint"], entry["round"]) == ("1.ckpt", 1)
    assert entry["differs"] == {
        "data.training": [before.fingerprint()["training"], after.fingerprint()["training"]]
    }
    assert record.data == after.fingerprint()
    assert record.state_dict()["continued_from"] == [entry]


def test_what_was_loaded_does_not_depend_on_the_seed():
    found = []
    for change, seed in ((lambda *tensors: tensors, 0), (lambda *tensors: tensors, 1), (other_test, 0)):
        data = Images(change, seed=seed, val_fraction=0.2)
        data.setup("fit")
        found.append((data.loaded, data.fingerprint()["evaluation"]))
    (loaded, evaluation), (same, another), (other, _) = found
    assert loaded == same != other
    assert evaluation != another


def test_the_same_data_go_on_without_a_word(capsys):
    checkpoint_on(Images())
    assert resume(Images()).record.continued_from == []
    assert capsys.readouterr().out == ""


def test_the_command_line_refuses_other_data_and_leaves_nothing_until_they_are_accepted(capsys):
    source = run("--trainer.max_epochs", 1).attempt
    path = source.checkpoints / "last.ckpt"
    other = ("--ckpt_path", path, "--trainer.max_epochs", 2, "--data.init_args.max_examples", 299)
    assert message_of(capsys, lambda: run(*other), status=4) == (
        f"error: data: the checkpoint {path} was trained on other data, these differ in: training, evaluation, partition; use "
        "its data and its seed_everything, or resume with these by --accept_data (in Python: accept_data = True of the module)\n"
    )
    assert attempts() == [source.path.name]
    cli = run(*other, "--accept_data")
    assert [set(entry["differs"]) for entry in cli.model.record.continued_from] == [
        {"data.training", "data.evaluation", "data.partition", "data.max_examples"}
    ]
    assert (
        "accept_data: false" in cli.attempt.config.read_text()
    )  # the saved configuration accepts nothing by itself


def test_a_resume_that_is_refused_leaves_rows_after_its_checkpoint(capsys):
    source = run("--trainer.max_epochs", 2, "--checkpoint.every_n_rounds", 2).attempt
    with source.metrics.open("a") as file:
        file.write(json.dumps({**read_metrics(source.metrics)[-1], "round": 3}) + "\n")
    before = {path: path.read_bytes() for path in source.path.rglob("*") if path.is_file()}
    checkpoint = torch.load(source.checkpoints / "last.ckpt")
    checkpoint["fl_lightning"]["record"]["data"]["training"] = "other"
    torch.save(checkpoint, source.checkpoints / "last.ckpt")
    assert "trained on other data" in message_of(
        capsys, lambda: run("--ckpt_path", "last", "--trainer.max_epochs", 4), status=4
    )
    after = {
        path: path.read_bytes()
        for path in source.path.rglob("*")
        if path.suffix != ".ckpt" and path.is_file()
    }
    assert after == {path: content for path, content in before.items() if path.suffix != ".ckpt"}


def of_clients(*datasets, **loader):
    clients = []
    for dataset in datasets:
        client = L.LightningDataModule()
        client.train_dataloader = lambda dataset=dataset: DataLoader(dataset, 4, **loader)
        clients.append(client)
    data = FederatedDataModule(clients)
    data.setup("fit")
    return data.fingerprint()


def tensors():
    return torch.arange(80.0).view(20, 4), torch.arange(20) % 2


class Files(Dataset):
    """Numbers in files, read when they are asked for, as of torchvision's folders."""

    def __init__(self, root, labels):
        self.root, self.targets = root, labels
        self.samples = [(str(Path(root, f"{n}.txt")), label) for n, label in enumerate(labels)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        return float(Path(path).read_text()), label


def write(root, values):
    Path(root).mkdir()
    for number, value in enumerate(values):
        Path(root, f"{number}.txt").write_text(str(value))


def test_one_number_of_a_clients_own_tensors_counts():
    images, labels = tensors()
    first = of_clients(TensorDataset(images, labels), TensorDataset(images, labels))
    assert of_clients(TensorDataset(*tensors()), TensorDataset(*tensors())) == first
    images[19, 3] += 1
    assert (
        of_clients(TensorDataset(*tensors()), TensorDataset(images, labels))["training"] != first["training"]
    )


def test_the_parts_of_a_shared_data_set_count():
    shared = TensorDataset(*tensors())
    first = of_clients(Subset(shared, range(10)), Subset(shared, range(10, 20)))
    other = of_clients(Subset(shared, range(10)), Subset(shared, [*range(11, 20), 9]))
    assert first["training"] != other["training"]


def test_files_count_by_name_size_label_and_contents_never_by_time_or_place():
    values, labels = range(10, 18), [0, 1] * 4
    write("here", values)
    first = of_clients(Files("here", labels))
    os.utime("here/0.txt", (1, 1))
    write("there", values)
    assert of_clients(Files("here", labels)) == of_clients(Files("there", labels)) == first
    assert of_clients(Files("here", [1, 0] * 4)) != first
    Path("there/7.txt").write_text("170")
    assert of_clients(Files("there", labels)) != first  # its size
    Path("here/0.txt").write_text("99")
    assert of_clients(Files("here", labels)) != first  # of the first batch


def test_data_that_draw_are_the_same_and_data_that_never_repeat_do_not_stand_in_the_way():
    class Draws(Dataset):
        def __init__(self, generator=None):
            self.generator = generator

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.rand(3, generator=self.generator), index

    assert of_clients(Draws(), shuffle=True) == of_clients(Draws(), shuffle=True)
    one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    assert of_clients(Draws(one)) == of_clients(Draws(two))


def test_streams_are_known_by_their_first_batch():
    class Stream(IterableDataset):
        def __init__(self, first):
            self.first = first

        def __len__(self):
            return 8

        def __iter__(self):
            return iter((float(n), n % 2) for n in range(self.first, self.first + 8))

    assert of_clients(Stream(0)) == of_clients(Stream(0)) != of_clients(Stream(1))


def test_training_is_that_of_a_run_whose_data_nobody_looked_at(monkeypatch):
    looked = federated_run(rounds=2).module
    monkeypatch.setattr(FederatedDataModule, "fingerprint", lambda self: {"training": "0"})
    plain = federated_run(rounds=2).module
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in looked.state_dict().items())


def test_evaluation_data_of_the_server_count():
    data = blobs()
    data.setup("fit")
    inputs, targets = data.server.dataset.tensors
    other = FederatedDataModule(data._clients, ArrayClient(inputs, targets.roll(1), 8))
    other.setup("fit")
    assert other.fingerprint()["training"] == data.fingerprint()["training"]
    assert other.fingerprint()["evaluation"] != data.fingerprint()["evaluation"]


def test_cifar10_in_memory_takes_less_than_a_second():
    class Cifar(Images):
        image_size, in_channels = 32, 3

        def load(self):
            images = torch.zeros(60000, 3, 32, 32, dtype=torch.uint8)
            images[::2] = 1
            labels = torch.arange(60000) % 3
            return ImageData(images[:50000], labels[:50000], images[50000:], labels[50000:])

    data = Cifar()
    data.setup("fit")
    started = time.process_time()
    data.fingerprint()
    assert time.process_time() - started < 1


def test_how_data_are_batched_and_loaded_does_not_make_them_others():
    def known(batch_size, workers):
        class Clients(L.LightningDataModule):
            def train_dataloader(self):
                return DataLoader(Squares(), batch_size)

            def val_dataloader(self):
                return DataLoader(Squares(), batch_size, num_workers=workers)

        data = FederatedDataModule([Clients(), Clients()], Clients())
        data.setup("fit")
        return data.fingerprint()

    assert known(4, 0) == known(8, 2)


def test_the_first_and_the_last_sample_of_computed_data_count():
    def known(changed):
        class Changed(Squares):
            def __getitem__(self, index):
                return super().__getitem__(index + 100 * (index == changed))

        return of_clients(Changed())["training"]

    assert len({known(changed) for changed in (None, 0, 19)}) == 3


class Squares(Dataset):
    """A data set that is computed."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor(float(index)), index % 2


def test_files_count_by_their_content_or_if_they_are_large_by_their_size(tmp_path, monkeypatch):
    files = [tmp_path / "data" / name for name in ("a", "b")]
    files[0].parent.mkdir()
    for path in files:
        path.write_bytes(b"12345")
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "data", moved)
    copies = [moved / "a", moved / "b"]
    first = files_digest(files, tmp_path / "data")
    assert files_digest(copies, moved) == first
    copies[1].write_bytes(b"12346")  # as many bytes
    assert files_digest(copies, moved) != first
    monkeypatch.setattr(fingerprint, "LARGE", 9)
    monkeypatch.setattr(fingerprint, "file_digest", lambda path: pytest.fail("read"))
    first = files_digest(files, tmp_path / "data")
    assert files_digest(copies, moved) == first
    copies[1].write_bytes(b"123456")
    assert files_digest(copies, moved) != first
