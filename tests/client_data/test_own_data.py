"""A user's own clients: own data modules, datasets and collate functions, batches that are neither images nor pairs."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from fl_lightning import (
    ConfigurationError,
    FederatedDataModule,
    FederatedModule,
    NetworkTask,
    VectorizedExecutor,
)
from fl_lightning.callbacks import FixBN
from fl_lightning.client_data.loaders import LoaderBatches
from tests.support.helpers import SGD, SaveRounds, distance, fit


class Sentences(Dataset):
    """Sequences of 3 to 9 tokens; in training numpy drops one of them at random and ``random`` masks another."""

    def __init__(self, client, size=22, augment=True):
        self.augment = augment
        generator = torch.Generator().manual_seed(client)
        self.labels = torch.randint(2, (size,), generator=generator)
        lengths = torch.randint(3, 10, (size,), generator=generator).tolist()
        self.sentences = [
            torch.randint(1, 11, (length,), generator=generator) + 10 * label
            for length, label in zip(lengths, self.labels, strict=True)
        ]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        if not self.augment:
            return self.sentences[index], self.labels[index]
        tokens = np.delete(self.sentences[index].numpy(), np.random.randint(len(self.sentences[index])))
        tokens[random.randrange(len(tokens))] = 21
        return torch.from_numpy(tokens), self.labels[index]


def pad(samples):
    """A batch as a dict: tokens padded with 0 to the longest sentence, ``[b, longest]``, and labels ``[b]``."""
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    return {"tokens": tokens, "label": torch.stack([label for _, label in samples])}


class Author(L.LightningDataModule):
    def __init__(self, client, drop_last=False):
        super().__init__()
        self.client, self.drop_last = client, drop_last
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append("setup fit" if stage == "fit" else "setup")
        self.dataset = Sentences(self.client)

    def train_dataloader(self):
        return DataLoader(self.dataset, 4, shuffle=True, collate_fn=pad, drop_last=self.drop_last)

    def val_dataloader(self):
        return DataLoader(Sentences(99, 40, augment=False), 8, collate_fn=pad)


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(22, 6, padding_idx=0)
        self.norm = nn.BatchNorm1d(6)
        self.classifier = nn.Linear(6, 2)

    def forward(self, tokens):
        lengths = (tokens > 0).sum(1, keepdim=True)
        return self.classifier(self.norm(self.embedding(tokens).sum(1) / lengths))


class TextClassifier(NetworkTask):
    def client_loss(self, batch):
        return cross_entropy(self.model(batch["tokens"]), batch["label"])

    def evaluate_batch(self, batch, evaluation):
        logits = self.model(batch["tokens"])
        evaluation.update(logits, batch["label"], cross_entropy(logits, batch["label"]))


def federation(**settings):
    return FederatedDataModule([Author(i, **settings) for i in range(3)], server=Author(99))


def run(rounds, extra=(), ckpt_path=None, data=None, **settings):
    module = FederatedModule(
        TextClassifier(BagOfWords()), SGD, **{"local_epochs": 1, "participation": 2, **settings}
    )
    trainer = {"limit_val_batches": 1.0}
    fit(module, data or federation(), rounds, [FixBN(freeze_round=3), *extra], ckpt_path, **trainer)
    return module


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_clients_with_dict_batches_of_padded_sequences_train():
    first, last = run(1).metrics, run(15).metrics
    assert last["val/accuracy"] > 0.9
    assert last["val/loss"] < first["val/loss"]


def test_every_sample_of_an_epoch_is_seen_once_and_the_short_last_batch_too():
    module = run(3, participation=1.0)
    assert module.record.samples == 3 * 3 * 22


def test_a_resumed_run_is_bit_exact_whatever_the_global_generators_hold(tmp_path):
    whole = run(6, [SaveRounds(tmp_path)])
    for start in (2, 5):
        np.random.seed(start)
        random.seed(start)
        torch.manual_seed(start)
        resumed = run(6, ckpt_path=tmp_path / f"{start}.ckpt")
        assert distance(whole.state_dict(), resumed.state_dict()) == 0
        assert {k: v for k, v in whole.metrics.items() if not k.startswith("time/")} == {
            k: v for k, v in resumed.metrics.items() if not k.startswith("time/")
        }


@pytest.mark.parametrize("order", [[7, 2, 9, 3, 4, 0, 11, 12], [5, 5, 4], [17, 0]])
def test_random_access_to_batches_equals_sequential_access(order):
    def batches():
        author = Author(1)
        author.setup("fit")
        return LoaderBatches(author, 1, seed=4)

    sequential = batches()
    assert sequential.steps_per_epoch == 6
    in_order = [sequential.train_batch(step) for step in range(18)]
    jumping = batches()
    for step in order:
        assert equal(in_order[step], jumping.train_batch(step))


def test_batches_differ_between_epochs_clients_and_seeds():
    def first_of(client, seed, step):
        author = Author(0)
        author.setup("fit")
        return LoaderBatches(author, client, seed).train_batch(step)["tokens"]

    base = first_of(0, 0, 0)
    assert torch.equal(base, first_of(0, 0, 0))
    assert not any(
        torch.equal(base, other) for other in (first_of(0, 0, 6), first_of(1, 0, 0), first_of(0, 1, 0))
    )


def test_an_epoch_is_one_pass_over_the_dataset_in_a_new_order():
    author = Author(0)
    author.setup("fit")
    batches = LoaderBatches(author, 0, seed=0)
    epochs = [torch.cat([batches.train_batch(6 * epoch + i)["label"] for i in range(6)]) for epoch in (0, 1)]
    for labels in epochs:
        assert torch.equal(labels.sort().values, author.dataset.labels.sort().values)
    assert not torch.equal(*epochs)


def test_drawing_a_batch_leaves_the_global_generators_alone():
    data = federation()
    data.setup("fit")
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    data.cohort_batch([0, 2], [3, 8])
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()


def test_the_hooks_of_every_clients_data_module_are_called():
    data = federation()
    run(1, data=data)
    for client in data.clients:
        assert client.calls == ["prepare_data", "setup fit"]


def test_a_client_without_a_batch_is_named():
    data = federation(drop_last=True)
    data.clients[2].setup = lambda stage: setattr(data.clients[2], "dataset", Sentences(2, 3))
    with pytest.raises(ConfigurationError, match=r"clients\[2\].train_dataloader\(\) yields no batch"):
        run(1, data=data)


def test_sequences_of_different_length_are_refused_by_the_vectorised_executor_in_words():
    with pytest.raises(ConfigurationError, match="needs batches of equal shape"):
        run(1, executor=VectorizedExecutor())


def test_data_of_another_type_is_refused():
    with pytest.raises(ConfigurationError, match="needs a FederatedDataModule, got Author"):
        run(1, data=Author(0))


@pytest.mark.parametrize(
    "hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
)
def test_a_hook_that_would_never_change_a_batch_is_refused(hook):
    changed = type("Changed", (Author,), {hook: lambda self, batch, dataloader_idx: batch})
    FederatedDataModule([Author(0)], Author(1))
    for name, modules in (
        (r"clients\[1\]", ([Author(0), changed(1)],)),
        ("server", ([Author(0)], changed(1))),
    ):
        with pytest.raises(ConfigurationError, match=f"data: {name}.{hook} of Changed would never be called"):
            FederatedDataModule(*modules)


class Wrapping(L.LightningDataModule):
    """Returns its loaders as ``wrap`` puts them."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def train_dataloader(self):
        return DataLoader(torch.arange(8.0), batch_size=4)

    def val_dataloader(self):
        return self.wrap(DataLoader(torch.arange(3.0)))

    def test_dataloader(self):
        return self.wrap(DataLoader(torch.arange(2.0)))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: (x,), lambda x: {"a": x}])
def test_a_collection_with_one_loader_of_a_clients_own_data_is_this_loader(wrap):
    data = FederatedDataModule([Wrapping(wrap), Wrapping(wrap)])
    assert [len(data.own_dataloader(1, split)) for split in ("val", "test")] == [3, 2]


@pytest.mark.parametrize(("wrap", "kind"), [(lambda x: [x, x], "list"), (lambda x: {"a": x, "b": x}, "dict")])
def test_several_loaders_of_a_clients_own_data_are_refused(wrap, kind):
    data = FederatedDataModule([Wrapping(wrap), Wrapping(wrap)])
    with pytest.raises(
        ConfigurationError, match=rf"clients\[1\]\.val_dataloader\(\) returns a {kind} of loaders"
    ):
        data.own_dataloader(1, "val")


def test_ready_batches_of_a_clients_own_data_stay_a_list():
    (batch,) = FederatedDataModule([Wrapping(lambda x: [torch.zeros(2)])]).own_dataloader(0, "val")
    assert batch.shape == (2,)
