"""A LightningModule without a ``training_step`` is a network. One with a ``training_step`` brings its own optimizer."""

import sys
from copy import deepcopy

import lightning as L
import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedModule, Run
from fl_lightning.execution.vectorized import VectorizedExecutor
from tests.support.command_line import message_of, run
from tests.support.helpers import SGD, blobs, small_cnn, train


class Network(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = small_cnn()

    def forward(self, inputs):
        return self.network(inputs)


class Trains(Network):
    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()


class Inherits(Trains):
    pass


class OtherPackage(nn.Module):
    """The same base class of the package pytorch_lightning, which is not installed."""

    LightningModule = type("LightningModule", (L.LightningModule,), {})


class TrainsThere(OtherPackage.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = small_cnn()

    def training_step(self):
        return 1.0


OWN = "has a training_step and a configure_optimizers of its own, which decide this; leave the setting out"


@pytest.mark.parametrize("make", [Trains, Inherits, TrainsThere])
def test_a_client_optimizer_beside_a_training_step_is_refused(make):
    with pytest.raises(ConfigurationError) as error:
        FederatedModule(make(), SGD, local_steps=1)
    assert str(error.value) == f"client_optimizer: {make.__name__} {OWN}"


def test_a_federated_module_is_no_model():
    with pytest.raises(
        ConfigurationError, match="model: FederatedModule sets automatic_optimization = False"
    ):
        FederatedModule(FederatedModule(small_cnn(), SGD, local_steps=1), local_steps=1)


def test_a_network_needs_a_client_optimizer():
    with pytest.raises(
        ConfigurationError, match="client_optimizer: required, as the model has no training_step"
    ):
        FederatedModule(small_cnn(), local_steps=1)


def test_a_module_of_a_users_own_network_may_have_a_training_step():
    """As a pretrained encoder, whose forward pass is all that the network uses."""
    torch.manual_seed(0)
    inner = Trains()
    state = train(nn.Sequential(deepcopy(inner)), blobs(), rounds=1)
    plain = train(nn.Sequential(deepcopy(inner.network)), blobs(), rounds=1)
    for first, second in zip(state.values(), plain.values(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_run_from_python_refuses_a_module_that_is_not_federated(tmp_path):
    with pytest.raises(ConfigurationError, match=r"module: Trains; give a FederatedModule"):
        Run(Trains(), blobs(), run_root=tmp_path)


CODE = """
import lightning as L
from torch import nn


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        return None
"""


def test_the_command_line_refuses_an_optimizer_beside_the_class(tmp_path, monkeypatch, capsys):
    (tmp_path / "lit.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    line = message_of(capsys, lambda: run("--model.model", "lit.Lit"))
    sys.modules.pop("lit")
    assert line == f"error: client_optimizer: Lit {OWN}\n"


@pytest.mark.parametrize("executor", [None, VectorizedExecutor()])
def test_a_lightning_module_without_a_training_step_trains_as_its_network(executor):
    plain = small_cnn()
    wrapped = Network()
    wrapped.network = deepcopy(plain)
    expected = train(plain, blobs(), 2)
    found = train(wrapped, blobs(), 2, executor=executor)
    assert all(
        torch.allclose(found[f"network.{name}"], value, atol=1e-12) for name, value in expected.items()
    )
