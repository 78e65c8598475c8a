"""The parts of a method's ``state_dict`` that belong to the server and to each client."""

import re
from typing import Any

import torch
from torch.utils._pytree import MappingKey, keystr, tree_flatten_with_path, tree_map, tree_map_with_path

from fl_lightning.testing.federation import SIZES, reference_model
from fl_lightning.verification.comparison import Leaves

FEW = 8
"""Size in floats below which a server tensor may be sent undeclared, such as a count or a norm."""


_TENSORS = frozenset(reference_model().state_dict())


def entries(memory: Any) -> tuple[Leaves, dict[int, Leaves]]:
    """Return a memory's leaves by path: the server's, and each client's, without client numbers.

    A dict's entry belongs to the client that is its key (int or str). In a tensor with as many rows
    as there are clients, row i belongs to client i. If no entry belongs to a client this way, keys
    that contain a number are used (``"client3"``), except names of the model's tensors
    (``"0.weight"``). Negative numbers belong to the server.
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
    """Return the server's tensors of at least :data:`FEW` floats in a memory, by path."""
    return {
        place: leaf
        for place, leaf in entries(memory)[0].items()
        if torch.is_tensor(leaf) and leaf.is_floating_point() and leaf.numel() >= FEW
    }


def shifted(memory: Any) -> Any:
    """Return a memory with 0.25 added to the tensors of :func:`large_of_server`."""
    server = large_of_server(memory)
    return tree_map_with_path(lambda path, leaf: leaf + 0.25 if keystr(path) in server else leaf, memory)
