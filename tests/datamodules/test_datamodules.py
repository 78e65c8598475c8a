"""In-memory clients: batches at random access, augmentation, evaluation data, records."""

import hashlib

import lightning as L
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from fl_lightning import ClientDataModule, ConfigurationError
from fl_lightning.datamodules import (
    IID,
    Digits,
    Dirichlet,
    ImageData,
    InMemoryDataModule,
    Natural,
    Partition,
    Shards,
)
from fl_lightning.datamodules.images import balanced_subset, channel_statistics

AUGMENTATION = {"plain": {}, "augmented": {"crop_padding": 2, "horizontal_flip": True}}


class Numbered(InMemoryDataModule):
    """Images whose first pixel is the sample's number and whose pixels are otherwise never 0."""

    num_classes = 4
    in_channels = 3
    image_size = 5
    groups = None
    loads = 0

    def load(self):
        self.loads += 1
        images = torch.randint(100, 256, (200, 3, 5, 6), generator=torch.Generator().manual_seed(0)).to(
            torch.uint8
        )
        images[:, 0, 0, 0] = torch.arange(200)
        labels = torch.arange(200) % 4
        return ImageData(images, labels, images[:30], labels[:30], self.groups)


def build(setup="fit", **settings):
    datamodule = Numbered(**{"num_clients": 3, "batch_size": 16, **settings})
    datamodule.setup(setup)
    return datamodule


def pixels(datamodule, x):
    """The pixel values that were normalised to ``x``."""
    normalize = datamodule.samples.normalize
    return (x * normalize.std + normalize.mean).mul(255).round().long()


def numbers(client):
    """The numbers of a client's images, without augmentation."""
    return client.data.samples.inputs[client.indices, 0, 0, 0].long()


@pytest.mark.parametrize("augmentation", AUGMENTATION.values(), ids=AUGMENTATION.keys())
def test_the_loader_of_a_client_yields_exactly_its_train_batches(augmentation):
    datamodule = build(**augmentation)
    for client in datamodule.clients:
        assert isinstance(client, L.LightningDataModule)
        assert isinstance(client, ClientDataModule)
        loader = client.train_dataloader()
        assert len(loader) == client.steps_per_epoch == client.num_examples // 16
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for index, (x, y) in enumerate(loader):
                expected = client.train_batch(epoch * client.steps_per_epoch + index)
                assert x.dtype == torch.float32
                assert y.dtype == torch.int64
                assert torch.equal(x, expected[0])
                assert torch.equal(y, expected[1])
            assert index == client.steps_per_epoch - 1


@pytest.mark.parametrize("augmentation", AUGMENTATION.values(), ids=AUGMENTATION.keys())
def test_a_cohort_batch_is_the_stack_of_its_clients_batches(augmentation):
    datamodule = build(**augmentation)
    x, y = datamodule.cohort_batch([2, 0], [9, 3]).stack()
    assert x.shape == (2, 16, 3, 5, 6)
    assert y.shape == (2, 16)
    for row, (client_id, step) in enumerate([(2, 9), (0, 3)]):
        expected = datamodule.clients[client_id].train_batch(step)
        assert torch.equal(x[row], expected[0])
        assert torch.equal(y[row], expected[1])


def test_a_batch_is_a_function_of_seed_client_and_step_not_of_call_order():
    forward, backward = build(**AUGMENTATION["augmented"]), build(**AUGMENTATION["augmented"])
    steps = range(12)
    batches = [forward.clients[1].train_batch(step) for step in steps]
    for step in reversed(steps):
        x, y = backward.clients[1].train_batch(step)
        assert torch.equal(x, batches[step][0])
        assert torch.equal(y, batches[step][1])


def test_an_epoch_visits_each_sample_once_in_an_order_of_its_own():
    datamodule = build(num_clients=2, batch_size=20)
    client = datamodule.clients[1]
    epochs = [
        torch.cat(
            [pixels(datamodule, client.train_batch(5 * epoch + step)[0])[:, 0, 0, 0] for step in range(5)]
        )
        for epoch in range(2)
    ]
    for order in epochs:
        assert torch.equal(order.sort().values, client.indices)
    assert not torch.equal(epochs[0], epochs[1])


def test_the_data_order_does_not_depend_on_augmentation():
    plain, augmented = (build(**settings).clients[0].train_batch(7)[1] for settings in AUGMENTATION.values())
    assert torch.equal(plain, augmented)


