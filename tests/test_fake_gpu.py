"""What can be said of a GPU without one: devices never mix, and local steps never wait for the device."""

import pytest
import torch
from fake_gpu import fit
from helpers import SGD
from test_contract import EVERY_ROW, method_of
from torch import nn

from datamodules import Digits
from fl_lightning import FederatedCallback, FederatedModule, SequentialExecutor, VectorizedExecutor

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Dropout(0.5), nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip


class LocalSteps(FederatedCallback):
    """Where the CPU waits for the GPU between the first local step of a round and the last one; must be last in the list."""

    def __init__(self):
        self.waits = []

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        gpu = torch.utils._python_dispatch._get_current_dispatch_mode()
        if step > 0:
            self.waits += gpu.waits[self.before :]
        self.before = len(gpu.waits)


def train(callbacks=(), rounds=3, **settings):
    """Where the CPU has waited within local steps."""
    data = Digits(num_clients=4, batch_size=10, crop_padding=1, horizontal_flip=True, max_examples=120)
    data.prepare_data()
    settings = {"client_optimizer": SGD, "local_steps": 3, **settings}
    steps = LocalSteps()
    waits = fit(FederatedModule(model(), **settings), data, rounds, [*callbacks, steps])
    assert waits  # losses are read once a round
    return steps.waits


@EVERY_ROW
@EXECUTORS
def test_every_method_keeps_to_the_device_and_its_local_steps_never_wait(row, executor):
    assert train([method_of(row)], executor=executor(), **row.module) == []
