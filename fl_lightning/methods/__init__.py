"""Base classes of federated methods and of observers, and functions that methods share."""

from fl_lightning.methods.adaptations import balanced_statistics, entropy_steps, moving_statistics
from fl_lightning.methods.callback import FederatedCallback, Observer
from fl_lightning.methods.fine_tuning import fine_tuned
from fl_lightning.methods.freezing import FoundFreezing, Freezing
from fl_lightning.methods.local_state import LocalState
from fl_lightning.methods.own_data import (
    Adaptation,
    ClientResult,
    adapt_statistics,
    adapted_state,
    evaluate_client,
    evenly_spaced,
    formatted,
    main_metric,
    mean_metrics,
    pooled_metrics,
    spread_over_clients,
    weighed_accuracy,
)
from fl_lightning.methods.personal_evaluation import PersonalEvaluation
from fl_lightning.methods.privacy import PrivateMethod, epsilon_of, noise_for
from fl_lightning.methods.private_statistics import release_statistics
from fl_lightning.methods.run_report import Drawing, MetricRows, Report, Table
from fl_lightning.methods.running_statistics import (
    client_statistics,
    joined_statistics,
    sent_kinds,
    server_statistics,
    set_server_statistics,
    split_statistics,
)
from fl_lightning.methods.statistics_pass import Mode, measured_statistics
from fl_lightning.methods.variant_evaluation import BATCH_STATISTICS, VariantEvaluation

__all__ = [
    "BATCH_STATISTICS",
    "Adaptation",
    "ClientResult",
    "Drawing",
    "FederatedCallback",
    "FoundFreezing",
    "Freezing",
    "LocalState",
    "MetricRows",
    "Mode",
    "Observer",
    "PersonalEvaluation",
    "PrivateMethod",
    "Report",
    "Table",
    "VariantEvaluation",
    "adapt_statistics",
    "adapted_state",
    "balanced_statistics",
    "client_statistics",
    "entropy_steps",
    "epsilon_of",
    "evaluate_client",
    "evenly_spaced",
    "fine_tuned",
    "formatted",
    "joined_statistics",
    "main_metric",
    "mean_metrics",
    "measured_statistics",
    "moving_statistics",
    "noise_for",
    "pooled_metrics",
    "release_statistics",
    "sent_kinds",
    "server_statistics",
    "set_server_statistics",
    "split_statistics",
    "spread_over_clients",
    "weighed_accuracy",
]