def test_augmentation_is_a_shifted_window_of_the_black_bordered_image_and_a_flip():
    datamodule = build(**AUGMENTATION["augmented"])
    client = datamodule.clients[0]
    images = Numbered().load().train_images
    seen = set()
    for step in range(30):
        found = pixels(datamodule, client.train_batch(step)[0])
        for image, (sample, top, left, flip) in zip(found, client.step_draws(step).tolist(), strict=True):
            bordered = torch.zeros(3, 9, 10, dtype=torch.int64)
            bordered[:, 2:7, 2:8] = images[sample]
            expected = bordered[:, top : top + 5, left : left + 6]
            assert torch.equal(image, expected.flip(-1) if flip else expected)
            seen.add((top, left, flip))
    assert seen == {(top, left, flip) for top in range(5) for left in range(5) for flip in range(2)}


def test_poisson_samples_are_drawn_with_the_rate_independently_of_each_other_and_of_the_other_steps():
    datamodule = build(sampling="poisson", batch_size=16, **AUGMENTATION["augmented"])
    client = datamodule.clients[1]
    n, steps = client.num_examples, 3000
    assert datamodule.sampling_rate(1) == 16 / n
    assert client.steps_per_epoch == n // 16
    drawn = torch.zeros(steps, n)
    for step in range(steps):
        indices = client.step_draws(step)[:, 0].contiguous()
        assert len(indices) == len(indices.unique())
        drawn[step, torch.searchsorted(client.indices, indices)] = 1
    rate, error = 16 / n, 5 * (16 / n * (1 - 16 / n) / steps) ** 0.5
    assert ((drawn.mean(0) - rate).abs() < error).all()  # each sample
    sizes = drawn.sum(1)
    assert abs(float(sizes.var()) / (16 * (1 - rate)) - 1) < 0.15  # no sample depends on another: binomial
    assert abs(float(torch.corrcoef(torch.stack([sizes[1:], sizes[:-1]]))[0, 1])) < 0.1
    assert client.step_draws(5)[:, 1:].float().std(0).min() > 0
    again = build(sampling="poisson", batch_size=16, **AUGMENTATION["augmented"]).clients[1]
    assert torch.equal(again.step_draws(2999), client.step_draws(2999))
    other = build(sampling="poisson", batch_size=16, seed=1, **AUGMENTATION["augmented"]).clients[1]
    assert not torch.equal(other.step_draws(2999)[:5, 0], client.step_draws(2999)[:5, 0])


def test_poisson_samples_of_a_client_with_fewer_samples_than_a_batch_are_all_its_samples():
    datamodule = build(sampling="poisson", batch_size=1000)
    assert datamodule.sampling_rate(0) == 1
    assert torch.equal(datamodule.clients[0].step_draws(3)[:, 0], datamodule.clients[0].indices)
    assert build().sampling_rate(0) is None
    with pytest.raises(ConfigurationError, match="sampling: 'gaussian' must be one of epochs, poisson"):
        build(sampling="gaussian")


