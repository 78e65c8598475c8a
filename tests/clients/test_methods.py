"""Each method trains and evaluates a LightningModule as it trains the same network with a loss and an optimizer."""

from zlib import crc32

import lightning as L
import pytest
from torch.nn.functional import cross_entropy

from fl_lightning import ConfigurationError, FederatedModule, VectorizedExecutor
from tests.support.contract import EVERY_METHOD_OF_BATCHES, method_of
from tests.support.helpers import SGD, Rows, States, blobs, fit, small_cnn
from tests.support.outcomes import assert_same

REFUSED = {
    "ClassifierBias": "measures class scores, which the validation_step",
    "GradientInversion": "the attack cannot simulate a LightningModule's training_step",
    "LabelInference": "the server cannot simulate a LightningModule's training_step",
}
EVALUATED = {"limit_val_batches": 1.0}


class LitCNN(L.LightningModule):
    """The network of ``small_cnn`` with the same names of parameters, and an optimizer of its own."""

    def __init__(self, optimizer):
        super().__init__()
        for name, layer in small_cnn().named_children():
            self.add_module(name, layer)
        self.optimizer = optimizer

    def forward(self, inputs):
        for layer in self.children():
            inputs = layer(inputs)
        return inputs

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("train/own_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        scores = self(batch[0])
        self.log("val/loss", cross_entropy(scores, batch[1]))
        self.log("val/accuracy", (scores.argmax(1) == batch[1]).double().mean())

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def trained(row, module, executor):
    seen, rows = States(), Rows()
    fit(module, blobs(), 4, [method_of(row), seen, rows], **EVALUATED)
    return seen.states, rows.rows


@EVERY_METHOD_OF_BATCHES  # the others refuse a LightningModule
def test_a_method_treats_a_lightning_module_as_the_same_network(row):
    executor = VectorizedExecutor() if crc32(row.name.encode()) % 2 else None
    settings = {"local_steps": 2, "client_optimizer": SGD, **row.module}
    if "local_epochs" in settings:
        settings.pop("local_steps")
    plain = FederatedModule(small_cnn(), executor=executor, **settings)
    optimizer = settings.pop("client_optimizer")
    own = FederatedModule(LitCNN(optimizer), executor=executor, **settings)
    if row.callback in REFUSED:
        with pytest.raises(ConfigurationError, match=f"{row.callback}: {REFUSED[row.callback]}"):
            trained(row, own, executor)
        return
    expected, rows = trained(row, plain, executor)
    found, own_rows = trained(row, own, executor)
    assert_same(expected, found)
    for number, line in rows.items():
        measured = {n for n in line if n.startswith("val/") and ("accuracy" in n or "loss" in n)}
        measured -= {n for n in measured if n.startswith("val/pooled_")}  # a module computes its own metrics
        assert measured <= own_rows[number].keys()
        for name in (name for name in measured if not name.endswith("gap")):
            assert own_rows[number][name] == pytest.approx(line[name], abs=1e-6), name
        assert own_rows[number]["train/own_loss"] > 0
