"""What every method owes its users, from one table: a new callback needs one row here and no test of its own."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from helpers import SGD, SaveRounds, States, blobs, distance, fit, small_cnn
from readme_code import methods
from torch.utils._pytree import tree_flatten_with_path

import callbacks
from fl_lightning import FederatedCallback, FederatedModule, SequentialExecutor, VectorizedExecutor

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
FEDAVGM = partial(torch.optim.SGD, lr=1.0, momentum=0.5)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)


class Row(NamedTuple):
    """A method (``README's X`` for the class in the README's text), its settings, and those of the module that it needs."""

    callback: str
    settings: dict[str, Any]
    module: dict[str, Any]
    observer: bool = False
    """Whether it only looks: training stays as it is without it."""


TABLE = [
    Row("FBN", {"wire": "run"}, {}),
    Row("FBN", {"wire": "batch", "ema": "per_round"}, {"client_optimizer": MOMENTUM}),
    Row("FixBN", {"freeze_round": 2}, {}),
    Row("FixBN", {"freeze_round": 1, "freeze": "both"}, {"server_optimizer": FEDAVGM}),
    Row("FixBN", {"freeze_fraction": 0.5, "freeze": "affine"}, {"client_optimizer": MOMENTUM}),
    Row("MaintainedMomentum", {"scope": "local"}, {"client_optimizer": MOMENTUM}),
    Row("MaintainedMomentum", {"scope": "global"}, {"client_optimizer": MOMENTUM}),
    Row("MaintainedMomentum", {"scope": "local"}, {"client_optimizer": ADAM}),
    Row("MaintainedMomentum", {"scope": "global"}, {"client_optimizer": ADAM}),
    Row("FedBN", {}, {}),
    Row("FedTAN", {}, {"client_optimizer": MOMENTUM}),
    Row("FedTAN", {"backward": "own", "affine_init": "uniform"}, {}),
    # with all clients in every round its server's state is that of FedAvg
    Row("SiloBN", {"evaluate_clients": 2}, {"participation": 2}),
    Row("SlidingWindowFixBN", {"window": 2, "threshold": 1e9}, {}),
    Row("MomentMatching", {}, {}),
    Row("FedDNA", {}, {}),
    Row("FedDNA", {"divergence": "reverse_kl", "between": False}, {}),
    Row("StaticBN", {}, {}),
    Row("StaticBN", {"statistics_pass": "per_client"}, {}),
    Row("StaticBN", {"statistics_pass": "per_client_total_variance"}, {}),
    Row("StatisticsSources", {}, {}, observer=True),
    Row("BatchNormDiagnostics", {"every_n_rounds": 1, "window": 2}, {}, observer=True),
    Row("BatchNormDiagnostics", {"every_n_rounds": 2}, {"client_optimizer": MOMENTUM}, observer=True),
    Row("CommunicationLedger", {}, {}, observer=True),
    Row("FedExFixBN", {}, {}),
    Row("FedExFixBN", {"schedule": "aggressive", "cutoff": 0.6}, {}),
    Row("FedProx", {"mu": 0.5}, {}),
    Row("SCAFFOLD", {}, {}),
    Row("SCAFFOLD", {}, {"client_optimizer": ADAM, "participation": 3}),
    Row("ClientGradientClipping", {"max_norm": 0.5}, {}),
    Row("README's FedProx", {"mu": 0.5}, {}),
    Row("README's FedBN", {}, {}),
]
EVERY_ROW = pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.callback}-{row.settings}")
ROUNDS = 4


def method_of(row):
    """A row's callback."""
    name = row.callback.removeprefix("README's ")
    home = callbacks if name == row.callback else methods()
    return getattr(home, name)(**row.settings)


def run(row, rounds=ROUNDS, extra=(), ckpt_path=None, **settings):
    """A module after training with the method of a row."""
    settings = {"client_optimizer": SGD, "local_steps": 2, **row.module, **settings}
    module = FederatedModule(small_cnn(), **settings)
    fit(module, blobs(4, (24, 40, 32)), rounds, [method_of(row), *extra], ckpt_path)
    return module


def contents(path):
    """A checkpoint's tensors and numbers by their place in it, without times and Lightning's own bookkeeping."""
    checkpoint = torch.load(path, weights_only=True)
    kept = {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "callbacks", "fl_lightning")}
    leaves, _ = tree_flatten_with_path(kept)
    texts = {"".join(map(str, place)): leaf for place, leaf in leaves}
    return {place: leaf for place, leaf in texts.items() if "seconds" not in place and "time/" not in place}


def test_every_exported_method_has_a_row():
    exported = {name for name in callbacks.__all__ if issubclass(getattr(callbacks, name), FederatedCallback)}
    assert exported <= {row.callback for row in TABLE}


@EVERY_ROW
def test_a_method_trains(row):
    losses = []

    class Losses(FederatedCallback):
        def on_train_epoch_end(self, trainer, pl_module):
            losses.append(float(trainer.callback_metrics["train/loss"]))

    run(row, 8, [Losses()])
    assert torch.tensor(losses).isfinite().all()
    assert sum(losses[-2:]) < sum(losses[:2])


@EVERY_ROW
@pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
def test_a_resumed_method_ends_in_the_same_checkpoint_bit_for_bit(row, executor, tmp_path):
    settings = {"participation": 2, "local_steps": None, "local_epochs": 1, "executor": executor()}
    run(row, extra=[SaveRounds(tmp_path)], **settings)
    whole = contents(tmp_path / f"{ROUNDS}.ckpt")
    for start in (1, 2, 3):
        run(row, extra=[SaveRounds(tmp_path)], ckpt_path=tmp_path / f"{start}.ckpt", **settings)
        resumed = contents(tmp_path / f"{ROUNDS}.ckpt")
        assert whole.keys() == resumed.keys()
        different = [
            place
            for place, leaf in whole.items()
            if not (torch.equal(leaf, resumed[place]) if torch.is_tensor(leaf) else leaf == resumed[place])
        ]
        assert different == []


@EVERY_ROW
def test_a_method_runs_alike_under_both_executors(row):
    sequential, vectorised = States(), States()
    run(row, extra=[sequential], executor=SequentialExecutor())
    run(row, extra=[vectorised], executor=VectorizedExecutor())
    for first, second in zip(sequential.states, vectorised.states, strict=True):
        assert distance(first, second) < 1e-10


@EVERY_ROW
def test_a_method_changes_the_training_and_an_observer_does_not(row):
    settings = {"client_optimizer": SGD, "local_steps": 2, **row.module}
    without = FederatedModule(small_cnn(), **settings)
    fit(without, blobs(4, (24, 40, 32)), ROUNDS)
    change = distance(run(row).state_dict(), without.state_dict())
    assert change == 0 if row.observer else change > 1e-4
