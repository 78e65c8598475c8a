"""An evaluation on other data than a run's prints a line, as they may hold samples of its training."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fl_lightning import FederatedDataModule, FederatedModule
from fl_lightning.datamodules import ImageFolder, InMemoryDataModule, TensorData
from fl_lightning.datamodules.images import ImageData
from tests.support.colour_folders import save
from tests.support.command_line import run
from tests.support.helpers import SGD, ArrayClient, SaveRounds, blobs, fit, small_cnn

OTHER = "data: other evaluation data than those of {}; samples that another seed or fraction draws may have trained the model"
SCALED = "data: other training data than those of {}; their mean and standard deviation scale the samples"


class Images(InMemoryDataModule):
    num_classes, in_channels, image_size = 3, 2, 6

    def __init__(self, test_seed=1, **settings):
        super().__init__(num_clients=3, batch_size=5, **settings)
        self.test_seed = test_seed

    def load(self):
        images = [
            torch.randint(256, (n, 2, 6, 6), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
            for n, seed in ((60, 0), (20, self.test_seed))
        ]
        return ImageData(images[0], torch.arange(60) % 3, images[1], torch.arange(20) % 3)


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def trained_on(data, folder, **settings):
    fit(FederatedModule(small_cnn(**settings), SGD, local_steps=1), data, 1, [SaveRounds(folder)])
    return folder / "1.ckpt"


def evaluate(command, data, path, **settings):
    module = FederatedModule(small_cnn(**settings), SGD, local_steps=1)
    trainer = L.Trainer(
        accelerator="cpu", precision="64-true", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )  # fmt: skip
    return getattr(trainer, command)(module, datamodule=data, ckpt_path=path)


@pytest.fixture
def said(capsys):
    """The lines about the data that an evaluation has printed."""
    capsys.readouterr()

    def lines(path):
        every = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data: ")]
        return [
            "other" if x == OTHER.format(path) else "scaled" if x == SCALED.format(path) else x for x in every
        ]

    return lines


@pytest.mark.parametrize(
    "other", [("--seed_everything", 1), ("--data.init_args.val_fraction", 0.3), ("--data.max_examples", 299)]
)
def test_the_command_line_prints_a_line_of_other_data(other, said):
    path = run("--trainer.max_epochs", 1).attempt.checkpoints / "last.ckpt"
    said(path)
    for command in ("validate", "test"):
        evaluated = run("--ckpt_path", path, *other, command=command)
        assert said(path) == ["other"]
        assert evaluated.trainer.callback_metrics
        run("--ckpt_path", path, command=command)
        assert said(path) == []


def test_the_trainer_prints_what_the_command_line_prints(folder, said):
    path = trained_on(Images(val_fraction=0.2), folder)
    others = Images(val_fraction=0.2, seed=1), Images(test_seed=7, val_fraction=0.2)
    for command in ("validate", "test", "predict"):
        assert evaluate(command, Images(val_fraction=0.2), path)
        assert said(path) == []
        for other in others:
            assert evaluate(command, other, path)
            assert said(path) == ["other"]


class Drawn(Dataset):
    """Samples that are computed."""

    def __init__(self, seed, size=16):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], index % 3


class Own(L.LightningDataModule):
    def __init__(self, seed, refuses=False):
        super().__init__()
        self.seed, self.refuses = seed, refuses

    def setup(self, stage):
        assert not (self.refuses and stage == "fit")
        self.dataset = Drawn(self.seed)

    def train_dataloader(self):
        return DataLoader(self.dataset, 8)

    def val_dataloader(self):
        return DataLoader(self.dataset, 8)

    def test_dataloader(self):
        return DataLoader(self.dataset, 8)


@pytest.mark.parametrize("clients", [2, 40])
def test_clients_of_ones_own_are_not_set_up_for_it(clients, folder, said):
    path = trained_on(FederatedDataModule([Own(n) for n in range(clients)], Own(99)), folder)
    same, other = (FederatedDataModule([Own(0, refuses=True)] * clients, Own(seed)) for seed in (99, 7))
    assert evaluate("validate", same, path)
    assert said(path) == []
    assert evaluate("validate", other, path)
    assert said(path) == ["other"]
    longer = FederatedDataModule([], Own(99))
    longer.server.setup = lambda stage: setattr(longer.server, "dataset", Drawn(99, 17))
    assert evaluate("validate", longer, path)
    assert said(path) == ["other"]


class Staged(Own):
    """Has only what a stage needs, as Lightning's examples do."""

    def setup(self, stage):
        super().setup(stage)
        if stage != "test":
            self.validated = self.dataset

    def val_dataloader(self):
        return DataLoader(self.validated, 8)


