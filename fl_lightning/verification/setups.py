"""The set-ups in which a method is tried."""

from dataclasses import dataclass, replace
from typing import Literal

from fl_lightning.verification.federation import SIZES, Disturbance

CLIENTS = tuple(range(len(SIZES)))
EVERYONE = (CLIENTS,) * 4
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
