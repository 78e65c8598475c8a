"""TensorFloat-32: off unless asked for, in training and evaluation."""

import pytest
import torch

from fl_lightning import FederatedCallback, FederatedModule
from tests.support.helpers import SGD, blobs, fit, small_cnn


class Looks(FederatedCallback):
    def __init__(self):
        self.seen = set()

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.seen.add((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))

    def on_test_start(self, trainer, pl_module):
        self.on_after_local_backward(trainer, pl_module, None, 0)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("before", [(True, False), (False, True)])
def test_tf32_is_as_the_module_says(tf32, before):
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    looks, data = Looks(), blobs()
    module = FederatedModule(small_cnn("bn"), SGD, local_steps=1, tf32=tf32)
    trainer = fit(module, data, 1, [looks])
    trainer.test(module, datamodule=data, verbose=False)
    assert looks.seen == {(tf32, tf32)}


def test_tf32_is_off_by_default():
    assert FederatedModule(small_cnn("bn"), SGD, local_steps=1).tf32 is False
