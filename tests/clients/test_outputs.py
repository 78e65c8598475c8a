"""A model with more or fewer outputs than the data have classes is refused before round 1, whoever made it."""

from copy import deepcopy
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import F1Score

from fl_lightning import (
    Classification,
    ConfigurationError,
    FederatedDataModule,
    FederatedModule,
    NetworkTask,
    Segmentation,
)
from tests.support.command_line import message_of, run, write_config
from tests.support.helpers import SGD, SaveRounds, blobs, fit, small_cnn, with_task, write_cifar10_folders

pytestmark = pytest.mark.first_steps

EVALUATED = {"limit_val_batches": 1.0, "num_sanity_val_steps": 1}
WAY_OUT = (
    "make the model with 3 outputs (fl_lightning.models.library_model does so for a function of torchvision), "
    "or use a task of your own"
)


class Passes(nn.Module):
    """Hands its input on, and counts the passes and their samples."""

    def __init__(self):
        super().__init__()
        self.samples = []

    def forward(self, inputs):
        self.samples.append((len(inputs), self.training))
        return inputs


def data(classes=3, server=True):
    found = blobs()
    found.num_classes = classes
    if not server:
        found.server = None
    return found


def module(outputs=5, kind=FederatedModule, **settings):
    # a model with a list of its passes does not pass the check of the first steps
    settings = {"local_steps": 1, "check_first_steps": False, **settings}
    return kind(nn.Sequential(Passes(), small_cnn(classes=outputs)), SGD, **settings)


def refused(call):
    with pytest.raises(ConfigurationError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("server", "settings"),
    [(True, EVALUATED), (True, {}), (False, {})],
    ids=["evaluated", "not evaluated", "no data"],
)
@pytest.mark.parametrize("outputs", [2, 5])
def test_a_wrong_head_is_refused_before_round_1(outputs, server, settings):
    wrong = module(outputs)
    line = refused(lambda: fit(wrong, data(server=server), 1, **settings))
    assert (
        line == f"model: Sequential has {outputs} outputs, but FederatedDataModule has 3 classes; {WAY_OUT}"
    )
    assert not any(training for _, training in wrong.model[0].samples)


def test_a_wrong_head_is_refused_by_an_evaluation(tmp_path):
    fit(module(), data(classes=None), 1, [SaveRounds(tmp_path)])
    trainer = L.Trainer(
        accelerator="cpu", precision="64-true", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )  # fmt: skip
    for evaluate in (trainer.validate, trainer.test):
        line = refused(
            lambda evaluate=evaluate: evaluate(module(), datamodule=data(), ckpt_path=tmp_path / "1.ckpt")
        )
        assert line.startswith("model: Sequential has 5 outputs, but FederatedDataModule has 3 classes")


def test_one_pass_over_two_samples_checks_a_run_without_evaluation_and_changes_nothing():
    looked, plain = module(3), module(3)
    fit(looked, data(server=False), 2)
    fit(plain, data(classes=None, server=False), 2)
    assert looked.model[0].samples == [(2, False), *plain.model[0].samples]
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in looked.state_dict().items())


def test_the_check_leaves_the_model_and_the_generators_as_they_are():
    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module):  # before the module's own
            self.before = deepcopy(pl_module.state_dict()), torch.get_rng_state()
            self.modes = [one.training for one in pl_module.modules()]

        def on_train_epoch_start(self, trainer, pl_module):
            now = pl_module.state_dict()
            assert all(torch.equal(value, now[name]) for name, value in self.before[0].items())
            assert torch.equal(torch.get_rng_state(), self.before[1])
            assert [one.training for one in pl_module.modules()] == self.modes

    fit(module(3), data(server=False), 1, [Look()])


def test_an_evaluation_before_round_1_is_the_check():
    looked, plain = module(3), module(3)
    fit(looked, data(), 1, **EVALUATED)
    fit(plain, data(classes=None), 1, **EVALUATED)
    assert looked.model[0].samples == plain.model[0].samples


