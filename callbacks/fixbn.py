"""FixBN: Zhong et al., "Making Batch Normalization Great in Federated Deep Learning", arXiv 2303.06530."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import lightning as L

from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.batch_norm import batch_norm_layers
from fl_lightning.schedules import round_at

if TYPE_CHECKING:
    from fl_lightning import Cohort, FederatedModule

_FROZEN = {
    "statistics": ("mean", "var", "counter"),
    "affine": ("affine",),
    "both": ("mean", "var", "counter", "affine"),
}


class FixBN(FederatedCallback):
    """Freeze Batch Normalization after round T* (Algorithm 1).

    Rounds 1..T* are FedAvg with BN. From round T* + 1 on every client normalises with the server's running statistics
    of round T*, which no longer change; gamma and beta go on learning unless they are frozen too (Table H).

    Args:
        freeze_round: T*, the last round with batch statistics; 0 freezes from the start.
        freeze_fraction: T* as a fraction of the planned rounds, in [0, 1]. Default 0.5 when neither is given.
        freeze: What is frozen: running ``"statistics"`` (the method), ``"affine"`` gamma and beta, or ``"both"``.

    Raises:
        ConfigurationError: Both ways to give T* are used, one is out of range, or the model has no BN layer.
    """

    def __init__(
        self,
        freeze_round: int | None = None,
        freeze_fraction: float | None = None,
        freeze: Literal["statistics", "affine", "both"] = "statistics",
    ) -> None:
        if freeze_round is not None and freeze_fraction is not None:
            raise ConfigurationError(
                f"FixBN: freeze_round: {freeze_round} and freeze_fraction: {freeze_fraction} both set T*; give one of them"
            )
        if freeze_round is not None and freeze_round < 0:
            raise ConfigurationError(f"FixBN.freeze_round: {freeze_round} must be a round number >= 0")
        if freeze_fraction is not None and not 0 <= freeze_fraction <= 1:
            raise ConfigurationError(f"FixBN.freeze_fraction: {freeze_fraction} must lie in [0, 1]")
        if freeze not in _FROZEN:
            raise ConfigurationError(f"FixBN.freeze: {freeze!r} must be one of {', '.join(_FROZEN)}")
        self.freeze_round = freeze_round
        self.freeze_fraction = freeze_fraction
        self.freeze = freeze

    def last_batch_round(self, total_rounds: int) -> int:
        """T*: the last round that trains with batch statistics."""
        if self.freeze_round is not None:
            return self.freeze_round
        return round_at(0.5 if self.freeze_fraction is None else self.freeze_fraction, total_rounds)

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Frozen after T*."""
        frozen = round_number > self.last_batch_round(total_rounds)
        return dict.fromkeys(_FROZEN[self.freeze], "frozen") if frozen else {}

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Check that there is something to freeze."""
        model = type(pl_module.model).__name__
        layers = batch_norm_layers(pl_module.model)
        if not layers:
            raise ConfigurationError(
                f"FixBN: the model {model} has no Batch Normalization layer; use norm: bn"
            )
        untracked = [name for name, layer in layers.items() if layer.running_mean is None]
        if untracked and self.freeze != "affine":
            raise ConfigurationError(
                f"FixBN: BN layer {untracked[0]!r} of {model} keeps no running statistics to freeze; use "
                "track_running_stats=True"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]  # rounds have one
        """Say so when T* is beyond the last round."""
        rounds, last = pl_module.planned_rounds, self.last_batch_round(pl_module.planned_rounds)
        if last >= rounds:
            pl_module.print(f"FixBN: T* = {last} of {rounds} rounds, so nothing is frozen in this run.")

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Log T*."""
        pl_module.log("fixbn/freeze_round", float(self.last_batch_round(pl_module.planned_rounds)))
