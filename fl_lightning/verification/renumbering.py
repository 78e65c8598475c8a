"""Runs with renumbered clients, and the comparison of a method's memory between such runs."""

from collections.abc import Sequence

from fl_lightning.verification.differences import TOLERANCE, Leaves, largest_difference, leaves
from fl_lightning.verification.memory import entries
from fl_lightning.verification.observation import ObservedRun, Round
from fl_lightning.verification.trials import CLIENTS, SCRIPT, Trials

RELABELLED = (3, 2, 4, 0, 1)
"""New number of each client.

In each cohort of ``SCRIPT``, the new numbers move every client to a different row.
"""


def relabelled(trials: Trials) -> ObservedRun:
    """Return a run that equals the default run, except that its clients are renumbered.

    Each client keeps its data.
    """
    identities = tuple(RELABELLED.index(client) for client in CLIENTS)
    script = tuple(tuple(sorted(RELABELLED[client] for client in cohort)) for cohort in SCRIPT)
    return trials.run(identities=identities, script=script)


def knows_no_client(trials: Trials) -> bool:
    """Return whether a method's memory stays equal if the clients are renumbered.

    If the memory stays equal, the numbers in the memory's keys are not client ids.
    """
    pairs = zip(trials.run().rounds, relabelled(trials).rounds, strict=True)
    return all(memory_apart(*rounds)[0] <= TOLERANCE for rounds in pairs)


def memory_apart(first: Round, second: Round) -> tuple[float, str]:
    """Compare the method's memory in the records of two rounds.

    Return the largest difference, and the path of the value that differs.
    """
    return largest_difference(leaves(first.memory), leaves(second.memory))


def renamed_memory_apart(first: Round, second: Round) -> tuple[float, str]:
    """Return the largest difference between the memories of the default run and a renumbered run.

    If the memories differ, clients are matched by their new numbers before the comparison.
    """
    alike = memory_apart(first, second)
    return (
        alike
        if alike[0] <= TOLERANCE
        else largest_difference(_named(first, RELABELLED), _named(second, CLIENTS))
    )


def _named(seen: Round, numbers: Sequence[int]) -> Leaves:
    return {
        f"{place} of client {numbers[client]}": leaf
        for client, memory in entries(seen.memory)[1].items()
        for place, leaf in memory.items()
    }