class Two(Dataset):
    """Samples with two inputs."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return (torch.full((4,), float(index)), torch.ones(4)), index % 3


class TwoInputs(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Two(), batch_size=4)


class Sum(nn.Linear):
    def forward(self, inputs):
        first, second = inputs
        return super().forward(first + second)


@pytest.mark.parametrize("metrics", [{}, {"f1": partial(F1Score, task="multiclass", num_classes=3)}])
def test_a_model_of_two_inputs_trains_without_an_evaluation(metrics):
    found = FederatedDataModule([TwoInputs(), TwoInputs()])
    found.num_classes = 3
    run = FederatedModule(Sum(4, 3), SGD, local_steps=1, metrics=metrics)
    assert fit(run, found, 1, precision="32-true").global_step == 1


class OwnLoss(NetworkTask):
    def client_loss(self, batch):
        return self.model(batch[0]).square().mean()


class OwnEvaluation(NetworkTask):
    def evaluate_batch(self, batch, evaluation):
        inputs, targets = batch
        outputs = self.model(inputs)[:, :3]
        evaluation.update(outputs, targets, self.loss(outputs, targets), self.task)


class OwnTask(Classification):
    def scores(self, outputs):
        return outputs[:, :3]


@pytest.mark.parametrize("settings", [EVALUATED, {}], ids=["evaluated", "not evaluated"])
@pytest.mark.parametrize(
    "made",
    [
        lambda: module(5, with_task(OwnLoss)),
        lambda: module(5, with_task(OwnEvaluation)),
        lambda: module(5, task=OwnTask()),
    ],
    ids=["client_loss", "evaluate_batch", "task"],
)
def test_outputs_of_another_kind_are_the_users_own(made, settings):
    assert fit(made(), data(), 1, **settings).global_step == 1


def test_targets_that_are_no_labels_are_not_refused():
    found = data()
    for client in found._clients:
        client.dataset.tensors = (client.dataset.tensors[0], torch.rand(40, 5, dtype=torch.float64))
    found.server = None
    assert fit(module(5, loss=nn.MSELoss()), found, 1).global_step == 1


def test_a_segmentation_has_an_output_for_each_class():
    images = torch.randn(8, 2, 6, 6, dtype=torch.float64)

    class Scenes(L.LightningDataModule):
        def train_dataloader(self):
            dataset = torch.utils.data.TensorDataset(images, torch.randint(3, (8, 6, 6)))
            return torch.utils.data.DataLoader(dataset, 4)

    found = FederatedDataModule([Scenes(), Scenes()])
    found.num_classes = 3

    def segmenting(outputs):
        model = nn.Sequential(nn.Conv2d(2, outputs, 3, stride=2), nn.BatchNorm2d(outputs))
        return FederatedModule(model, SGD, local_steps=1, task=Segmentation())

    assert "has 4 outputs, but FederatedDataModule has 3 classes" in refused(
        lambda: fit(segmenting(4), found, 1)
    )
    assert fit(segmenting(3), found, 1).global_step == 1


@pytest.mark.parametrize(
    "before", [(), ("--trainer.num_sanity_val_steps", 0)], ids=["evaluated", "not evaluated"]
)
def test_a_function_whose_classes_nobody_sets_is_refused_on_the_command_line(
    before, capsys, tmp_path, monkeypatch
):
    write_cifar10_folders()
    images = {"class_path": "CIFAR10", "init_args": {"image_size": 32, "num_clients": 2, "batch_size": 4}}
    (tmp_path / "nets.py").write_text(
        "from torch import nn\nfrom torchvision.models import mobilenet_v3_small\n"
        "def fixed() -> nn.Module:\n    return mobilenet_v3_small()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = {"class_path": "nets.fixed"}
    write_config({"model.model": model, "data": images, "trainer.callbacks": []})
    one = ("--trainer.max_epochs", 1, "--trainer.devices", 1)
    line = message_of(capsys, lambda: run(*one, *before))
    assert line == (
        "error: model: MobileNetV3 has 1000 outputs, but CIFAR10 has 10 classes; make the model with 10 outputs "
        "(fl_lightning.models.library_model does so for a function of torchvision), or use a task of your own\n"
    )
    assert not Path("runs").exists()
    settings = {"function": "torchvision.models.mobilenet_v3_small"}
    model = {"class_path": "fl_lightning.models.library_model", "init_args": settings}
    write_config({"model.model": model, "data": images, "trainer.callbacks": []})
    assert run(*one, *before).trainer.global_step == 1
