"""The part of a round that ranks share between them, and what they must have in common after it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.cohort.client_memory import memories
from fl_lightning.cohort.round_cohort import RoundCohort


def take_local_steps(module: Any, cohort: RoundCohort, part: RoundCohort) -> list[int]:
    """Take the local steps of the clients that this rank computes: all ranks as many as the cohort's busiest client.

    Args:
        module: The federated module.
        cohort: The round's cohort.
        part: Its clients on this rank.

    Returns:
        The samples that each of them has processed.
    """
    last = max(cohort.local_steps) - 1
    for step in range(last + 1):
        # in a joint step a rank without clients takes part with another's, and nobody hears of what it finds
        joint = step == 0 and module.joint_method is not None
        module.compute_gradients(cohort.part(slice(0, 1)) if joint and not part else part, step)
        module.call_hook("on_after_local_backward", part, step)
        with module.clock.part("optimizer"):
            part.take_step()
        module.call_hook("on_local_step_end", part, step)
        part.finish_step(step, last)
        # Lightning's own bars have none
        show = getattr(module.trainer.progress_bar_callback, "local_step", None)
        if show is not None:
            show(step + 1, last + 1)
    return part.samples


def attacked(module: Any, clients: Sequence[int], batches: BatchStack) -> BatchStack:
    """The batches of some clients, with what attackers among them train on instead of theirs."""
    for method in module.federated_callbacks:
        if method.role == "attack":
            batches = method.change_batches(module, clients, batches)
    return batches


def open_memories(module: Any) -> None:
    """Say where methods may write what they keep of clients."""
    for name, memory in memories(module.federated_callbacks).items():
        memory.open(Path(module.trainer.default_root_dir) / "memory" / name, module.ranks)


def agree(module: Any, place: str) -> None:
    """End a round: what methods keep of its clients is written, and every rank has the same."""
    for memory in memories(module.federated_callbacks).values():
        memory.flush()
    module.ranks.agree(lambda: _shared_state(module), place)


def _shared_state(module: Any) -> dict[str, Any]:
    """What every rank must have alike after a round, by its name."""
    found = {
        "server model": module.state_dict(),
        "server optimizer": module.trainer.optimizers[0].state_dict(),
    }
    for method in module.federated_callbacks:
        found |= {f"{type(method).__name__}.{key}": value for key, value in method.state_dict().items()}
    return found
