"""What the clients of a round send, as the vectors that the server's rules aggregate."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation import Aggregator

if TYPE_CHECKING:
    from fl_lightning.cohort.cohort import Cohort
    from fl_lightning.round.module import FederatedModule


class Sent(NamedTuple):
    """One vector of every client.

    Attributes:
        what: ``"parameters"``, ``"means"`` or ``"variances"``.
        pieces: The cohort's own storage of it, ``[C, d_k]`` each.
        reference: What is subtracted from each, ``[d_k]``: the server's parameters; nothing from statistics.
        rule: How the server aggregates the vector.
    """

    what: str
    pieces: list[Tensor]
    reference: list[Tensor | float]
    rule: Aggregator

    def rows(self) -> Tensor:
        """The clients' vectors, ``[C, d]``."""
        pairs = zip(self.pieces, self.reference, strict=True)
        return torch.cat([piece - reference for piece, reference in pairs], 1)

    def write(self, rows: list[int], vectors: Tensor) -> None:
        """Let some rows send other vectors, ``[d]`` for all of them or ``[len(rows), d]``."""
        parts = torch.split(vectors, [piece.shape[1] for piece in self.pieces], -1)
        for piece, reference, part in zip(self.pieces, self.reference, parts, strict=True):
            piece[rows] = (part + reference).to(piece.dtype)


def sent_vectors(module: "FederatedModule", cohort: "Cohort") -> list[Sent]:
    """The vectors that the clients of a cohort send: their parameters, and the means and variances of each layer.

    A rule whose ``per`` says so takes the parameters of each layer, or the statistics of all layers, as one vector. State that the
    round freezes, or that clients keep for themselves, is not sent.
    """
    found = []
    blocks = [name for name in cohort.params.blocks if cohort.treatment(name) == "averaged"]
    parts = cohort.params.columns_by_layer(blocks)
    if module.aggregator.per != "layer":
        parts = {"": [part for own in parts.values() for part in own]}
    for own in parts.values():
        pieces = [cohort.params.blocks[block][:, columns] for block, columns in own]
        server = [cohort.server_rows.blocks[block][0, columns] for block, columns in own]
        found.append(Sent("parameters", pieces, [*server], module.aggregator))
    rule = module.statistics.rule
    for what, names in sent_statistics_by_kind(cohort.buffer_kinds, cohort.policy).items():
        whole = rule.per == "model"
        for group in [names] if whole else [[name] for name in names]:
            pieces = [cohort.buffers[name] for name in group]
            found.append(Sent(what, pieces, [0.0] * len(pieces), rule))
    return found


def sent_statistics_by_kind(kinds: Mapping[str, str], policy: Mapping[str, str]) -> dict[str, list[str]]:
    """The buffers, of some kinds, of the running statistics that clients send under a policy: ``"means"`` and ``"variances"``."""
    found: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        if kind in ("mean", "var") and policy[kind] in ("averaged", "pooled"):
            found.setdefault("means" if kind == "mean" else "variances", []).append(name)
    return found
