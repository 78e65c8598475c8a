"""Command with which an engine trains a cell of a study.

The command runs ``fit``. If the cell has checkpoints, ``fit`` resumes from the newest checkpoint.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from fl_lightning.cli.command_line import main as run
from fl_lightning.cli.print_errors import command
from fl_lightning.errors import OtherData
from fl_lightning.experiments.studies.cells import Cell
from fl_lightning.files import locked
from fl_lightning.yaml_file import plain_yaml

_PAUSE = 1.0  # seconds between two checks of the cell's state


@command()
def main(args: Sequence[str]) -> None:
    """Train a cell that has no result yet.

    A lock ensures that only one process at a time trains the cell.

    Args:
        args: Configuration file of the cell, and a JSON object. The object's key ``branch`` gives a
            checkpoint of the parent cell, from which a cell without a checkpoint starts. ``data``
            gives the required digests of the data. If ``rerun`` is true, a result of other code
            does not count.
    """
    file, options = args[0], json.loads(args[1])
    config = plain_yaml(Path(file).read_text())
    cell = Cell({}, config["seed_everything"], config, options["rerun"], data=options["data"])
    with ExitStack() as held:
        with suppress(OSError):  # on a file system without locks, train without a lock
            cell.key.parent.mkdir(parents=True, exist_ok=True)
            lock = cell.key.parent / f".{cell.key.name}.lock"
            held.enter_context(locked(lock))
        while (phase := cell.state().phase) == "running":
            time.sleep(_PAUSE)
        if phase == "done":
            return
        start = cell.checkpoint() or options["branch"]
        for from_checkpoint in ([f"--ckpt_path={start}"] if start else [], []):
            fit = ["fit", f"--config={file}", *from_checkpoint]
            print("python -m fl_lightning", *fit, flush=True)
            try:
                run(fit)
                break
            # if the checkpoint is from a run on different data, start without a checkpoint
            except SystemExit as stop:
                if stop.code != OtherData.exit_status:
                    raise


if __name__ == "__main__":
    main(sys.argv[1:])
