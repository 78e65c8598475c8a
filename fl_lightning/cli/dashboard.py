"""``python -m fl_lightning dashboard``: a workspace at Weights & Biases with panels for what runs log."""

import os
from collections.abc import Sequence

from fl_lightning.cli.messages import CommandParser, command
from fl_lightning.experiments.dashboard.workspace import as_json, make_workspace, publish
from fl_lightning.files import user_file, write_text


@command()
def main(args: Sequence[str]) -> None:
    """Save the workspace and print its address, or write it to a file and say how it comes to W&B.

    Args:
        args: Arguments after ``dashboard``.
    """
    parser = CommandParser(
        "dashboard",
        "Make a workspace of panels for accuracy, Batch Normalization, communication, time and attacks.",
    )
    given = os.environ.get
    project = given("WANDB_PROJECT") or "fl_lightning"
    parser.add_argument("--project", default=project, help="the project of the runs (default: %(default)s)")
    parser.add_argument(
        "--entity", default=given("WANDB_ENTITY"), help="its owner (default: that of the key)"
    )
    parser.add_argument(
        "--file",
        help="write the workspace's JSON, also where there is a key (default without: dashboard.json)",
    )
    own = parser.parse_args(args)
    url = publish(own.project, own.entity) if own.file is None else None
    if url is not None:
        print(f"W&B: {url}")
        return
    path = user_file("file", own.file or "dashboard.json")
    write_text(path, as_json(make_workspace(own.project, own.entity or "")))
    print(f"W&B: the workspace is in {path}; to save it there: wandb login, then this command without --file")
