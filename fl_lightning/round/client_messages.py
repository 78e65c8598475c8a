"""Vectors that clients send to the server for aggregation."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation import Aggregator
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.round.context import RunContext


class Sent(NamedTuple):
    """One vector per client, stored as views of the cohort's tensors.

    Attributes:
        what: ``"parameters"``, ``"means"`` or ``"variances"``.
        pieces: Pieces of the vectors, each ``[C, d_k]``.
        reference: Value to subtract from each piece, ``[d_k]``: the server's parameters, or 0.0 for
            statistics.
        rule: The server's aggregation rule for the vectors.
    """

    what: str
    pieces: list[Tensor]
    reference: list[Tensor | float]
    rule: Aggregator

    def rows(self) -> Tensor:
        """Return the vectors of all clients as one tensor, ``[C, d]``."""
        pairs = zip(self.pieces, self.reference, strict=True)
        return torch.cat([piece - reference for piece, reference in pairs], 1)

    def write(self, rows: list[int], vectors: Tensor) -> None:
        """Replace the vectors of some clients.

        Args:
            rows: Positions of the clients in the cohort.
            vectors: One vector for each client, ``[len(rows), d]``, or one vector for all, ``[d]``.
        """
        parts = torch.split(vectors, [piece.shape[1] for piece in self.pieces], -1)
        for piece, reference, part in zip(self.pieces, self.reference, parts, strict=True):
            piece[rows] = (part + reference).to(piece.dtype)


def sent_vectors(run: RunContext, cohort: Cohort) -> list[Sent]:
    """Return the vectors that the clients of a cohort send: parameters, means and variances.

    By default, all parameters form one vector, and the statistics of each layer form one vector.
    The aggregation rule's attribute ``per`` can change this. Frozen and local state is not sent.
    """
    vectors = []
    blocks = [name for name in cohort.params.blocks if cohort.treatment(name) == "averaged"]
    parts = cohort.params.columns_by_layer(blocks)
    if run.aggregator.per != "layer":
        parts = {"": [place for places in parts.values() for place in places]}
    for places in parts.values():
        pieces = [cohort.params.blocks[block][:, columns] for block, columns in places]
        server = [cohort.server_rows.blocks[block][0, columns] for block, columns in places]
        vectors.append(Sent("parameters", pieces, [*server], run.aggregator))
    rule = run.statistics.rule
    for what, names in sent_statistics_by_kind(cohort.buffer_kinds, cohort.treatments).items():
        for group in [names] if rule.per == "model" else [[name] for name in names]:
            pieces = [cohort.buffers[name] for name in group]
            vectors.append(Sent(what, pieces, [0.0] * len(pieces), rule))
    return vectors


def sent_statistics_by_kind(kinds: Mapping[str, str], treatments: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of the running means and running variances that clients send.

    The keys of the result are ``"means"`` and ``"variances"``.

    Args:
        kinds: The kind of each buffer by name.
        treatments: The treatment of each buffer by name.
    """
    sent: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        if kind in ("mean", "var") and treatments[name] in ("averaged", "pooled"):
            sent.setdefault("means" if kind == "mean" else "variances", []).append(name)
    return sent
