"""FixBN: Zhong et al., "Making Batch Normalization Great in Federated Deep Learning", arXiv 2303.06530."""

from typing import Literal

from fl_lightning.batch_norm import STATISTICS
from fl_lightning.methods import Freezing
from fl_lightning.optimizers import check_milestone, round_at

_KINDS = {"statistics": STATISTICS, "affine": ("affine",), "both": (*STATISTICS, "affine")}


class FixBN(Freezing):
    """FixBN: after round T*, BN normalises with frozen running statistics (Algorithm 1).

    Rounds 1 to T* are FedAvg with BN. From round T* + 1 on, every client normalises with the
    server's running statistics of round T*. gamma and beta continue to train, unless ``freeze``
    includes them (Table H of the paper).

    Args:
        freeze_round: T*, the last round with batch statistics: a round (int), or a fraction of the
            planned rounds in [0, 1] (float). With 0, BN is frozen from the start.
        freeze: State that is frozen: ``"statistics"`` (the paper's method), ``"affine"`` (gamma and
            beta) or ``"both"``.

    Raises:
        ConfigurationError: A setting is out of range, or the model has no BN layer.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=4, callbacks=[FixBN(freeze_round=2)])
        >>> int(state["1.num_batches_tracked"])  # rounds with batch statistics
        2
    """

    paper = "Zhong et al., arXiv 2303.06530"
    equalities = ("own_twin_when_frozen",)
    examples = ({}, {"freeze": "affine"}, {"freeze_round": 1, "freeze": "both"})

    def __init__(
        self,
        freeze_round: int | float = 0.5,
        freeze: Literal["statistics", "affine", "both"] = "statistics",
    ) -> None:
        check_milestone("FixBN.freeze_round", freeze_round, ends=True)
        self.freeze_round, self.freeze = freeze_round, freeze
        self.kinds = _KINDS[freeze]

    def last_batch_round(self, total_rounds: int) -> int:
        """Return T*, the last round that trains with batch statistics."""
        return round_at(self.freeze_round, total_rounds)

    def same_until(self, total_rounds: int) -> int:
        """Return T*: up to this round, the run equals a run without this method, bit for bit."""
        return self.last_batch_round(total_rounds)
