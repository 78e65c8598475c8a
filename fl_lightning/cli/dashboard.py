"""``python -m fl_lightning dashboard``: a workspace at Weights & Biases for the logs of runs."""

import os
from collections.abc import Sequence

from fl_lightning.cli.messages import command
from fl_lightning.cli.options import CommandParser
from fl_lightning.experiments.dashboard.workspace import as_json, make_workspace, publish
from fl_lightning.files import user_file, write_text


@command()
def main(args: Sequence[str]) -> None:
    """Save the workspace at W&B and print its address, or write it to a file.

    Args:
        args: Arguments after ``dashboard``.
    """
    parser = CommandParser(
        "dashboard",
        "Make a workspace of panels for accuracy, Batch Normalization, communication, time and attacks.",
    )
    project = os.environ.get("WANDB_PROJECT") or "fl_lightning"
    entity = os.environ.get("WANDB_ENTITY")
    parser.add_argument("--project", default=project, help="project of the runs (default: %(default)s)")
    parser.add_argument("--entity", default=entity, help="owner of the project (default: owner of the key)")
    parser.add_argument(
        "--file", help="write the workspace as JSON to this file (default without a key: dashboard.json)"
    )
    options = parser.parse_args(args)
    url = publish(options.project, options.entity) if options.file is None else None
    if url is not None:
        print(f"W&B: {url}")
        return
    path = user_file("file", options.file or "dashboard.json")
    write_text(path, as_json(make_workspace(options.project, options.entity or "")))
    print(f"W&B: the workspace is in {path}; to save it there: wandb login, then this command without --file")
