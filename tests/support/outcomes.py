"""What training leaves behind, to compare executors by."""

from copy import deepcopy
from functools import partial

import torch
from torch.utils._pytree import tree_leaves

from fl_lightning import FederatedModule, SequentialExecutor
from fl_lightning.callbacks import FixBN, MaintainedMomentum
from fl_lightning.cohort.client_memory import contents
from tests.support.helpers import States, blobs, fit, small_cnn

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
METHODS = {
    "fedavg": list,
    "fixbn": lambda: [FixBN(freeze_round=1)],
    "local momentum": lambda: [MaintainedMomentum("local")],
    "global momentum": lambda: [MaintainedMomentum("global")],
    "fixbn and local momentum": lambda: [FixBN(freeze_round=1), MaintainedMomentum("local")],
    "frozen affine and global momentum": lambda: [FixBN(1, freeze="both"), MaintainedMomentum("global")],
}


def outcome(model, data, executor, callbacks=(), rounds=3, **settings):
    """Everything that training leaves behind: server state, callback state and the losses, as tensors by name."""
    settings = {"client_optimizer": MOMENTUM, "local_steps": 2, **settings}
    module = FederatedModule(deepcopy(model), executor=executor, **settings)
    fit(module, data, rounds, callbacks)
    kept = [leaf for callback in callbacks for leaf in tree_leaves(contents(callback.state_dict()))]
    memory = {f"callback {i}": leaf for i, leaf in enumerate(kept)}
    return {**module.state_dict(), **memory, "loss": torch.tensor(module.metrics["train/loss"])}


def same(first, second):
    """Whether two states are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def states(ranks=1, data=None, model=None, rounds=3, module=FederatedModule, callbacks=(), **settings):
    """The server's state after each round of a run on some ranks, each with one thread."""
    seen = States()
    settings = {"client_optimizer": MOMENTUM, "local_steps": 2, "executor": SequentialExecutor(), **settings}
    own = module(model or small_cnn(), **settings)
    fit(own, data or blobs(), rounds, [*callbacks, seen], devices=ranks, strategy="cohort")
    return seen.states


def assert_same(first, second):
    """Two runs have the same states after each round, bit for bit."""
    assert len(first) == len(second) > 0
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