def test_a_test_needs_no_validation_data(folder, said):
    """Test data that a run has not seen are compared with nothing."""
    path = trained_on(FederatedDataModule([Own(0)], Staged(99)), folder)
    assert evaluate("test", FederatedDataModule([Own(0, refuses=True)], Staged(7)), path)
    assert said(path) == []


def test_evaluation_on_tensors_of_ones_own(folder, said):
    data = blobs()
    path = trained_on(data, folder)
    inputs, targets = data.server.dataset.tensors
    rolled = FederatedDataModule(data._clients, ArrayClient(inputs, targets.roll(1), 8))
    assert evaluate("validate", blobs(), path)
    assert said(path) == []
    assert evaluate("validate", rolled, path)
    assert said(path) == ["other"]


def test_test_images_that_the_seed_draws_are_those_of_training(folder, said):
    for label, name in enumerate("abc"):
        for index in range(10):
            save(folder / "images" / name / f"{index}.png", torch.full((6, 6, 3), 20 * index + 5 * label))

    def drawn(**settings):
        return ImageFolder(
            str(folder / "images"), 6, test_fraction=0.4, num_clients=2, batch_size=4, **settings
        )

    path = trained_on(drawn(), folder, channels=3)
    assert evaluate("test", drawn(), path, channels=3)
    assert said(path) == []
    for command in ("validate", "test", "predict"):
        evaluate(command, drawn(seed=1), path, channels=3)
        assert said(path) == ["other"]


def table(shift=0.0, rows=60, **settings):
    features = torch.randn(rows, 4, generator=torch.Generator().manual_seed(3)) + shift
    return TensorData(features, torch.arange(rows) % 3, num_clients=2, batch_size=4, **settings)


def table_run(data, folder):
    module = FederatedModule(torch.nn.Linear(4, 3), SGD, local_steps=1)
    fit(module, data, 1, [SaveRounds(folder)])
    return folder / "1.ckpt"


def evaluate_table(command, data, path):
    module = FederatedModule(torch.nn.Linear(4, 3), SGD, local_steps=1)
    trainer = L.Trainer(
        accelerator="cpu", precision="64-true", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )  # fmt: skip
    return getattr(trainer, command)(module, datamodule=data, ckpt_path=path)


def test_test_samples_that_a_table_draws_are_those_of_training(folder, said):
    path = table_run(table(), folder)
    for command in ("test", "predict"):
        assert evaluate_table(command, table(), path)
        assert said(path) == []
        assert evaluate_table(command, table(1.0, 40), path)
        assert said(path) == ["other"]


@pytest.mark.parametrize("standardize", [False, True])
def test_separate_test_samples_are_scaled_by_the_training_samples(standardize, folder, said):
    given = {
        "test_features": torch.randn(7, 4, generator=torch.Generator().manual_seed(5)),
        "test_targets": torch.arange(7) % 3,
    }
    path = table_run(table(standardize=standardize, **given), folder)
    new = {"test_features": torch.cat([given["test_features"] + 9] * 2), "test_targets": torch.arange(14) % 3}
    data = table(standardize=standardize, **new)
    assert sum(map(len, evaluate_table("predict", data, path))) == 14
    assert said(path) == ["other"]
    if standardize:
        features = table()._data["features"]
        expected = (new["test_features"] - features.mean(0)) / features.std(0, correction=0)
        assert torch.allclose(data.samples.inputs[data.distribution.test], expected, atol=1e-5)
    for command in ("test", "predict"):
        assert evaluate_table(command, table(standardize=standardize, **given), path)
        assert said(path) == []
        assert evaluate_table(command, table(1.0, standardize=standardize, **given), path)
        assert said(path) == ["other", "scaled"] * standardize
