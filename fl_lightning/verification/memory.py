"""What of a method's ``state_dict`` belongs to which client, and what tells a client's number from any other."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fl_lightning.verification.comparison import TOLERANCE, distance, leaves
from fl_lightning.verification.observation import Round, Run
from fl_lightning.verification.trials import CLIENTS, SCRIPT, Trials

Entries = dict[int | None, dict[str, Any]]

RELABELLED = (3, 2, 4, 0, 1)
"""The new number of each client: with it no client of a cohort of ``SCRIPT`` stays in its row."""


def entries(memory: Any) -> Entries:
    """Leaves of a memory by owner and place; the owner None is the server.

    A client owns what stands under its number in a dict (as int or text), at its position in a list as long as there are
    clients, and in its row of a tensor with as many rows; where nobody owns anything so, what stands under a text with its
    number in it (``"client3"``). Negative numbers are the server's.
    """
    owned: Entries = {}
    for numbered in (r"-?\d+", r"\D*\d+\D*"):
        owned = {}
        for owner, place, leaf in _walk(memory, None, "", numbered):
            owned.setdefault(owner, {})[place] = leaf
        if owned.keys() - {None}:
            break
    return owned


def by_client(memory: Any) -> dict[int, dict[str, Any]]:
    """The entries of clients alone."""
    return {owner: kept for owner, kept in entries(memory).items() if owner is not None}


def relabelled(trials: Trials) -> Run:
    """The usual run with every client's data under its new number."""
    identities = tuple(RELABELLED.index(client) for client in CLIENTS)
    script = tuple(tuple(sorted(RELABELLED[client] for client in cohort)) for cohort in SCRIPT)
    return trials.run(identities=identities, script=script)


def knows_no_client(trials: Trials) -> bool:
    """Whether what the method keeps is the same however clients are numbered: then its numbers are layers or rounds, say."""
    pairs = zip(trials.run().rounds, relabelled(trials).rounds, strict=True)
    return all(memory_apart(one, two)[0] <= TOLERANCE for one, two in pairs)


def memory_apart(one: Round, two: Round) -> tuple[float, str]:
    """The largest difference of what the method keeps after two rounds, and its place."""
    return distance(leaves(one.memory), leaves(two.memory))


def renamed_memory_apart(one: Round, two: Round) -> tuple[float, str]:
    """The same where the clients of the second have their new numbers: client by client, unless the numbers are no clients'."""
    alike = memory_apart(one, two)
    return alike if alike[0] <= TOLERANCE else distance(_named(one, RELABELLED), _named(two, CLIENTS))


def _named(seen: Round, numbers: Sequence[int]) -> dict[str, Any]:
    return {
        f"{place} of client {numbers[client]}": leaf
        for client, kept in by_client(seen.memory).items()
        for place, leaf in kept.items()
    }


def _walk(tree: Any, owner: int | None, place: str, numbered: str) -> Iterator[tuple[int | None, str, Any]]:
    if isinstance(tree, Mapping):
        numbers = [re.search(r"^-?\d+|\d+", str(key)) for key in tree if re.fullmatch(numbered, str(key))]
        of_clients = owner is None and len(numbers) == len(tree)
        for index, (key, value) in enumerate(tree.items()):
            number = numbers[index] if of_clients else None
            if number is not None and int(number[0]) >= 0:
                rest = str(key).replace(number[0], "", 1)
                yield from _walk(value, int(number[0]), place + (f"[{rest!r}]" if rest else ""), numbered)
            else:
                yield from _walk(value, owner, f"{place}[{key!r}]", numbered)
    elif isinstance(tree, list | tuple):
        of_clients = owner is None and len(tree) == len(CLIENTS)
        for index, value in enumerate(tree):
            at = (index, place) if of_clients else (owner, f"{place}[{index}]")
            yield from _walk(value, *at, numbered)
    elif isinstance(tree, torch.Tensor) and owner is None and tree.dim() > 0 and len(tree) == len(CLIENTS):
        for client, row in enumerate(tree):
            yield client, place, row
    else:
        yield owner, place, tree
