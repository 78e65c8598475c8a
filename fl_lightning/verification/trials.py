"""Runs of one method in many set-ups, each computed once."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from fl_lightning.client_data.loaders import seed_global_generators
from fl_lightning.executors.base import Executor
from fl_lightning.executors.sequential import SequentialExecutor
from fl_lightning.executors.vectorized import VectorizedExecutor
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.verification.companions import Disturb, Observer, SaveRounds, own_generators
from fl_lightning.verification.federation import SIZES, Disturbance, federation, reference_model
from fl_lightning.verification.observation import Run

_EXECUTORS: dict[str, Callable[[], Executor]] = {
    "sequential": SequentialExecutor,
    "vectorised": VectorizedExecutor,
    "blocks": partial(VectorizedExecutor, 2),
}
_TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "precision": "64-true",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": 2,
    "log_every_n_steps": 1,
}


class FrozenStatistics(FederatedCallback):
    """BN as the affine layer of its initial statistics: a reference."""

    def policy(self, round_number: int, total_rounds: int) -> dict[str, str]:
        """Frozen from the start."""
        return dict.fromkeys(("mean", "var", "counter"), "frozen")


CLIENTS = tuple(range(len(SIZES)))
EVERYONE = (CLIENTS,) * 4
CLIENT_LR = 0.05
SCRIPT = ((0, 2, 3), (1, 3, 4), (0, 2, 4), (1, 2, 3))
"""Cohorts of the rounds: clients come back after an absence, some in another row; client r is absent in round r."""


@dataclass(frozen=True)
class Setup:
    """A run: unless changed, four rounds of one local epoch with three of five clients of unequal size.

    Attributes:
        method: Who takes part: the method under test, nobody (FedAvg), or BN statistics frozen from the start.
        executor: Which executor.
        script: The cohort of each round.
        identities: Which data client i has.
        local_steps: Local steps E; None for a local epoch.
        batch_sizes: Batch size of each client; None for equal ones.
        weighting: As in ``FederatedModule``.
        momentum: Momentum of the client optimizer.
        rests: The round from which on its learning rate is 0; 0 for none.
        server_momentum: Momentum of the server optimizer, which then halves its steps and decays weights, too.
        centralised: Train on the union of the batches.
        norm: The model's norm layers.
        seed: Seed of the run.
        beside: Callbacks of the verification's own on both sides of the method: observers, or noise.
        disturbance: What is changed about a client.
        listens: Keep what BN layers are given.
        resume: Continue from the checkpoint that the federated run of this set-up, one of :data:`SAVED`, wrote after this round.
        repetition: Tells equal runs apart.
    """

    method: Literal["method", "none", "frozen"] = "method"
    executor: Literal["sequential", "vectorised", "blocks"] = "sequential"
    script: tuple[tuple[int, ...], ...] = SCRIPT
    identities: tuple[int, ...] = CLIENTS
    local_steps: int | None = None
    batch_sizes: tuple[int, ...] | None = None
    weighting: Literal["examples", "uniform", "samples"] = "examples"
    momentum: float = 0.9
    rests: int = 0
    server_momentum: float = 0.0
    centralised: bool = False
    norm: Literal["bn", "gn"] = "bn"
    seed: int = 0
    beside: Literal["", "observers", "noise"] = ""
    disturbance: Disturbance | None = None
    listens: bool = False
    resume: int = 0
    repetition: int = 0


USUAL = Setup()
ONE_STEP = Setup(script=EVERYONE, local_steps=1, weighting="samples")
"""Every client takes one local step a round: where federated and centralised training may be equal."""

SAVED = (USUAL, replace(USUAL, executor="vectorised"), replace(USUAL, server_momentum=0.9), ONE_STEP)
"""The runs that write a checkpoint after each round."""

_WITHOUT_METHOD: dict[Setup, Run] = {}
"""Runs of FedAvg and of frozen BN: what every method is compared with."""


class Trials:
    """Runs a method in the set-ups that its properties ask for.

    Args:
        make: Makes the callback: a new object for each run.
        folder: A folder for checkpoints, made where it is needed.
        settings: Settings of ``FederatedModule`` that replace those of the set-ups.
    """

    def __init__(
        self, make: Callable[[], FederatedCallback], folder: Path, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.make, self.folder, self.settings = make, folder, dict(settings or {})
        self._runs: dict[Setup, Run] = {}

    def attempt(self, setup: Setup = USUAL, **changes: Any) -> Run:
        """The run of a set-up with changes, whether or not it came to its end."""
        setup = replace(setup, **changes)
        known = self._runs if setup.method == "method" or self.settings else _WITHOUT_METHOD
        if setup not in known:
            known[setup] = self._start(setup)
        return known[setup]

    def run(self, setup: Setup = USUAL, **changes: Any) -> Run:
        """The run of a set-up with changes.

        Raises:
            Exception: What stopped the run.
        """
        run = self.attempt(setup, **changes)
        if run.error is not None:
            raise run.error
        return run

    def _start(self, setup: Setup) -> Run:
        method = {"method": self.make, "none": lambda: None, "frozen": FrozenStatistics}[setup.method]()
        source = None
        if setup.resume:
            source = self.run(setup, resume=0, centralised=False).folder / f"{setup.resume}.ckpt"
        settings: dict[str, Any] = {
            "client_optimizer": partial(
                torch.optim.SGD, lr=CLIENT_LR, momentum=setup.momentum, weight_decay=0.01
            ),
            "server_optimizer": partial(
                torch.optim.SGD,
                lr=0.5 if setup.server_momentum else 1.0,
                momentum=setup.server_momentum,
                weight_decay=0.02 if setup.server_momentum else 0.0,
            ),
            "client_lr_schedule": lambda number, _: float(not 0 < setup.rests <= number),
            "local_steps": setup.local_steps,
            "local_epochs": None if setup.local_steps else 1,
            "executor": _EXECUTORS[setup.executor](),
            "weighting": setup.weighting,
            "centralised": setup.centralised,
            "seed": setup.seed,
        }
        run = Run(reference_model(setup.norm), **{**settings, **self.settings})
        run.script, run.method, run.folder = setup.script, method, self.folder / str(len(self._runs))
        if setup.listens:
            run.listen()
        callbacks: list[L.Callback] = [] if method is None else [method]
        if setup.disturbance is not None and setup.disturbance.what != ("data",):
            callbacks.insert(0, Disturb(setup.disturbance))
        if setup.beside:
            noise = own_generators(method).values() if setup.beside == "noise" else None
            callbacks = [Observer(noise), *callbacks, Observer(noise)]
        if setup in SAVED:
            run.folder.mkdir(parents=True)
            callbacks.append(SaveRounds(run.folder))
        data = federation(setup.identities, batch_sizes=setup.batch_sizes, disturbance=setup.disturbance)
        with isolate_rng(), warnings.catch_warnings():
            # Lightning's advice on the tiny data, none of the method's business
            warnings.simplefilter("ignore")
            seed_global_generators(0)
            try:
                trainer = L.Trainer(
                    max_epochs=len(setup.script),
                    callbacks=callbacks,
                    enable_checkpointing=setup in SAVED,
                    **_TRAINER,
                )
                trainer.fit(run, datamodule=data, ckpt_path=source)
            except Exception as error:  # noqa: BLE001  # whatever a method raises is a finding
                run.error = error
        return run
