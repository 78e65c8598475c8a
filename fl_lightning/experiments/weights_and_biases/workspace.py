"""Workspace of a Weights & Biases project. The module defines the panels and uploads them."""

from collections.abc import Mapping
from typing import Any

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.weights_and_biases.settings import (
    WandbSettings,
    error_in_one_line,
    session_mode,
)
from fl_lightning.round.clock import RoundClock

_SENT = ("parameters", "means", "variances")
_SECONDS = (*RoundClock.PARTS, "evaluation", "logging")

_FIXED = {
    "BN doctor": {
        "clients' batches: distance to the server's statistics": ["bn/local_deviation_per_float"],
        "the server's statistics: change in a round": ["bn/global_change_per_float"],
        "a client's batches over the rounds": ["bn/window_variance"],
        "gradient deviation": [f"bn/gradient_deviation{part}" for part in ("", "_affine", "_weights")],
        "gap between training and evaluation": ["bn/train_eval_gap", "bn/recalibration_gap"],
        "running statistics: bias": ["bn/mean_bias", "bn/var_bias"],
    },
    "Communication": {
        "bytes in a round": ["comm/upload_bytes", "comm/download_bytes"],
        "bytes so far": ["comm/total_upload_bytes", "comm/total_download_bytes"],
        "bytes of a client so far": ["comm/total_bytes_per_client"],
        "exchanges in a round": ["comm/exchanges"],
        "simulated seconds": ["comm/simulated_s", "comm/total_simulated_s"],
    },
    "Time": {
        "seconds of a round": ["time/round_s"],
        "seconds of its parts": [f"time/{part}_s" for part in _SECONDS],
        "examples per second": ["time/samples_per_s"],
    },
    "Byzantine": {
        "attackers in a round": ["byzantine/clients"],
        "distance to the honest mean": [f"byzantine/distance_{what}" for what in _SENT],
        "the attackers' share": [f"byzantine/share_{what}" for what in _SENT],
        "invalid and clamped statistics": ["statistics/invalid", "statistics/clamped"],
        "clients": ["clients/reported", "clients/dropped", "clients/not_finite"],
        "skipped rounds": ["clients/skipped"],
    },
}
"""Panels that are shown for every task.

The outer keys are sections, and the inner keys are titles of panels. The values are metrics.
"""

Metrics = Mapping[str, Mapping[str, str]]
"""Metrics of a task. Each metric has a ``label`` and ``best`` (``"max"`` or ``"min"``).

The first metric is the task's quality, such as accuracy."""


def curves(metrics: Metrics) -> dict[str, dict[str, list[str]]]:
    """Return the metrics of each line plot.

    The outer keys are sections, and the inner keys are titles of plots.

    Args:
        metrics: The metrics of the task.
    """
    quality = next(iter(metrics))
    label = metrics[quality]["label"]
    both = ("val", "test")
    evaluated = {
        f"{words} {metric['label']}": [f"{split}/{name}"]
        for name, metric in metrics.items()
        if name != "loss"
        for split, words in (("val", "validation"), ("test", "test"))
    }
    model = {
        **evaluated,
        "training loss": ["train/loss"],
        "loss of the server's model": [f"{split}/loss" for split in both],
        "learning rates": ["client/lr", "server/lr"],
        f"clients' {label}: mean and worst tenth": [
            f"{split}/client_{quality}{part}" for split in both for part in ("", "_worst")
        ],
    }
    doctor = {
        **_FIXED["BN doctor"],
        f"{label} under other statistics": [
            f"{split}/{quality}_{what}" for split in both for what in ("batch_statistics", "recalibrated")
        ],
    }
    return {label[0].upper() + label[1:]: model, **_FIXED, "BN doctor": doctor}


def final(metrics: Metrics) -> dict[str, list[str]]:
    """Return the metrics of each bar chart in the first section, keyed by the chart's title.

    The metrics are numbers in the summary of a W&B run.
    """
    return {
        f"final {metric['label']}": [f"final/{split}/{name}" for split in ("val", "test")]
        for name, metric in metrics.items()
    }


def publish(project: str, entity: str | None, metrics: Metrics) -> str:
    """Save the workspace at W&B, and return its address.

    Args:
        project: Project of the runs.
        entity: User or team that owns the project. None stands for the default of the API key.
        metrics: The metrics of the runs' task.

    Raises:
        ConfigurationError: The package ``wandb-workspaces`` is missing, W&B is not online, or W&B
            rejects the workspace.
    """
    try:
        if session_mode(WandbSettings().asked) != "online":
            raise ConfigurationError(
                "dashboard: W&B is not online; store an API key by wandb login, and set WANDB_MODE to online or not at all"
            )
        import wandb

        workspace = make_workspace(project, entity or wandb.Api().default_entity or "", metrics)
        workspace.save()
        return str(workspace.url)
    except ConfigurationError:
        raise
    except Exception as error:  # for example a network error
        raise ConfigurationError(
            f"dashboard: W&B did not save the workspace: {error_in_one_line(error)}"
        ) from error


def make_workspace(project: str, entity: str, metrics: Metrics) -> Any:
    """Return a workspace of line plots over the rounds and bar charts of final metrics.

    The plots show the mean and standard deviation over seeds.

    Raises:
        ConfigurationError: The package ``wandb-workspaces`` is missing.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        from wandb_workspaces import expr, workspaces
    except ImportError as error:
        raise ConfigurationError(
            "dashboard: the package wandb-workspaces is not installed; pip install 'fl_lightning[dashboard]'"
        ) from error
    seeds = {"groupby": "Group", "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    bars = [reports.BarPlot(title=title, metrics=names, **seeds) for title, names in final(metrics).items()]
    sections: list[Any] = []
    for section, panels in curves(metrics).items():
        lines = [
            reports.LinePlot(title=title, x="round", title_x="round", y=names, **seeds)
            for title, names in panels.items()
        ]
        shown = [*lines] if sections else [*bars, *lines]
        sections.append(workspaces.Section(name=section, panels=shown, is_open=True))
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="Batch Normalization in federated learning",
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="round"),
        runset_settings=workspaces.RunsetSettings(groupby=[expr.Metric("Group")]),
    )
