"""Calls of the methods' hooks in their order, and the methods' client memories."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.cohort.client_memory import memories
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import doing
from fl_lightning.randomness import derive_seed, seed_global
from fl_lightning.round.context import RunContext
from fl_lightning.round.declarations import ROLES, Declarations
from fl_lightning.round.idle import is_watched, versions


def in_order(callbacks: Iterable[Any]) -> list[Any]:
    """Return the methods among a trainer's callbacks, sorted by role.

    Methods with the same role keep the order of the list.
    """
    methods = [callback for callback in callbacks if isinstance(callback, Declarations)]
    return sorted(methods, key=lambda method: ROLES.index(method.role))


def call(run: RunContext, hook: str, cohort: RoundCohort, *step: int) -> None:
    """Call a hook of every method.

    Before each call, the global generators are seeded by (seed, method and hook, round, step). The
    draws of a hook therefore do not depend on the executor or on earlier draws.
    """
    for method in run.federated_callbacks:
        name = f"{type(method).__name__}.{hook}"
        with run.clock.part("callbacks"), doing(f"{name}, round {cohort.round}"):
            seed_global(derive_seed(run.seed, name, cohort.round, *step), run.device)
            before = versions(run, cohort) if (watched := is_watched(run, method)) else ()
            getattr(method, hook)(run.trainer, run, cohort, *step)
            if watched and (
                method.policy(cohort.round, run.planned_rounds) or versions(run, cohort) != before
            ):
                run.record.acting.add(type(method).__name__)


def call_skipped(run: RunContext) -> dict[str, tuple[Any, int]]:
    """Call ``on_round_skipped`` of every method; return traffic and exchanges by method."""
    sent = {}
    for method in run.federated_callbacks:
        name = f"{type(method).__name__}.on_round_skipped"
        with run.clock.part("callbacks"), doing(f"{name}, round {run.round}"):
            sent[type(method).__name__] = method.on_round_skipped(run.trainer, run)
    return sent


def attacked(run: RunContext, clients: Sequence[int], batches: BatchStack) -> BatchStack:
    """Let the run's attacks change the clients' batches, and return the result."""
    for method in run.federated_callbacks:
        if method.role == "attack":
            batches = method.change_batches(run, clients, batches)
    return batches


def open_memories(run: RunContext) -> None:
    """Set the folders of the methods' client memories."""
    for name, memory in memories(run.federated_callbacks).items():
        memory.open(Path(run.trainer.default_root_dir) / "memory" / name, run.ranks)


def end_round(run: RunContext) -> None:
    """Write the methods' client memories, and check that all ranks have the same state."""
    for memory in memories(run.federated_callbacks).values():
        memory.flush()
    run.ranks.agree(lambda: _shared_state(run), f"round {run.round}")


def _shared_state(run: RunContext) -> dict[str, object]:
    """Return the state, by name, that must be equal on all ranks after a round."""
    shared: dict[str, object] = {
        "server model": run.state_dict(),
        "server optimizer": run.trainer.optimizers[0].state_dict(),
    }
    for method in run.federated_callbacks:
        shared |= {f"{type(method).__name__}.{key}": value for key, value in method.state_dict().items()}
    return shared
