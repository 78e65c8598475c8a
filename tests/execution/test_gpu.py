"""On a CUDA device: the numbers of the CPU, and no waiting for the device between local steps.

Run with ``CUDA_VISIBLE_DEVICES=0 python -m pytest -m gpu``; everywhere else these are skipped.
"""

import re
from copy import deepcopy

import pytest
import torch
from test_graphs import REFUSED, Counts, refused
from torch import nn

from fl_lightning import (
    FederatedCallback,
    FederatedModule,
    GraphExecutor,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.datamodules import Digits
from fl_lightning.errors import CannotVectorize
from tests.support.helpers import States, blobs, fit, small_cnn
from tests.support.lightning_sites import Lit, federated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = {"accelerator": "gpu", "devices": 1}
MAKERS = {
    "sequential": SequentialExecutor,
    "vectorized": VectorizedExecutor,
    "graphs": GraphExecutor,
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
def test_a_gpu_computes_what_the_cpu_computes(executor, caplog):
    _, reference = states(SequentialExecutor(), blobs())
    module, found = states(MAKERS[executor](), blobs(), accelerator="gpu", devices=1)
    for first, second in zip(reference, found, strict=True):
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=1e-8, atol=1e-10)
    if executor == "chosen":
        assert isinstance(module.executor, GraphExecutor)
    assert "no CUDA graphs" not in caplog.text


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("executor", MAKERS)
def test_a_lightning_module_on_a_gpu_trains_and_logs_as_on_a_cpu(executor, metrics):
    if executor == "vectorized" and metrics:
        words = "training_step of Lit updates the metric object 'train_acc'"
        with pytest.raises(CannotVectorize, match=words):
            federated(Lit(metrics=True), executor=VectorizedExecutor(), trainer=GPU)
        return
    start = Lit(metrics=metrics)
    found = []
    for make, trainer in ((SequentialExecutor, {}), (MAKERS[executor], GPU)):
        run = federated(deepcopy(start), rounds=4, executor=make(), trainer=trainer)
        found.append((run.state_dict(), run.metrics))
    (expected, logged), (state, metrics) = found
    for name, value in expected.items():
        torch.testing.assert_close(state[name].cpu(), value, rtol=1e-8, atol=1e-10)
    names = [name for name in logged if name.startswith(("train_", "val_", "train/loss"))]
    assert {n: metrics[n] for n in names} == pytest.approx({n: logged[n] for n in names}, rel=1e-6)


class NeverWaits(FederatedCallback):
    """Makes every wait for the device between the first and the last local step an error."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        torch.cuda.set_sync_debug_mode("error" if step < max(cohort.local_steps) - 1 else "default")

    def on_exception(self, trainer, pl_module, exception):
        torch.cuda.set_sync_debug_mode("default")  # or the teardown raises an error that hides this one


# computed steps fail as well: one mixes devices, the other reads the memory of a GPU
FAIL = {"a tensor of the CPU", "numpy"}
NAMED = "Model: |Sequential: |random numbers of the CPU|writes the attribute|of a replayed local step"


# vmap, which computes instead, says that it repeats an operation for each client
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", sorted(REFUSED.keys() - FAIL))
def test_what_no_graph_can_hold_is_computed_and_named(name, caplog):
    kind, _ = REFUSED[name]
    Counts.passes = 0
    fit(refused(kind, GraphExecutor()), blobs(), 3, accelerator="gpu", devices=1)
    lines = [x.getMessage() for x in caplog.records if "no CUDA graphs" in x.getMessage()]
    assert len(lines) == 1
    assert re.search(NAMED, lines[0]), lines


class Draws(nn.Sequential):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


def test_graphs_draw_the_random_numbers_of_the_sequential_executor(caplog):
    found = []
    for executor in (SequentialExecutor(), GraphExecutor()):
        seen, module = (
            States(),
            FederatedModule(Draws(*small_cnn("bn")), momentum, local_steps=3, executor=executor),
        )
        fit(module, blobs(), 3, [seen], accelerator="gpu", devices=1)
        found.append(seen.states)
    for first, second in zip(*found, strict=True):
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=1e-8, atol=1e-10)
    assert "no CUDA graphs" not in caplog.text


def layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Dropout(0.2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def errors(executor, accelerator):
    """Error of each tensor in float32 against float64 after two rounds: the root mean square over six runs."""
    data = Digits(num_clients=3, batch_size=10, max_examples=300)
    data.prepare_data()
    squares = {}
    for seed in range(6):
        exact, found = (
            trained_digits(layers(seed), data, make, accelerator=accelerator, devices=1, precision=precision)
            for make, precision in ((SequentialExecutor, "64-true"), (executor, "32-true"))
        )
        for name, value in exact.items():
            squares[name] = squares.get(name, 0.0) + float((found[name].double() - value).square().mean())
    return {name: (square / 6) ** 0.5 for name, square in squares.items()}


def trained_digits(model, data, executor, **trainer):
    # compiled passes round differently
    own = executor(compile=False) if executor is SequentialExecutor else executor()
    module = FederatedModule(model, momentum, local_steps=3, executor=own, check_first_steps=False)
    fit(module, data, 2, **trainer)
    return {name: value.cpu() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("executor", "accelerator"), [(GraphExecutor, "gpu")])
def test_graphs_are_as_accurate_as_computed_steps(executor, accelerator, caplog):
    graphs, eager = errors(executor, accelerator), errors(SequentialExecutor, accelerator)
    assert max(eager.values()) > 1e-9  # float32
    assert {name for name, error in graphs.items() if error > 1.5 * eager[name]} == set()
    assert "no CUDA graphs" not in caplog.text


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
