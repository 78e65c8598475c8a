"""Calls of the methods' hooks in a fixed order."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from fl_lightning.cohort.client_memory import memories
from fl_lightning.errors import ConfigurationError, doing
from fl_lightning.randomness import derive_seed, seeded
from fl_lightning.round.context import RunContext
from fl_lightning.round.declarations import in_order, numbered


def extend_model(model: nn.Module, callbacks: Iterable[Any], seed: int) -> None:
    """Let methods add layers to a model.

    If several runs use the same model, each method adds layers only in the first run. Two methods
    of the same class both add layers. Random numbers are drawn with ``seed``.
    """
    extended = vars(model).setdefault("_extended_by", set())
    for method, number, name in numbered(in_order(callbacks), "extend_model"):
        key = (type(method).__module__, type(method).__qualname__, number)
        if key not in extended:
            with doing(name), seeded(derive_seed(seed, name)):
                method.extend_model(model)
            extended.add(key)


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
