"""A checkpoint is never evaluated unnoticed on data that another seed draws, which hold samples of its training."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fl_lightning import ConfigurationError, FederatedDataModule, FederatedModule
from fl_lightning.datamodules import Cityscapes, ImageFolder, InMemoryDataModule, TensorData
from fl_lightning.datamodules.images import ImageData
from tests.support.colour_folders import save
from tests.support.command_line import main, message_of, run
from tests.support.helpers import SGD, ArrayClient, SaveRounds, blobs, fit, small_cnn

WAY_ON = "or evaluate on these by --accept_data (in Python: accept_data = True of the module)"


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


def evaluate(command, data, path, accept=False, **settings):
    module = FederatedModule(small_cnn(**settings), SGD, local_steps=1)
    module.accept_data = accept
    trainer = L.Trainer(
        accelerator="cpu", precision="64-true", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )  # fmt: skip
    return getattr(trainer, command)(module, datamodule=data, ckpt_path=path)


def test_the_command_line_refuses_to_validate_on_the_split_of_another_seed(capsys):
    path = run("--trainer.max_epochs", 1).attempt.checkpoints / "last.ckpt"
    other = ("--ckpt_path", path, "--seed_everything", 1)
    assert message_of(capsys, lambda: run(*other, command="validate"), status=4) == (
        f"error: data: the checkpoint {path} was trained with other validation data, and these may hold samples of its training; "
        f"use its seed_everything: 0, where 1 is given, {WAY_ON}\n"
    )
    assert "val/loss" in run(*other, "--accept_data", command="validate").trainer.callback_metrics
    for command in ("test", "predict"):  # the data set's own test data, whatever the seed
        run(*other, command=command)


def test_the_command_line_refuses_other_settings_of_the_split_and_takes_those_of_training(capsys):
    path = run("--trainer.max_epochs", 1).attempt.checkpoints / "last.ckpt"
    other = ("--ckpt_path", path, "--data.init_args.val_fraction", 0.3)
    line = message_of(capsys, lambda: run(*other, command="validate"), status=4)
    assert "was trained with other validation data" in line
    assert f"use its data and its seed_everything, {WAY_ON}" in line
    run("--ckpt_path", path, command="validate")
    # without validation data the evaluation is that of the test data
    run("--ckpt_path", path, "--data.init_args.val_fraction", 0, command="validate")


def test_the_trainer_refuses_as_the_command_line_does(folder):
    path = trained_on(Images(val_fraction=0.2), folder)
    other = Images(val_fraction=0.2, seed=1)
    with pytest.raises(
        ConfigurationError, match=r"other validation data.*use its data and its seed_everything"
    ):
        evaluate("validate", other, path)
    assert evaluate("validate", other, path, accept=True)
    assert evaluate("validate", Images(val_fraction=0.2), path)
    assert evaluate("test", other, path)
    assert evaluate("test", Images(test_seed=7, val_fraction=0.2), path)  # another domain, say
    assert evaluate("predict", other, path)


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
def test_clients_of_ones_own_are_not_set_up_for_it(clients, folder):
    path = trained_on(FederatedDataModule([Own(n) for n in range(clients)], Own(99)), folder)
    same, other = (FederatedDataModule([Own(0, refuses=True)] * clients, Own(seed)) for seed in (99, 7))
    assert evaluate("validate", same, path)
    if clients < 32:  # with more their contents do not count
        with pytest.raises(ConfigurationError, match="trained with other validation data"):
            evaluate("validate", other, path)
    longer = FederatedDataModule([], Own(99))
    longer.server.setup = lambda stage: setattr(longer.server, "dataset", Drawn(99, 17))
    with pytest.raises(ConfigurationError, match="trained with other validation data"):
        evaluate("validate", longer, path)
    assert evaluate("test", other, path)


def test_evaluation_on_tensors_of_ones_own(folder):
    data = blobs()
    path = trained_on(data, folder)
    inputs, targets = data.server.dataset.tensors
    rolled = FederatedDataModule(data._clients, ArrayClient(inputs, targets.roll(1), 8))
    assert evaluate("validate", blobs(), path)
    with pytest.raises(ConfigurationError, match="trained with other validation data"):
        evaluate("validate", rolled, path)


def test_test_images_that_the_seed_draws_are_those_of_training(folder):
    for label, name in enumerate("abc"):
        for index in range(10):
            save(folder / "images" / name / f"{index}.png", torch.full((6, 6, 3), 20 * index + 5 * label))

    def drawn(**settings):
        return ImageFolder(
            str(folder / "images"), 6, test_fraction=0.4, num_clients=2, batch_size=4, **settings
        )

    path = trained_on(drawn(), folder, channels=3)
    assert evaluate("test", drawn(), path, channels=3)
    for command in ("validate", "test", "predict"):
        with pytest.raises(ConfigurationError, match="trained with other test data"):
            evaluate(command, drawn(seed=1), path, channels=3)


def test_which_splits_are_drawn_from_the_samples_of_training(tmp_path):
    (tmp_path / "leftImg8bit" / "train").mkdir(parents=True)
    assert Cityscapes(str(tmp_path), evaluation_cities=["ulm"]).drawn_splits == ("val", "test")
    assert Cityscapes(str(tmp_path)).drawn_splits == Images().drawn_splits == ("val",)


def table(shift=0.0, rows=60, **settings):
    features = torch.randn(rows, 4, generator=torch.Generator().manual_seed(3)) + shift
    return TensorData(features, torch.arange(rows) % 3, num_clients=2, batch_size=4, **settings)


def table_run(data, folder):
    module = FederatedModule(torch.nn.Linear(4, 3), SGD, local_steps=1)
    fit(module, data, 1, [SaveRounds(folder)])
    return folder / "1.ckpt"


def evaluate_table(command, data, path, accept=False):
    module = FederatedModule(torch.nn.Linear(4, 3), SGD, local_steps=1)
    module.accept_data = accept
    trainer = L.Trainer(
        accelerator="cpu", precision="64-true", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )  # fmt: skip
    return getattr(trainer, command)(module, datamodule=data, ckpt_path=path)


def test_test_samples_that_a_table_draws_are_those_of_training(folder):
    path = table_run(table(), folder)
    for command in ("test", "predict"):
        assert evaluate_table(command, table(), path)
        with pytest.raises(ConfigurationError, match=r"trained with other test data, and these may hold"):
            evaluate_table(command, table(1.0, 40), path)
    assert evaluate_table("test", table(1.0, 40), path, accept=True)
    with pytest.raises(
        ConfigurationError, match=r"or predict new samples by python -m fl_lightning predict RUN FILE"
    ):
        evaluate_table("predict", table(1.0, 40), path, accept=True)


@pytest.mark.parametrize("standardize", [False, True])
def test_separate_test_samples_are_scaled_by_the_training_samples_of_the_checkpoint(standardize, folder):
    given = {
        "test_features": torch.randn(7, 4, generator=torch.Generator().manual_seed(5)),
        "test_targets": torch.arange(7) % 3,
    }
    path = table_run(table(standardize=standardize, **given), folder)
    new = {"test_features": torch.cat([given["test_features"] + 9] * 2), "test_targets": torch.arange(14) % 3}
    data = table(standardize=standardize, **new)
    assert sum(map(len, evaluate_table("predict", data, path))) == 14
    scaled = {"test_features": new["test_features"], "test_targets": new["test_targets"]}
    if not standardize:
        assert evaluate_table("predict", table(1.0, **scaled), path)
        return
    features = table()._data["features"]
    expected = (new["test_features"] - features.mean(0)) / features.std(0, correction=0)
    assert torch.allclose(data.samples.inputs[data.distribution.test], expected, atol=1e-5)
    for command, way_on in (
        ("test", WAY_ON),
        ("predict", "or predict new samples by python -m fl_lightning predict"),
    ):
        with pytest.raises(
            ConfigurationError, match="whose mean and standard deviation would scale the test"
        ) as error:
            evaluate_table(command, table(1.0, standardize=True, **scaled), path)
        assert way_on in str(error.value)
    assert evaluate_table("test", table(1.0, standardize=True, **scaled), path, accept=True)


def test_predictions_on_other_data_have_a_file_of_their_own(capsys):
    features, targets = torch.randn(60, 4), torch.arange(60) % 3
    for name, rows in (("old", 8), ("new", 5)):
        tests = {"test_features": features[:rows], "test_targets": targets[:rows]}
        torch.save({"features": features, "targets": targets, **tests}, f"{name}.pt")

    given = ["--data=TensorData", "--data.num_clients=2", "--data.partition=IID", "--data.val_fraction=0"]

    def table_command(command, name, *more):
        words = [f"--data.features={name}.pt", "--data.batch_size=4", *more]
        return main([command, "--config", "configs/breast_cancer_fixbn.yaml", *given, *words])

    attempt = table_command("fit", "old", "--trainer.max_epochs=1").attempt
    last = f"--ckpt_path={attempt.checkpoints / 'last.ckpt'}"
    table_command("predict", "old", last)
    own = (attempt.path / "predictions_round_1.csv").read_text()
    capsys.readouterr()
    table_command("predict", "new", last)
    (other,) = attempt.path.glob("predictions_round_1.2.csv")
    assert f"5 predictions written to {other.resolve()}\n" in capsys.readouterr().out
    assert len(other.read_text().splitlines()) == 6
    assert (attempt.path / "predictions_round_1.csv").read_text() == own
