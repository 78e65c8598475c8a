"""``python -m fl_lightning dashboard``: make a Weights & Biases workspace with panels for runs."""

import json
import os
from collections.abc import Sequence

from fl_lightning.cli.options import CommandParser
from fl_lightning.cli.print_errors import command
from fl_lightning.clients.tasks import Classification
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.describe import shown_metrics
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.weights_and_biases.workspace import Metrics, publish
from fl_lightning.files import user_path


@command()
def main(args: Sequence[str]) -> None:
    """Save the workspace at W&B and print its address.

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
        "folders", metavar="DIR", nargs="*",
        help="runs whose metrics are shown, such as runs/mine/8858b953-s0 (default: the metrics of a classification)",
    )  # fmt: skip
    options = parser.parse_args(args)
    print(f"W&B: {publish(options.project, options.entity, _metrics(options.folders))}")


def _metrics(folders: Sequence[str]) -> Metrics:
    metrics: dict[str, dict[str, str]] = {}
    for folder in folders:
        attempt = Attempt(user_path("dashboard", folder))
        if not attempt.identity.is_file():
            raise ConfigurationError(
                f"dashboard: {attempt.path} is no run: it has no {attempt.identity.name}; give folders such as runs/NAME/HASH-s0"
            )
        shown = json.loads(attempt.identity.read_text())["metrics"]
        metrics |= {name: metric for name, metric in shown.items() if name not in metrics}
    return metrics or shown_metrics(Classification())
