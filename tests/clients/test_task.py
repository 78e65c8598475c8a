"""What a client computes is asked of one interface, whatever the kind of model."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import fl_lightning
from fl_lightning import ConfigurationError, FederatedModule, NetworkTask, callbacks
from fl_lightning.clients import ClientTask
from fl_lightning.testing import SGD, blobs, distance, fit, small_cnn

PACKAGE = Path(fl_lightning.__file__).parent


class TwoPasses(ClientTask):
    """A third kind of client: its loss needs the outputs for the inputs and for the mirrored inputs."""

    def take_settings(self, given):
        self.optimizer, self.task, self.loss = (
            given.client_optimizer,
            fl_lightning.Classification(),
            cross_entropy,
        )

    def client_loss(self, batch):
        inputs, targets = batch
        return self.loss(self.model(inputs), targets) + self.loss(self.model(inputs.flip(-1)), targets)

    def evaluate_batch(self, batch, evaluation):
        inputs, targets = batch
        outputs = self.model(inputs)
        evaluation.update(outputs, targets, self.loss(outputs, targets))


def by_hand(steps):
    """The state after local steps of one client in plain PyTorch."""
    model, data = small_cnn().double(), blobs(num_clients=1, sizes=[40])
    data.setup("fit")
    optimizer = SGD(model.parameters())
    for step in range(steps):
        inputs, targets = data.cohort_batch([0], [step]).batches()[0]
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets) + cross_entropy(model(inputs.flip(-1)), targets)
        loss.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("executor", [None, fl_lightning.VectorizedExecutor()], ids=["alone", "at once"])
def test_a_third_kind_of_client_trains_as_in_plain_pytorch(executor):
    module = FederatedModule(TwoPasses(small_cnn()), SGD, local_steps=2, executor=executor)
    fit(module, blobs(num_clients=1, sizes=[40]), 2)
    assert distance(module.state_dict(), by_hand(4)) < 1e-12


def test_a_third_kind_of_client_has_methods_and_evaluations():
    module = FederatedModule(TwoPasses(small_cnn()), SGD, local_steps=2)
    fit(module, blobs(), 2, [callbacks.FedBN(), callbacks.ClientEvaluation()], limit_val_batches=1.0)
    assert {"val/accuracy", "val/personal_accuracy", "val/client_accuracy"} <= module.metrics.keys()


def test_a_network_of_its_own_loss_keeps_the_settings_of_a_network():
    class Doubled(NetworkTask):
        def client_loss(self, batch):
            return 2 * super().client_loss(batch)

    module = FederatedModule(Doubled(small_cnn()), SGD, local_steps=1, participation=1.0)
    fit(module, blobs(), 1)
    with pytest.raises(ConfigurationError, match=r"model\.client_optimizer: required"):
        FederatedModule(Doubled(small_cnn()), local_steps=1)
    usual = FederatedModule(
        small_cnn(), lambda p: torch.optim.SGD(p, lr=2 * SGD([torch.ones(1)]).defaults["lr"]), local_steps=1
    )
    fit(usual, blobs(), 1)
    assert distance(module.state_dict(), usual.state_dict()) < 1e-12


def test_one_task_may_serve_several_runs():
    task = NetworkTask(small_cnn())
    losses = [torch.nn.CrossEntropyLoss(ignore_index=index) for index in (0, 1)]
    runs = [FederatedModule(task, SGD, local_steps=1, loss=loss) for loss in losses]
    assert [run.client.loss for run in runs] == losses
    assert [run.client.task.ignored for run in runs] == [0, 1]
    assert [run.client.run for run in runs] == runs


def test_no_other_package_asks_for_the_kind_of_client():
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "clients"]
    files += [path for name in ("callbacks", "datamodules") for path in (PACKAGE.parent / name).rglob("*.py")]
    kinds = re.compile("LightningModuleTask|ModuleEvaluation|ModuleTask|trains_itself|client_module")
    asking = [path.name for path in files if kinds.search(path.read_text())]
    assert len(files) > 200
    assert asking == []
