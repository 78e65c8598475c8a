"""SlidingWindowFixBN: appendix B.6 of Zhong et al., "Making Batch Normalization Great in Federated Deep Learning"."""

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor

from fl_lightning import Cohort, FederatedModule
from fl_lightning.cohort import ClientMemory
from fl_lightning.errors import check_number
from fl_lightning.methods import FoundFreezing, sent_kinds


class SlidingWindowFixBN(FoundFreezing):
    """FixBN with a window: T* is the round from which the statistics change at a steady pace.

    In each round, every client sends running statistics. A client's change is the L1 distance
    between the statistics in this round and in the client's previous round. A round's change is the
    weighted mean of the clients' changes. A window holds the changes of the last W rounds. Once the
    variance in the window is below ``threshold``, the search ends. T* is the current round, and
    statistics are frozen from the next round on. The variance has the factor 1/W, as in the paper.

    A client that takes part for the first time has no change. Statistics that are not finite are
    ignored. If no client of a round has a change, the window does not change.

    The paper does not define the norm, or how clients agree on T*. The L1 norm, the weighted mean
    and a common T* for all clients are our choices.

    Until T* is found, each round logs ``fixbn/statistics_change``, the round's change. If the
    window is full, the round also logs ``fixbn/window_variance``. Once T* is found, rounds log
    ``fixbn/freeze_round``.

    Args:
        window: Number of rounds W in the window, at least 2. The paper recommends a large number.
        threshold: Threshold tau of the variance, at least 0. Suitable values grow with the square
            of the number of BN channels, because the L1 norm is a sum over channels. The paper
            recommends a small value. With 0, statistics are never frozen.

    Raises:
        ConfigurationError: A setting is out of range, or the model has no BN layer with running
            statistics.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> method = SlidingWindowFixBN(window=2, threshold=1e9)
        >>> state = train(small_cnn(), blobs(), rounds=6, callbacks=[method])
        SlidingWindowFixBN: T* = 3; BN is frozen from round 4 on.
    """

    paper = "Zhong et al., arXiv 2303.06530, appendix B.6"
    equalities = ("own_twin_when_frozen",)
    examples = ({"window": 10, "threshold": 0.01}, {"window": 2, "threshold": 1e9})
    saved = ("changes", "statistics")

    def __init__(self, window: int, threshold: float) -> None:
        check_number("SlidingWindowFixBN.window", window, " rounds; one has no variance", least=2)
        check_number("SlidingWindowFixBN.threshold", threshold, least=0)
        self.window, self.threshold = window, threshold
        self.changes: list[float] = []
        self.statistics = ClientMemory()

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Add this round's change to the window, and freeze if the window's variance is small."""
        if self.freeze_round is not None:
            return
        names = [name for name, kind in sent_kinds(cohort).items() if kind in ("mean", "var")]
        sent = torch.cat([cohort.buffers[name].flatten(1) for name in names], 1)
        finite = [row for row, fine in enumerate(sent.isfinite().all(1).tolist()) if fine]
        seen = [row for row in finite if cohort.client_ids[row] in self.statistics]
        if seen:
            last = [self.statistics[cohort.client_ids[row]]["statistics"] for row in seen]
            before = torch.stack(last).to(sent)
            change = mean_change(sent[seen], before, cohort.weights[seen])
            self.changes = [*self.changes, change][-self.window :]
            pl_module.log("fixbn/statistics_change", change)
        for row in finite:
            self.statistics[cohort.client_ids[row]] = {"statistics": sent[row].clone()}
        if seen and len(self.changes) == self.window:
            variance = window_variance(self.changes)
            pl_module.log("fixbn/window_variance", variance)
            if variance < self.threshold:
                self.freeze_after(pl_module, cohort.round)
                self.statistics = ClientMemory()


def mean_change(now: Tensor, before: Tensor, weights: Tensor) -> float:
    """Return the L1 distance between new and earlier statistics, averaged over n clients.

    The mean is weighted, and is computed in float64.

    Args:
        now: New statistics of each client, ``[n, floats]``.
        before: Earlier statistics of each client, ``[n, floats]``.
        weights: Weight of each client, ``[n]``, positive, with any sum.
    """
    changes = (now.double() - before.double()).abs().sum(1)
    return float(weights.double() @ changes / weights.double().sum())


def window_variance(changes: Sequence[float]) -> float:
    """Return the biased variance of the W changes in the window (factor 1/W, as in appendix B.6)."""
    return float(torch.tensor(changes, dtype=torch.float64).var(correction=0))
