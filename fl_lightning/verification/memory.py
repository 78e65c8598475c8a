"""What of a method's ``state_dict`` belongs to which client, and what tells a client's number from any other."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import MappingKey, keystr, tree_flatten_with_path, tree_map

from fl_lightning.verification.comparison import TOLERANCE, Leaves, distance, leaves
from fl_lightning.verification.observation import Round, Run
from fl_lightning.verification.trials import CLIENTS, SCRIPT, Trials

RELABELLED = (3, 2, 4, 0, 1)
"""The new number of each client: with it no client of a cohort of ``SCRIPT`` stays in its row."""


def entries(memory: Any) -> tuple[Leaves, dict[int, Leaves]]:
    """Leaves of a memory by place: the server's, and those of each client without its number.

    A client owns what stands under its number in a dict, as int or text, and its row of a tensor with as many rows as
    there are clients; where nobody owns anything so, what stands under a text with its number in it (``"client3"``).
    Negative numbers are the server's.
    """
    paths = tree_flatten_with_path(tree_map(_rows_by_client, memory))[0]
    server: Leaves = {}
    clients: dict[int, Leaves] = {}
    for numbered in (r"\d+", r"(?!-\d+$)\D*\d+\D*"):
        server, clients = {}, {}
        for path, leaf in paths:
            keys = [str(key.key) if isinstance(key, MappingKey) else "" for key in path]
            at = next((index for index, key in enumerate(keys) if re.fullmatch(numbered, key)), None)
            if at is None:
                server[keystr(path)] = leaf
            else:
                unnumbered = re.sub(r"\d+", "", keys[at])
                rest = (*path[:at], *([MappingKey(unnumbered)] if unnumbered else []), *path[at + 1 :])
                clients.setdefault(int(re.sub(r"\D", "", keys[at])), {})[keystr(rest)] = leaf
        if clients:
            break
    return server, clients


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


def _named(seen: Round, numbers: Sequence[int]) -> Leaves:
    return {
        f"{place} of client {numbers[client]}": leaf
        for client, kept in entries(seen.memory)[1].items()
        for place, leaf in kept.items()
    }


def _rows_by_client(leaf: Any) -> Any:
    is_table = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == len(CLIENTS)
    return dict(enumerate(leaf)) if is_table else leaf
