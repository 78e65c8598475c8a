"""Runs of one method in many set-ups, and a callback that reads and draws."""

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from fl_lightning.cohort.cohort import Cohort
from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.methods.callback import FederatedCallback
from fl_lightning.randomness import seeded
from fl_lightning.round.hooks import extend_model
from fl_lightning.round.module import FederatedModule
from fl_lightning.testing import fit
from fl_lightning.testing.federation import CLIENT_SIZES, Disturbance, federation, reference_model
from fl_lightning.verification.differences import Violated
from fl_lightning.verification.observation import ObservedRun

CLIENTS = tuple(range(len(CLIENT_SIZES)))
EVERYONE = (CLIENTS,) * 4
CLIENT_LR = 0.05
SCRIPT = ((0, 2, 3), (1, 3, 4), (0, 2, 4), (1, 2, 3))
"""Clients of each round.

Each client is absent at least once. Some clients return in a different row of the cohort.
"""


class ReadsAndDraws(FederatedCallback):
    """Callback whose hooks read all state and draw random numbers.

    The hooks draw from the global generators and from generators that are attributes of ``method``.
    """

    def __init__(self, method: FederatedCallback | None) -> None:
        self.method = method

    def look(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int = 0) -> None:
        """Read the rows of all clients, and draw a random number from each generator."""
        for rows in (*cohort.params.values(), *cohort.buffers.values()):
            rows.double().sum()
        torch.rand(3)
        np.random.rand(3)  # draws from the global generator on purpose
        random.random()
        for value in vars(self.method).values():
            if isinstance(value, torch.Generator):
                torch.rand(1, generator=value)
            elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
                value.random()

    on_round_start = on_after_local_backward = on_local_step_end = look
    on_before_aggregate = on_after_aggregate = on_round_end = look


@cache
def rests_from(first_round: int) -> Callable[[int, int], float]:
    """Return a schedule of the client learning rate that is 0 from the given round on."""
    return lambda number, _: float(number < first_round)


Setup = dict[str, Any]
"""Changes of a run: arguments of :meth:`Trials.attempt`."""

_SGD = partial(torch.optim.SGD, lr=CLIENT_LR, weight_decay=0.01)
WITHOUT_MOMENTUM: Setup = {"client_optimizer": _SGD}
"""Clients use SGD without momentum."""
WITH_SERVER_MOMENTUM: Setup = {
    "server_optimizer": partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.02)
}
RESTING: Setup = {"client_lr_schedule": rests_from(1)}
"""The client learning rate is 0 in all rounds."""
ONE_STEP: Setup = {"script": EVERYONE, "local_epochs": None, "local_steps": 1, "weighting": "samples"}
"""Every client takes one local step per round. Such a run can be compared with centralised training."""

SAVED = (WITH_SERVER_MOMENTUM, ONE_STEP)
"""Set-ups whose runs write a checkpoint after each round."""

_MODULE = {
    "client_optimizer": partial(_SGD, momentum=0.9),
    "server_optimizer": partial(torch.optim.SGD, lr=1.0),
    "local_epochs": 1,
}
"""Settings of ``FederatedModule`` in the usual run."""

_WITHOUT_METHOD: dict[frozenset[tuple[str, Any]], ObservedRun] = {}
"""Runs without a method (FedAvg). All methods share these runs."""


