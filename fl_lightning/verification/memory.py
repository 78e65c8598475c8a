"""Division of a method's ``state_dict`` into a part of the server and a part of each client."""

import re
from typing import Any

import torch
from torch.utils._pytree import MappingKey, keystr, tree_flatten_with_path, tree_map, tree_map_with_path

from fl_lightning.testing.federation import SIZES, reference_model
from fl_lightning.verification.comparison import Leaves

FEW = 8
"""Number of floats from which a tensor of the server counts as large.

If clients use a large tensor of the server, the method must declare its transfer.
"""


_TENSORS = frozenset(reference_model().state_dict())


def entries(memory: Any) -> tuple[Leaves, dict[int, Leaves]]:
    """Divide a method's memory into the leaves of the server and the leaves of each client.

    A leaf belongs to a client in two cases:

    - It is in a dict under a key that is the client's number (int or str).
    - It is the client's row of a tensor that has as many rows as there are clients.

    If there is no such leaf, a key that contains a number, such as ``"client3"``, names a client.
    The names of the model's tensors, such as ``"0.weight"``, are exceptions. All other leaves
    belong to the server. Negative numbers do not name clients.

    Returns:
        The server's leaves by path, and the leaves of each client by path. The paths of a client
        do not contain its number.
    """
    paths = tree_flatten_with_path(tree_map(_rows_by_client, memory))[0]
    server: Leaves = {}
    clients: dict[int, Leaves] = {}
    for numbered in (r"\d+", r"(?!-\d+$)\D*\d+\D*"):
        server, clients = {}, {}
        for path, leaf in paths:
            keys = [str(key.key) if isinstance(key, MappingKey) else "" for key in path]
            matches = (
                index for index, key in enumerate(keys) if key not in _TENSORS and re.fullmatch(numbered, key)
            )
            at = next(matches, None)
            if at is None:
                server[keystr(path)] = leaf
            else:
                unnumbered = re.sub(r"\d+", "", keys[at])
                rest = (*path[:at], *([MappingKey(unnumbered)] if unnumbered else []), *path[at + 1 :])
                clients.setdefault(int(re.sub(r"\D", "", keys[at])), {})[keystr(rest)] = leaf
        if clients:
            break
    return server, clients


def _rows_by_client(leaf: Any) -> Any:
    is_table = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == len(SIZES)
    return dict(enumerate(leaf)) if is_table else leaf


def large_of_server(memory: Any) -> Leaves:
    """Return the large tensors of the server in a method's memory, keyed by path.

    Large tensors have at least :data:`FEW` floats.
    """
    return {
        place: leaf
        for place, leaf in entries(memory)[0].items()
        if torch.is_tensor(leaf) and leaf.is_floating_point() and leaf.numel() >= FEW
    }


def shifted(memory: Any) -> Any:
    """Return a copy of a method's memory, with 0.25 added to the server's large tensors."""
    server = large_of_server(memory)
    return tree_map_with_path(lambda path, leaf: leaf + 0.25 if keystr(path) in server else leaf, memory)
