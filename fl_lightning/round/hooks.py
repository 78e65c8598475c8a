"""Calls of the methods' hooks in a fixed order."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.cohort.client_memory import memories
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import ConfigurationError, doing
from fl_lightning.randomness import derive_seed, seed_global, seeded
from fl_lightning.round.context import RunContext
from fl_lightning.round.declarations import ROLES, Declarations


def in_order(callbacks: Iterable[Any]) -> list[Any]:
    """Return the methods among a trainer's callbacks, sorted by role.

    Methods with equal roles keep their order.
    """
    methods = [callback for callback in callbacks if isinstance(callback, Declarations)]
    return sorted(methods, key=lambda method: ROLES.index(method.role))


def extend_model(model: nn.Module, callbacks: Iterable[Any], seed: int) -> None:
    """Let methods add layers to a model.

    If several runs use the same model, each method adds layers only in the first run. Two methods
    of the same class both add layers. Random numbers are drawn with ``seed``.
    """
    extended = vars(model).setdefault("_extended_by", set())
    for method, number in _numbered(in_order(callbacks)):
        kind = type(method)
        name = f"{kind.__name__}.extend_model"
        key = (kind.__module__, kind.__qualname__, number)
        if key not in extended:
            with doing(name), seeded(derive_seed(seed, _purpose(name, number))):
                method.extend_model(model)
            extended.add(key)


def _numbered(methods: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    seen: Counter[type] = Counter()
    for method in methods:
        yield method, seen[type(method)]
        seen[type(method)] += 1


def _purpose(name: str, number: int) -> str:
    return f"{name} {number}" if number else name


def configure_batch_norm(run: RunContext, methods: Iterable[Any]) -> None:
    """Let methods replace BN layers of the model.

    Raises:
        ConfigurationError: A method adds parameters, which the model would lose after the run.
    """
    for method in methods:
        names = dict(run.model.named_parameters())
        method.configure_batch_norm(run)
        if added := [name for name, _ in run.model.named_parameters() if name not in names]:
            raise ConfigurationError(
                f"{type(method).__name__}.configure_batch_norm adds the parameters {', '.join(added)}, which evaluations of a "
                "checkpoint would lack; add them in extend_model(model)"
            )


def call(run: RunContext, hook: str, cohort: RoundCohort, *step: int) -> None:
    """Call a hook of every method.

    Before each call, the global random generators are seeded by seed, method, hook, round and step.
    Random numbers in a hook therefore do not depend on the executor or on other hooks. Two methods
    of the same class draw different numbers.
    """
    for method, number in _numbered(run.federated_callbacks):
        name = f"{type(method).__name__}.{hook}"
        with run.clock.part("callbacks"), doing(f"{name}, round {cohort.round}"):
            seed_global(derive_seed(run.seed, _purpose(name, number), cohort.round, *step), run.device)
            getattr(method, hook)(run.trainer, run, cohort, *step)


def call_skipped(run: RunContext) -> dict[str, tuple[Any, int]]:
    """Call ``on_round_skipped`` of every method, and return the results by method name."""
    sent = {}
    for method in run.federated_callbacks:
        name = f"{type(method).__name__}.on_round_skipped"
        with run.clock.part("callbacks"), doing(f"{name}, round {run.round}"):
            sent[type(method).__name__] = method.on_round_skipped(run.trainer, run)
    return sent


def attacked(run: RunContext, clients: Sequence[int], batches: BatchStack) -> BatchStack:
    """Return the batches of some clients after changes by the attacks of the run."""
    for method in run.federated_callbacks:
        if method.role == "attack":
            batches = method.change_batches(run, clients, batches)
    return batches


def open_memories(run: RunContext) -> None:
    """Set the folders in which methods store the state of clients."""
    for name, memory in memories(run.federated_callbacks).items():
        memory.open(Path(run.trainer.default_root_dir) / "memory" / name, run.ranks)


def end_round(run: RunContext) -> None:
    """Write the methods' client state to disk, and check that all ranks have the same state."""
    for memory in memories(run.federated_callbacks).values():
        memory.flush()
    run.ranks.agree(lambda: _shared_state(run), f"round {run.round}")


def _shared_state(run: RunContext) -> dict[str, object]:
    """Return the state that must be equal on all ranks after a round, by name."""
    shared: dict[str, object] = {
        "server model": run.state_dict(),
        "server optimizer": run.trainer.optimizers[0].state_dict(),
    }
    for method in run.federated_callbacks:
        shared |= {f"{type(method).__name__}.{key}": value for key, value in method.state_dict().items()}
    return shared
