"""The part of a round that ranks share between them, and what they must have in common after it."""

from typing import Any

from fl_lightning.cohort.round_cohort import RoundCohort


def take_local_steps(module: Any, cohort: RoundCohort, part: RoundCohort) -> list[int]:
    """Take the local steps of the clients that this rank computes: all ranks as many as the cohort's busiest client.

    Args:
        module: The federated module.
        cohort: The round's cohort, which a joint forward pass needs as a whole.
        part: Its clients on this rank.

    Returns:
        The samples that each of them has processed.
    """
    last = max(cohort.local_steps) - 1
    for step in range(last + 1):
        module.compute_gradients(cohort if step == 0 and module.joint_method else part, step)
        module.call_hook("on_after_local_backward", part, step)
        with module.clock.part("optimizer"):
            part.take_step()
        module.call_hook("on_local_step_end", part, step)
        part.finish_step(step, last)
        # Lightning's own bars have none
        show = getattr(module.trainer.progress_bar_callback, "local_step", None)
        if show is not None:
            show(step + 1, last + 1)
    # those of a joint step are counted in the whole cohort
    return [a + b for a, b in zip(cohort.samples[part.rows], part.samples, strict=True)]


def shared_state(module: Any) -> dict[str, Any]:
    """What every rank must have alike after a round, by its name."""
    found = {
        "server model": module.state_dict(),
        "server optimizer": module.trainer.optimizers[0].state_dict(),
    }
    for method in module.federated_callbacks:
        found |= {f"{type(method).__name__}.{key}": value for key, value in method.state_dict().items()}
    return found
