"""TensorFloat-32: off unless asked for, in training and evaluation, and given back afterwards."""

import pytest
import torch
from helpers import SGD, blobs, fit, small_cnn

from fl_lightning import FederatedCallback, FederatedModule
from fl_lightning.round.trainer import allow_tf32


def allowed():
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


class Looks(FederatedCallback):
    def __init__(self):
        self.seen = set()

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.seen.add(allowed())

    def on_test_start(self, trainer, pl_module):
        self.seen.add(allowed())


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("before", [(True, False), (False, True)])
def test_tf32_is_as_the_module_says_and_as_before_afterwards(tf32, before):
    of_the_others = allow_tf32(*before)
    try:
        looks, data = Looks(), blobs()
        module = FederatedModule(small_cnn("bn"), SGD, local_steps=1, tf32=tf32)
        trainer = fit(module, data, 1, [looks])
        trainer.test(module, datamodule=data, verbose=False)
        assert looks.seen == {(tf32, tf32)}
        assert allowed() == before
    finally:
        allow_tf32(*of_the_others)


def test_tf32_is_off_by_default():
    assert FederatedModule(small_cnn("bn"), SGD, local_steps=1).tf32 is False
