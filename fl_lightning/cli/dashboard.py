"""``python -m fl_lightning dashboard``: make a Weights & Biases workspace with panels for runs."""

import os
from collections.abc import Sequence

from fl_lightning.cli.messages import command
from fl_lightning.cli.options import CommandParser
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.dashboard.contents import metrics_of
from fl_lightning.experiments.dashboard.workspace import Metrics, as_json, make_workspace, publish
from fl_lightning.experiments.run_directory.describe import shown_metrics
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.files import user_file, user_path, write_text
from fl_lightning.round.tasks import Classification


@command()
def main(args: Sequence[str]) -> None:
    """Save the workspace at W&B and print its address, or write the workspace to a file.

    Args:
        args: Arguments after ``dashboard``.
    """
    parser = CommandParser(
        "dashboard",
        "Make a W&B workspace with panels for runs: metrics, Batch Normalization, communication, time and attacks.",
    )
    project = os.environ.get("WANDB_PROJECT") or "fl_lightning"
    entity = os.environ.get("WANDB_ENTITY")
    parser.add_argument("--project", default=project, help="project of the runs (default: %(default)s)")
    parser.add_argument("--entity", default=entity, help="owner of the project (default: owner of the key)")
    parser.add_argument(
        "--file", help="write the workspace as JSON to this file (default without an API key: dashboard.json)"
    )
    parser.add_argument(
        "folders", metavar="DIR", nargs="*",
        help="runs whose metrics are shown, such as runs/mine/8858b953-s0 (default: the metrics of a classification)",
    )  # fmt: skip
    options = parser.parse_args(args)
    metrics = _metrics(options.folders)
    url = publish(options.project, options.entity, metrics) if options.file is None else None
    if url is not None:
        print(f"W&B: {url}")
        return
    path = user_file("file", options.file or "dashboard.json")
    write_text(path, as_json(make_workspace(options.project, options.entity or "", metrics)))
    print(f"W&B: the workspace is in {path}; to save it at W&B: wandb login, then rerun without --file")


def _metrics(folders: Sequence[str]) -> Metrics:
    metrics: dict[str, dict[str, str]] = {}
    for folder in folders:
        attempt = Attempt(user_path("dashboard", folder))
        if not attempt.identity.is_file():
            raise ConfigurationError(
                f"dashboard: {attempt.path} is no run: it has no {attempt.identity.name}; give folders such as runs/NAME/HASH-s0"
            )
        metrics |= {name: x for name, x in metrics_of(attempt).items() if name not in metrics}
    return metrics or shown_metrics(Classification())
