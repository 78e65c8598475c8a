"""Runs of one method in many set-ups, each computed once."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from fl_lightning.client_data.loaders import seed_global_generators
from fl_lightning.executors.base import Executor
from fl_lightning.executors.sequential import SequentialExecutor
from fl_lightning.executors.vectorized import VectorizedExecutor
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.verification.companions import Disturb, Noise, Observer, SaveRounds
from fl_lightning.verification.federation import federation, reference_model
from fl_lightning.verification.observation import ObservedModule, Round
from fl_lightning.verification.setups import SAVED, USUAL, Setup

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


@dataclass
class Run:
    """What came of a run.

    Attributes:
        module: The module, after the run.
        method: The callback that took part, if any.
        before: The model as it was given.
        folder: Where its checkpoints are.
        optimizer: State of the server optimizer at the end.
        error: What stopped it, if anything.
    """

    module: ObservedModule
    method: FederatedCallback | None
    before: nn.Module
    folder: Path
    optimizer: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def rounds(self) -> list[Round]:
        """What was seen of its rounds."""
        return self.module.rounds

    def checkpoint(self, round_number: int) -> Path:
        """The checkpoint after a round."""
        return self.folder / f"{round_number}.ckpt"


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
            source = self.run(setup, resume=0, centralised=False).checkpoint(setup.resume)
        settings: dict[str, Any] = {
            "client_optimizer": partial(torch.optim.SGD, lr=0.05, momentum=setup.momentum, weight_decay=0.01),
            "server_optimizer": partial(
                torch.optim.SGD,
                lr=0.5 if setup.server_momentum else 1.0,
                momentum=setup.server_momentum,
                weight_decay=0.02 if setup.server_momentum else 0.0,
            ),
            "local_steps": setup.local_steps,
            "local_epochs": None if setup.local_steps else 1,
            "executor": _EXECUTORS[setup.executor](),
            "weighting": setup.weighting,
            "centralised": setup.centralised,
            "seed": setup.seed,
        }
        module = ObservedModule(reference_model(setup.norm), **{**settings, **self.settings})
        module.script = setup.script
        if setup.listens:
            module.listen()
        run = Run(module, method, reference_model(setup.norm), self.folder / str(len(self._runs)))
        callbacks = _line_up(setup, method)
        if setup in SAVED:
            run.folder.mkdir(parents=True)
            callbacks.append(SaveRounds(run.folder))
        data = federation(setup.identities, batch_sizes=setup.batch_sizes, disturbance=setup.disturbance)
        with isolate_rng(), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Lightning's advice on the tiny data, none of the method's business
            seed_global_generators(0)
            try:
                trainer = L.Trainer(
                    max_epochs=len(setup.script),
                    callbacks=callbacks,
                    enable_checkpointing=setup in SAVED,
                    **_TRAINER,
                )
                trainer.fit(module, datamodule=data, ckpt_path=source)
                run.optimizer = trainer.optimizers[0].state_dict()
            except Exception as error:  # noqa: BLE001  # whatever a method raises is a finding
                run.error = error
        return run


def _line_up(setup: Setup, method: FederatedCallback | None) -> list[L.Callback]:
    """The callbacks of a run in their order."""
    callbacks: list[L.Callback] = [] if method is None else [method]
    if setup.disturbance is not None and setup.disturbance.what != ("data",):
        callbacks.insert(0, Disturb(setup.disturbance))
    if method is None or not setup.beside:
        return callbacks
    companion = partial(Noise, method) if setup.beside == "noise" else Observer
    return [companion(), *callbacks, companion()]
