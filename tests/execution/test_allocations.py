"""Within local steps, the framework allocates nothing beside batches, and reads no tensor, while graphs are replayed."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from test_graphs import Spare
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fl_lightning
from fl_lightning import FederatedCallback, FederatedModule
from fl_lightning.callbacks import SCAFFOLD, ClientGradientClipping, FedProx, FixBN
from fl_lightning.datamodules import Digits
from tests.support.helpers import blobs, fit, small_cnn
from tests.support.outcomes import MOMENTUM
from tests.support.recorded_calls import RecordingExecutor

ROOT = f"{Path(fl_lightning.__file__).parent}/"
_aten = torch.ops.aten


class Watched(TorchDispatchMode):
    """Collects the functions that allocate memory, and the functions that read a tensor.

    Replays are left out, and so are torch's optimizers and the data.
    """

    def __init__(self):
        super().__init__()
        self.watches, self.allocates, self.reads = False, set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if self.watches and (place := caller()):
            known = places((args, kwargs))
            if function.overloadpacket is _aten.lift_fresh or places(results) - known:
                self.allocates.add(place)
            if function.overloadpacket is _aten._local_scalar_dense:
                self.reads.add(place)
        return results


def places(tree):
    return {x.untyped_storage()._cdata for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}


def caller():
    """The project's function that runs, as ``"module.function"``; None where another's code decides."""
    frame, name = sys._getframe(2), None
    while frame is not None:
        path, function = Path(frame.f_code.co_filename), frame.f_code.co_name
        if path.name in ("recorded_calls.py", "sgd.py", "adam.py") or function == "client_batches":
            return None
        # before Python 3.12, comprehensions are functions of their own
        if name is None and str(path).startswith(ROOT) and not function.startswith("<"):
            name = f"{path.stem}.{function}"
        frame = frame.f_back
    return name


class BetweenSteps(FederatedCallback):
    """Watches the local steps of round 3, except for the first one; must be last in the list."""

    def __init__(self, watched):
        self.watched = watched

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.watched.watches = cohort.round == 3 and step + 1 < max(cohort.local_steps)


class Copies(FederatedCallback):
    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.copies = [block.clone() for block in cohort.params.blocks.values()]


class Reads(FederatedCallback):
    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.norm = float(cohort.losses[0])


def digits():
    data = Digits(3, batch_size=10, crop_padding=1, horizontal_flip=True, max_examples=120)
    data.prepare_data()
    return data


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 10)
    ).double()  # fmt: skip


BN = partial(small_cnn, dropout=0.5)
CASES = {
    "images in memory": ({}, [], set()),
    "frozen BN": ({}, [FixBN(freeze_round=1)], set()),
    "adam": ({"client_optimizer": partial(torch.optim.Adam, lr=0.01)}, [], set()),
    "fedprox": ({}, [FedProx()], {"cohort.updates", "context.call_hook"}),
    "scaffold": ({}, [SCAFFOLD()], {"context.call_hook"}),
    "clipping": ({}, [ClientGradientClipping(max_norm=1.0)], {"context.call_hook"}),
    # batches of separate data loaders are stacked
    "loaders": ({"model": BN, "data": blobs}, [], {"batches.stack"}),
    # the state of clients and parameters that rest is saved
    "unused parameters": ({"model": lambda: Spare(*model())}, [], {"skipped_steps._save"}),
    "unequal steps": (
        {"model": BN, "data": lambda: blobs(3, (40, 24, 32)), "local_epochs": 1},
        [],
        {"batches.stack", "cohort.index", "graphs._replayed", "round_cohort.add_losses", "skipped_steps._save", "client._keys"},
    ),
}  # fmt: skip


def watched(settings, callbacks):
    settings = {"client_optimizer": MOMENTUM, "model": model, "data": digits, **settings}
    settings.setdefault("local_steps", None if "local_epochs" in settings else 4)
    make, data = settings.pop("model"), settings.pop("data")()
    with Watched() as watch:
        module = FederatedModule(make(), executor=RecordingExecutor(), **settings)
        fit(module, data, 3, [*callbacks, BetweenSteps(watch)])
    return watch


@pytest.mark.parametrize("name", CASES)
def test_a_local_step_allocates_only_what_is_listed_and_reads_no_tensor(name):
    settings, callbacks, allocates = CASES[name]
    watch = watched(settings, callbacks)
    assert watch.allocates == allocates
    assert watch.reads == set()


def test_a_method_that_allocates_or_reads_is_found():
    assert "context.call_hook" in watched({}, [Copies()]).allocates
    assert watched({}, [Reads()]).reads == {"context.call_hook"}


class Adds(FederatedCallback):
    """Writes to gradients after the backward passes, which may be of unused parameters."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for block in cohort.grads.blocks.values():
            block += 0.01


def test_unused_parameters_that_a_method_moves_are_read():
    assert watched({"model": lambda: Spare(*model())}, [Adds()]).reads == {"skipped_steps._of_step"}
