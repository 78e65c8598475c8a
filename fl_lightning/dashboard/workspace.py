"""The workspace of a project at Weights & Biases: what its panels show, and where it goes."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.dashboard.settings import session_mode
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import write_text

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

NAME = "Batch Normalization in federated learning"

CURVES: dict[str, dict[str, list[str]]] = {
    "Accuracy": {
        "validation accuracy": ["val/accuracy"],
        "test accuracy": ["test/accuracy"],
        "training loss": ["train/loss"],
        "loss of the server's model": ["val/loss", "test/loss"],
        "clients: mean and worst tenth": ["test/client_accuracy", "test/client_accuracy_worst"],
    },
    "BN doctor": {
        "statistics: clients' batches to the server's": ["bn/local_deviation_per_float"],
        "statistics: the server's change in a round": ["bn/global_change_per_float"],
        "statistics: a client's over rounds": ["bn/window_variance"],
        "gradient deviation": [f"bn/gradient_deviation{part}" for part in ("", "_affine", "_weights")],
        "gap of training and evaluation": ["bn/train_eval_gap", "bn/recalibration_gap"],
        "bias against a pooled pass": ["bn/mean_bias", "bn/var_bias"],
        "accuracy under other statistics": ["test/accuracy_batch_statistics", "test/accuracy_recalibrated"],
    },
    "Communication": {
        "bytes of a round": ["comm/upload_bytes", "comm/download_bytes"],
        "exchanges of a round": ["comm/exchanges"],
        "bytes so far": ["comm/total_upload_bytes", "comm/total_download_bytes"],
        "bytes of a client so far": ["comm/total_bytes_per_client"],
        "simulated seconds": ["comm/simulated_s", "comm/total_simulated_s"],
    },
    "Time": {
        "seconds of a round": ["time/round_s"],
        "where they go": [
            f"time/{part}_s"
            for part in (*RoundClock.PARTS, "evaluation", "logging")
        ],
        "training examples per second": ["time/samples_per_s"],
    },
    "Byzantine": {
        "attackers in a round": ["byzantine/clients"],
        "distance to the honest mean": [f"byzantine/distance_{what}" for what in VECTORS],
        "attackers' share": [f"byzantine/share_{what}" for what in VECTORS],
        "statistics that were mended": ["statistics/invalid", "statistics/clamped"],
        "clients that report": ["clients/reported", "clients/dropped", "clients/not_finite"],
        "skipped rounds": ["clients/skipped"],
    },
}
"""The panels of each section: their title, and the metrics of the history that they show."""
