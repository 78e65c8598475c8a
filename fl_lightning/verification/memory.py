"""Division of a method's ``state_dict`` into a part of the server and a part of each client."""

import re
from typing import Any

import torch
from torch.utils._pytree import MappingKey, keystr, tree_flatten_with_path, tree_map, tree_map_with_path

from fl_lightning.testing.federation import CLIENT_SIZES, reference_model
from fl_lightning.verification.differences import Leaves

FEW = 8
"""Smallest number of floats in a large tensor.

If the server sends a large tensor to clients, the method must declare this traffic.
"""


TENSORS = {*reference_model().state_dict()}
"""Names of the tensors of the models of the rules."""


def entries(memory: Any) -> tuple[Leaves, dict[int, Leaves]]:
    """Divide a method's memory into the values of the server and the values of each client.

    These values belong to a client:

    - The values in a dict under the client's number (int or str).
    - The client's row in each tensor that has one row per client.

    If there are no such values, keys such as ``"client3"`` name clients. Names of the model's
    tensors, such as ``"0.weight"``, and negative numbers never name a client. All other values
    belong to the server.

    Returns:
        The server's values by path, and the values of each client by path. The paths of a client do
        not contain the client's number.
    """
    paths = tree_flatten_with_path(tree_map(_rows_by_client, memory))[0]
    server: Leaves = {}
    clients: dict[int, Leaves] = {}
    for numbered in (r"\d+", r"(?!-\d+$)\D*\d+\D*"):
        server, clients = {}, {}
        for path, leaf in paths:
            keys = [str(key.key) if isinstance(key, MappingKey) else "" for key in path]
            matches = (
                index for index, key in enumerate(keys) if key not in TENSORS and re.fullmatch(numbered, key)
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
    is_table = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == len(CLIENT_SIZES)
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