def test_normalised_training_images_have_mean_zero_and_variance_one():
    datamodule = build(num_clients=1, batch_size=200)
    x, _ = datamodule.clients[0].train_batch(0)
    variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(mean, torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(variance, torch.ones(3), atol=1e-5, rtol=0)


def test_normalised_digits_have_mean_zero_and_variance_one_though_their_pixels_end_at_16():
    datamodule = Digits(num_clients=1, batch_size=1438)
    datamodule.setup("fit")
    x, _ = datamodule.clients[0].train_batch(0)
    assert x.mean().item() == pytest.approx(0, abs=1e-5)
    assert x.var().item() == pytest.approx(1, abs=1e-3)


def test_channel_statistics_are_those_of_the_scaled_pixels():
    images = torch.randint(0, 17, (40, 2, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    variance, mean = torch.var_mean(images.double() / 16, dim=(0, 2, 3), correction=0)
    found = torch.tensor(channel_statistics(images, 16.0), dtype=torch.float64)
    torch.testing.assert_close(found, torch.stack([mean, variance.sqrt()]))


@pytest.mark.parametrize("count", [0, 1, 37, 90, 160])
def test_a_balanced_subset_takes_the_same_share_of_every_class(count):
    labels = torch.tensor([0] * 80 + [1] * 50 + [3] * 30)
    subset = balanced_subset(labels, count, torch.Generator().manual_seed(0))
    assert len(subset.unique()) == count
    expected = torch.tensor([80, 50, 0, 30]) * count / 160
    assert (labels[subset].bincount(minlength=4) - expected).abs().max() <= 1


def test_a_class_without_samples_does_not_change_a_balanced_subset():
    labels = torch.tensor([0] * 80 + [1] * 50 + [2] * 31)
    first, second = (balanced_subset(x, 34, torch.Generator().manual_seed(0)) for x in (labels, 2 * labels))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [([1000] + [2] * 300, 160), ([1] * 100, 10), ([7, 1, 1, 1, 900, 3], 50), ([3] * 50, 60)],
)
def test_many_small_classes_have_their_share_of_a_balanced_subset(sizes, count):
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    subsets = [balanced_subset(labels, count, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    expected = torch.tensor(sizes, dtype=torch.float64) * count / len(labels)
    for subset in subsets:
        assert len(subset.unique()) == count
        assert (labels[subset].bincount(minlength=len(sizes)) - expected).abs().max() < 1
    assert torch.equal(subsets[0], subsets[1])
    assert not torch.equal(subsets[0], subsets[2])


def test_without_a_validation_set_fit_evaluates_on_test_data_and_says_so():
    datamodule = build(eval_batch_size=12)
    assert datamodule.fit_split == "test"
    for loader in (datamodule.val_dataloader(), datamodule.test_dataloader()):
        assert [len(y) for _, y in loader] == [12, 12, 6]
        x = torch.cat([x for x, _ in loader])
        assert torch.equal(pixels(datamodule, x), Numbered().load().test_images.long())


def test_the_validation_set_is_balanced_and_disjoint_from_every_client():
    datamodule = build(val_fraction=0.2, eval_batch_size=500, crop_padding=2, horizontal_flip=True)
    assert datamodule.fit_split == "val"
    ((x, y),) = datamodule.val_dataloader()
    assert y.bincount().tolist() == [10] * 4
    held_out = pixels(datamodule, x)[:, 0, 0, 0].tolist()
    trained = torch.cat([numbers(client) for client in datamodule.clients]).tolist()
    assert sorted(held_out + trained) == list(range(200))
    ((test, _),) = datamodule.test_dataloader()
    assert len(test) == 30


def test_the_seed_chooses_partition_validation_set_and_order():
    def fingerprint(seed):
        datamodule = build(val_fraction=0.2, seed=seed)
        ((_, _),) = datamodule.val_dataloader()
        return datamodule.partition_record()["sha256"]["total"], datamodule.clients[0].train_batch(0)[
            0
        ].sum().item()

    assert fingerprint(1) == fingerprint(1)
    assert fingerprint(1)[0] != fingerprint(2)[0]
    assert fingerprint(1)[1] != fingerprint(2)[1]


def test_max_examples_keeps_a_balanced_part_of_the_training_set():
    datamodule = build(max_examples=101)
    labels = datamodule.samples.labels[torch.cat([client.indices for client in datamodule.clients])]
    assert sum(client.num_examples for client in datamodule.clients) == 101
    assert sorted(labels.bincount().tolist()) == [25, 25, 25, 26]
    assert torch.equal(datamodule.samples.normalize.mean, build().samples.normalize.mean)


def test_setup_loads_once_whatever_the_stages():
    datamodule = build("validate")
    clients = datamodule.clients
    for stage in ("fit", "fit", "test"):
        datamodule.setup(stage)
    assert datamodule.loads == 1
    assert datamodule.clients is clients


def test_shapes_and_number_of_clients_are_known_before_setup():
    datamodule = Digits(num_clients=7)
    assert (datamodule.num_classes, datamodule.in_channels, datamodule.image_size) == (10, 1, 8)
    assert datamodule.num_clients == 7


def test_natural_has_one_client_per_group(monkeypatch):
    monkeypatch.setattr(Numbered, "groups", torch.arange(200) % 5 * 10)
    datamodule = build(partition=Natural(), num_clients=2, val_fraction=0.1)
    assert datamodule.num_clients == len(datamodule.clients) == 5
    for group, client in enumerate(datamodule.clients):
        assert (numbers(client) % 5).unique().tolist() == [group]


def test_the_record_holds_sizes_histogram_and_digests_of_original_indices():
    datamodule = build(partition=Shards(0.5), num_clients=2, val_fraction=0.1, seed=3)
    record = datamodule.partition_record()
    assert record["partition"] == datamodule.describe_partition() == "Shards(class_fraction=0.5), 2 clients"
    assert record["num_clients"] == 2
    assert record["sizes"] == [90, 90]
    assert (record["val_size"], record["seed"]) == (20, 3)
    assert sorted(map(sorted, record["class_histogram"])) == [[0, 0, 45, 45]] * 2
    parts = [numbers(client).numpy().tobytes() for client in datamodule.clients]
    digests = [hashlib.sha256(part).hexdigest() for part in parts]
    assert record["sha256"]["clients"] == digests
    assert record["sha256"]["total"] == hashlib.sha256("".join(digests).encode()).hexdigest()


def test_a_client_smaller_than_a_batch_has_all_its_samples_in_one_batch():
    data = build(batch_size=67)
    assert data.notes == [
        "1 of 3 clients have fewer samples than batch_size=67, and train on all their samples as one batch: client 2: 66"
    ]
    assert [data.steps_per_epoch(client) for client in range(3)] == [1, 1, 1]
    assert [data.samples_per_step(client) for client in range(3)] == [67, 67, 66]
    batches = data.cohort_batch([0, 2], [0, 5])
    assert batches.sizes() == [67, 66]
    for client, step, batch in zip((0, 2), (0, 5), batches.batches(), strict=True):
        assert all(map(torch.equal, batch, data.clients[client].train_batch(step)))
    seen = pixels(data, batches.batches()[1][0])[:, 0, 0, 0]
    assert sorted(seen.tolist()) == sorted(numbers(data.clients[2]).tolist())
    assert build(batch_size=66).notes == []


def test_clients_below_min_examples_are_left_out_and_named():
    sizes = {"a": 120, "b": 77, "c": 3}
    data = Numbered(batch_size=16, min_examples=4, partition=Natural())
    data.groups = torch.repeat_interleave(torch.arange(3), torch.tensor([*sizes.values()]))
    data.setup("fit")
    assert [data.num_examples(client) for client in range(data.num_clients)] == [120, 77]
    assert data.notes == ["left out, as they have fewer training samples than min_examples=4: 2: 3"]
    assert len(data.index_digests()) == len(data.class_histograms()) == 2
    with pytest.raises(
        ConfigurationError, match=r"min_examples=68 leaves no client; use at most 67, the most"
    ):
        build(min_examples=68)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_clients", 0),
        ("batch_size", 0),
        ("eval_batch_size", 0),
        ("max_examples", 0),
        ("crop_padding", -1),
        ("val_fraction", 1.0),
        ("val_fraction", -0.1),
    ],
)
def test_a_setting_out_of_its_range_is_refused_at_once(setting, value):
    with pytest.raises(ConfigurationError, match=rf"^{setting} must be .*found {value}$"):
        Digits(**{setting: value})


def test_a_validation_set_that_would_be_empty_is_refused():
    with pytest.raises(ConfigurationError, match=r"val_fraction=0.001 takes 0 of 200"):
        build(val_fraction=0.001)


def test_digits_have_a_balanced_test_split_that_no_seed_changes():
    modules = [Digits(seed=seed, eval_batch_size=1000) for seed in (0, 1)]
    for datamodule in modules:
        datamodule.setup("fit")
    ((x, y),), ((same, _),) = (datamodule.test_dataloader() for datamodule in modules)
    assert torch.equal(x, same)
    assert x.shape == (359, 1, 8, 8)
    assert set(y.bincount().tolist()) <= {34, 35, 36, 37}
    sizes = modules[0].partition_record()["sizes"]
    assert sum(sizes) == 1438
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("written", "description"),
    [
        ("{}", "IID()"),
        ("{partition: IID}", "IID()"),
        (
            "{partition: {class_path: Dirichlet, init_args: {alpha: 0.1}}}",
            "Dirichlet(alpha=0.1, balance='client')",
        ),
        ("{partition: {class_path: Shards, init_args: {class_fraction: 0.2}}}", "Shards(class_fraction=0.2)"),
        ("{partition: Natural}", "Natural()"),
    ],
)
def test_a_configuration_names_its_partition_by_the_bare_class_name(written, description):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(InMemoryDataModule, "data")
    config = parser.parse_object({"data": {"class_path": "Digits", "init_args": yaml.safe_load(written)}})
    again = parser.parse_string(parser.dump(config))
    for parsed in (config, again):
        assert str(parser.instantiate(parsed).data.partition) == description


def test_partitions_are_resolved_as_subclasses_of_partition():
    assert {IID, Dirichlet, Shards, Natural} <= set(Partition.__subclasses__())


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_batches_are_the_same_wherever_the_images_are_kept(device):
    data = Digits(num_clients=3, crop_padding=1, horizontal_flip=True, val_fraction=0.1)
    data.setup("fit")
    before = data.cohort_batch([0, 2], [0, 5]).stack()
    rows = next(iter(data.val_dataloader()))
    data.keep_on(torch.device(device))
    for old, new in zip(
        (*before, *rows),
        (*data.cohort_batch([0, 2], [0, 5]).stack(), *next(iter(data.val_dataloader()))),
        strict=True,
    ):
        assert new.device.type == device
        assert torch.equal(old, new.cpu())


def test_images_that_do_not_fit_stay_where_they_are(monkeypatch):
    data = Digits(num_clients=3)
    data.setup("fit")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    data.keep_on(torch.device("cuda"))
    assert data.samples.labels.device.type == "cpu"
