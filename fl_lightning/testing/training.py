"""Federated training in float64, and reference training in plain PyTorch."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.methods.callback import FederatedCallback
from fl_lightning.optimizers.settings import OptimizerCallable
from fl_lightning.round.module import FederatedModule
from fl_lightning.testing.clients import Batch, client_batch, union_batch

State = Mapping[str, Tensor]
"""Tensors by name, as in a ``state_dict``."""

SGD = partial(torch.optim.SGD, lr=0.1)
"""Default client optimizer of :func:`train` and of the reference trainers."""


def fit(
    module: FederatedModule,
    data: FederatedDataModule,
    rounds: int,
    callbacks: Iterable[Callback] = (),
    ckpt_path: Any = None,
    **trainer: Any,
) -> L.Trainer:
    """Train on the CPU in float64, without files or evaluations. Return the trainer.

    Args:
        module: The federated module.
        data: The federated data.
        rounds: Number of communication rounds.
        callbacks: Methods and other callbacks.
        ckpt_path: Checkpoint from which training is resumed.
        trainer: Further arguments of the trainer.
    """
    callbacks = list(callbacks)
    settings = {
        "accelerator": "cpu",
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
    }
    with warnings.catch_warnings():
        # ignore warnings about a class that torch 2.15 deprecates, few data workers, and an unused GPU
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        warnings.filterwarnings("ignore", ".*does not have many workers")
        warnings.filterwarnings("ignore", "GPU available but not used")
        runner = L.Trainer(max_epochs=rounds, callbacks=callbacks, **{**settings, **trainer})
        runner.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return runner


def train(
    model: nn.Module,
    data: FederatedDataModule,
    rounds: int,
    callbacks: Iterable[Callback] = (),
    trainer: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Tensor]:
    """Train a model, and return the final state of the server.

    By default, clients take one local step of SGD(lr=0.1) per round.

    Args:
        model: The server's model, changed in place.
        data: The federated data.
        rounds: Number of communication rounds.
        callbacks: Methods and other callbacks.
        trainer: Further arguments of the trainer.
        settings: Further arguments of :class:`~fl_lightning.round.module.FederatedModule`.
    """
    module = FederatedModule(model, **{"client_optimizer": SGD, "local_steps": 1, **settings})
    fit(module, data, rounds, callbacks, **(trainer or {}))
    return {name: value.clone() for name, value in module.state_dict().items()}


def distance(first: State, second: State) -> float:
    """Return the largest absolute difference between the tensors of two states."""
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Take one training step in plain PyTorch, with cross-entropy loss."""
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]  # torch gives it no types
    optimizer.step()


def centralised(
    model: nn.Module,
    data: FederatedDataModule,
    steps: int,
    optimizer: OptimizerCallable = SGD,
    rates: Sequence[float] = (),
    first: int = 0,
    frozen_statistics: bool = False,
) -> dict[str, Tensor]:
    """Train one model on the union of the clients' batches, and return its state.

    If the model has no BN, FedAvg with one local step per round and equal weights must give the
    same state, up to rounding.

    Args:
        model: The model, which does not change.
        data: The federated data.
        steps: Number of steps.
        optimizer: Function that creates the optimizer from parameters.
        rates: Learning rate of each step. Default: the optimizer's learning rate.
        first: Number of the first step, which selects the first batches.
        frozen_statistics: Whether BN layers use frozen running statistics.
    """
    model = deepcopy(model).double().train()
    for layer in model.modules():
        if frozen_statistics and isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    stepper = optimizer(model.parameters())
    for step in range(steps):
        if rates:
            stepper.param_groups[0]["lr"] = rates[step]
        plain_step(model, stepper, union_batch(data, first + step))
    return model.state_dict()


def by_hand(
    model: nn.Module,
    data: FederatedDataModule,
    rounds: int,
    *,
    optimizer: OptimizerCallable = SGD,
    steps: Sequence[int] | Mapping[int, int] | None = None,
    cohort: Callable[[int], Sequence[int]] | None = None,
    weights: Sequence[float] | Mapping[int, float] | None = None,
    keep: bool = False,
    server: Callable[[str, Tensor, Tensor], Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[int, Any]]:
    """Train by FedAvg in plain PyTorch, with a separate model and optimizer for each client.

    Args:
        model: The model, which does not change.
        data: The federated data.
        rounds: Number of communication rounds.
        optimizer: Function that creates the client optimizer from parameters.
        steps: Number of local steps of each client. Default: 1.
        cohort: Function that takes the number of a round and returns the round's clients. Default:
            all clients.
        weights: Aggregation weight of each client, with any sum. Default: equal weights.
        keep: Whether clients keep the state of their optimizer between rounds.
        server: Function of (name, old value, average) that returns the server's new parameter.
            Default: the average.

    Returns:
        The server's state, and the state of each client's optimizer.
    """
    model = deepcopy(model).double().train()
    trained = dict(model.named_parameters())
    memory: dict[int, Any] = {}
    for round_number in range(1, rounds + 1):
        clients = cohort(round_number) if cohort else range(data.num_clients)
        states = []
        for client in clients:
            local = deepcopy(model)
            stepper = optimizer(local.parameters())
            if keep and client in memory:
                stepper.load_state_dict(memory[client])
            count = steps[client] if steps else 1
            for step in range(count):
                plain_step(local, stepper, client_batch(data, client, (round_number - 1) * count + step))
            memory[client] = deepcopy(stepper.state_dict())
            states.append(local.state_dict())
        shares = [weights[client] if weights else 1 for client in clients]
        for name, old in model.state_dict().items():
            held = [state[name] for state in states]
            if old.is_floating_point():
                pairs = zip(shares, held, strict=True)
                new = sum((share * value for share, value in pairs), torch.zeros_like(old)) / sum(shares)
                old.copy_(server(name, old.clone(), new) if server and name in trained else new)
            else:
                old.copy_(torch.stack(held).amax(0))
    return model.state_dict(), memory


class States(Callback):
    """Callback that copies the server's state after each round.

    Attributes:
        states: Copies of the state. ``states[0]`` is the initial state, ``states[r]`` the state
            after round r.
    """

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the server's state before training and after each round."""
        self.states.append(deepcopy(pl_module.state_dict()))

    on_train_epoch_end = on_train_start


class Rows(Callback):
    """Callback that stores the metrics of each round. ``rows[r]`` has the metrics of round r."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the metrics of the previous round."""
        assert isinstance(pl_module, FederatedModule)
        if pl_module.metrics.get("round", 0) == trainer.current_epoch > 0:
            self.rows[trainer.current_epoch] = dict(pl_module.metrics)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the metrics of the last round."""
        assert isinstance(pl_module, FederatedModule)
        self.rows[int(pl_module.metrics["round"])] = dict(pl_module.metrics)


class ClientStates(FederatedCallback):
    """Callback that stores the clients' states twice per round: before and after the local steps.

    Attributes:
        start: States before the local steps, ``start[round][client][name]``.
        end: States after the local steps, ``end[round][client][name]``.
    """

    role = "observer"

    def __init__(self) -> None:
        self.start: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.end: dict[int, dict[int, dict[str, Tensor]]] = {}

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Store the clients' states before the local steps."""
        self.start[cohort.round] = self._states(cohort)

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Store the clients' states after the local steps."""
        self.end[cohort.round] = self._states(cohort)

    @staticmethod
    def _states(cohort: Cohort) -> dict[int, dict[str, Tensor]]:
        return {
            client: {
                name: x.clone() for name, x in (cohort.params.row(row) | cohort.buffers.row(row)).items()
            }
            for row, client in enumerate(cohort.client_ids)
        }
