"""On a CUDA device: the numbers of the CPU, and no waiting for the device between local steps.

Run with ``CUDA_VISIBLE_DEVICES=0 python -m pytest -m gpu``; everywhere else these are skipped.
"""

import pytest
import torch
from helpers import States, blobs, fit, small_cnn

from fl_lightning import FederatedCallback, FederatedModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.datamodules import Digits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAKERS = {
    "sequential": SequentialExecutor,
    "vectorized": VectorizedExecutor,
    "chosen": lambda: None,
}


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def states(executor, data, **trainer):
    seen = States()
    model = small_cnn("bn", dropout=0.5)
    module = FederatedModule(model, momentum, local_steps=3, executor=executor)
    fit(module, data, 3, [seen], **trainer)
    return module, [{name: value.cpu() for name, value in state.items()} for state in seen.states]


@pytest.mark.parametrize("executor", MAKERS)
def test_a_gpu_computes_what_the_cpu_computes(executor):
    _, reference = states(SequentialExecutor(), blobs())
    module, found = states(MAKERS[executor](), blobs(), accelerator="gpu", devices=1)
    for first, second in zip(reference, found, strict=True):
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=1e-8, atol=1e-10)
    if executor == "chosen":
        assert isinstance(module.executor, VectorizedExecutor)


class NeverWaits(FederatedCallback):
    """Makes every wait for the device between the first and the last local step an error."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        torch.cuda.set_sync_debug_mode("error" if step < max(cohort.local_steps) - 1 else "default")

    def on_exception(self, trainer, pl_module, exception):
        torch.cuda.set_sync_debug_mode("default")  # or the teardown raises an error that hides this one


# the warning that this mode of PyTorch is a prototype
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_local_steps_never_wait_for_the_device():
    data = Digits(num_clients=4, batch_size=10, crop_padding=1, horizontal_flip=True)
    data.prepare_data()
    from fl_lightning.models import LeNet

    model = LeNet(in_channels=1, image_size=8)
    module = FederatedModule(model, momentum, local_steps=4, executor=VectorizedExecutor())
    try:
        fit(module, data, 3, [NeverWaits()], accelerator="gpu", devices=1, precision="32-true")
    finally:
        torch.cuda.set_sync_debug_mode("default")
