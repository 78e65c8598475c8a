"""Parts of a method's ``state_dict`` by client, and the detection of client numbers in it."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import MappingKey, keystr, tree_flatten_with_path, tree_map

from fl_lightning.verification.comparison import TOLERANCE, Leaves, distance, leaves
from fl_lightning.verification.observation import Round, Run
from fl_lightning.verification.trials import CLIENTS, SCRIPT, Trials

RELABELLED = (3, 2, 4, 0, 1)
"""New number of each client, which moves every client of a cohort of ``SCRIPT`` to another row."""


def entries(memory: Any) -> tuple[Leaves, dict[int, Leaves]]:
    """Return the leaves of a memory by place: the server's, and each client's without its number.

    A client owns the entries under its number in a dict (int or text), and its row of a tensor with
    as many rows as there are clients. If no client owns anything this way, it owns the entries
    under a text that contains its number (``"client3"``). Negative numbers belong to the server.
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
    """Return the usual run with each client's data under a new number."""
    identities = tuple(RELABELLED.index(client) for client in CLIENTS)
    script = tuple(tuple(sorted(RELABELLED[client] for client in cohort)) for cohort in SCRIPT)
    return trials.run(identities=identities, script=script)


def knows_no_client(trials: Trials) -> bool:
    """Return whether the memory ignores client numbers, so that numbers in it are layers or rounds, say."""
    pairs = zip(trials.run().rounds, relabelled(trials).rounds, strict=True)
    return all(memory_apart(*rounds)[0] <= TOLERANCE for rounds in pairs)


def memory_apart(first: Round, second: Round) -> tuple[float, str]:
    """Return the largest difference of the method's memory after second rounds, and its place."""
    return distance(leaves(first.memory), leaves(second.memory))


def renamed_memory_apart(first: Round, second: Round) -> tuple[float, str]:
    """Return :func:`memory_apart`, or after renumbering of the clients the difference client by client."""
    alike = memory_apart(first, second)
    return alike if alike[0] <= TOLERANCE else distance(_named(first, RELABELLED), _named(second, CLIENTS))


def _named(seen: Round, numbers: Sequence[int]) -> Leaves:
    return {
        f"{place} of client {numbers[client]}": leaf
        for client, memory in entries(seen.memory)[1].items()
        for place, leaf in memory.items()
    }


def _rows_by_client(leaf: Any) -> Any:
    is_table = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == len(CLIENTS)
    return dict(enumerate(leaf)) if is_table else leaf