class Trials:
    """Runs of a method in the set-ups that rules and equalities need. Each set-up is run once.

    Args:
        make: Function that returns a new callback for each run.
        folder: Folder for checkpoints, created on demand.
        settings: Settings of ``FederatedModule`` that replace the set-ups' settings. ``data`` has
            further arguments of ``federation``.
    """

    def __init__(
        self, make: Callable[[], FederatedCallback], folder: Path, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.make, self.folder, self.settings = make, folder, dict(settings or {})
        self._data: dict[str, Any] = self.settings.pop("data", {})
        self._runs: dict[frozenset[tuple[str, Any]], ObservedRun] = {}

    @property
    def is_attack(self) -> bool:
        """Whether the method is an attack."""
        return self.make().role == "attack"

    def reference_model(self) -> nn.Module:
        """Return the model of the usual run: with Batch Normalization, if the method allows it."""
        return reference_model("gn" if self.make().per_sample else "bn")

    def attempt(self, **setup: Any) -> ObservedRun:
        """Return the run of a set-up, even if an exception stopped the run.

        The usual run has four rounds of one local epoch. Three of five clients take part in each
        round. The clients have unequal numbers of samples, and use SGD with momentum.

        Args:
            setup: What differs from the usual run, see ``_start``. Other names are settings of
                ``FederatedModule``.
        """
        known = _WITHOUT_METHOD if setup.get("bare") and not self.settings else self._runs
        key = frozenset(setup.items())
        if key not in known:
            known[key] = self._start(self._folder(setup) if setup in SAVED else None, **setup)
        return known[key]

    def run(self, **setup: Any) -> ObservedRun:
        """Return the finished run of a set-up, see :meth:`attempt`.

        Raises:
            Violated: A ``ConfigurationError`` stopped the run after round 1.
            Exception: Any other exception that stopped the run.
        """
        run = self.attempt(**setup)
        if isinstance(run.error, ConfigurationError) and len(run.rounds) > 1:
            raise Violated(f"a run must not stop after round 1: {run.error}")
        if run.error is not None:
            raise run.error
        return run

    def checkpoint(self, setup: Setup, round_number: int) -> Path:
        """Return the checkpoint of a round; the set-up must be in :data:`SAVED`."""
        self.run(**setup)
        return self._folder(setup) / f"epoch={round_number - 1}.ckpt"

    def _folder(self, setup: Setup) -> Path:
        return self.folder / str(SAVED.index(setup))

    def _start(
        self,
        folder: Path | None,
        bare: bool = False,
        script: Sequence[Sequence[int]] = SCRIPT,
        identities: Sequence[int] = CLIENTS,
        batch_sizes: Sequence[int] | None = None,
        norm: str | None = None,
        observed: bool = False,
        disturbance: Disturbance | None = None,
        ranks: int = 1,
        resume: Path | None = None,
        repetition: int = 0,
        **module: Any,
    ) -> ObservedRun:
        """Train a run.

        Args:
            folder: Folder for a checkpoint of each round, if any.
            bare: Whether to run FedAvg without the method.
            script: The cohort of each round.
            identities: Number of each client's data set. Clients with equal numbers have equal
                data.
            batch_sizes: Batch size of each client; None for equal sizes.
            norm: Kind of the model's normalization layers: Batch or Group Normalization. Default: that of
                :meth:`reference_model`.
            observed: Whether a :class:`ReadsAndDraws` runs before and after the method.
            disturbance: Change of one client's data or state, or of the method's memory, if any.
            ranks: Number of ranks.
            resume: Checkpoint from which the run resumes, if any.
            repetition: Number that distinguishes repeated runs of a set-up.
            module: Settings of ``FederatedModule``.
        """
        method = None if bare else self.make()
        default = {
            "model": self.reference_model() if norm is None else reference_model(norm),
            "executor": SequentialExecutor(),
            **_MODULE,
        }
        needs = {} if method is None else method.needs
        run = ObservedRun(**{**default, **module, **needs, **deepcopy(self.settings)})
        if method is not None:
            # the seed of the new layers' weights is the same in all runs
            extend_model(run.model, [method], seed=0)
        run.script, run.method, run.rounds = script, method, []
        run.disturbance = disturbance
        run.usual = self.run().rounds if disturbance and disturbance.replayed else ()
        callbacks: list[L.Callback] = [] if method is None else [method]
        if observed:
            callbacks = [ReadsAndDraws(method), *callbacks, ReadsAndDraws(method)]
        if folder is not None:
            callbacks.append(ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True))
        trainer: dict[str, Any] = {"check_val_every_n_epoch": 2, "limit_val_batches": 1.0}
        if ranks > 1:  # a rank that waits for a minute is in a deadlock
            trainer |= {"devices": ranks, "strategy": CohortStrategy(timedelta(minutes=1))}
        data = federation(identities, batch_sizes, disturbance, **self._data)
        with seeded(0), warnings.catch_warnings():
            # ignore warnings of Lightning about tiny data sets
            warnings.simplefilter("ignore")
            try:
                fit(run, data, len(script), callbacks, resume, **trainer)
            except Exception as error:  # noqa: BLE001  # whatever a method raises is a finding
                run.error = error
        return run
