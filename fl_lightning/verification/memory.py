"""The server's part of a method's ``state_dict``, and each client's."""

import re
from typing import Any

import torch
from torch.utils._pytree import MappingKey, keystr, tree_flatten_with_path, tree_map, tree_map_with_path

from fl_lightning.testing.federation import SIZES
from fl_lightning.verification.comparison import Leaves

FEW = 8
"""Floats below which memory of the server may cross the network undeclared: a choice, a count, a norm."""


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


def _rows_by_client(leaf: Any) -> Any:
    is_table = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == len(SIZES)
    return dict(enumerate(leaf)) if is_table else leaf


def large_of_server(memory: Any) -> Leaves:
    """Return the server's tensors of at least :data:`FEW` floats in a memory, by place."""
    return {
        place: leaf
        for place, leaf in entries(memory)[0].items()
        if torch.is_tensor(leaf) and leaf.is_floating_point() and leaf.numel() >= FEW
    }


def shifted(memory: Any) -> Any:
    """Return a memory whose :func:`large_of_server` has other values."""
    server = large_of_server(memory)
    return tree_map_with_path(lambda path, leaf: leaf + 0.25 if keystr(path) in server else leaf, memory)
