"""What the engines of a study run for a cell: ``fit``, from where the last try of it ended, so that they may run it again."""

import fcntl
import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import yaml

from fl_lightning.cli.command_line import main as run
from fl_lightning.cli.messages import command
from fl_lightning.errors import OtherData
from fl_lightning.experiments.studies.cells import Cell
from fl_lightning.files import no_link

_PAUSE = 1.0  # seconds between two looks


@command()
def main(args: Sequence[str]) -> None:
    """Train a cell that has no result yet.

    One at a time: another study may have started it as well, or a scheduler may have lost sight of it.

    Args:
        args: The cell's configuration, ``--branch`` and a checkpoint to go on from where it has none of its own, ``--data`` and the
            digests of its data where newer cells say them, and ``--accept-stale`` as for the study.
    """
    parser = ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--branch")
    parser.add_argument("--data", type=json.loads)
    parser.add_argument("--accept-stale", action="store_true")
    own = parser.parse_args(args)
    config = yaml.safe_load(own.file.read_text())
    cell = Cell({}, config["seed_everything"], config, data=own.data)
    with ExitStack() as held:
        with suppress(OSError):  # it cannot be written, or not locked
            cell.key.parent.mkdir(parents=True, exist_ok=True)
            lock = cell.key.parent / f".{cell.key.name}.lock"
            turn = held.enter_context(open(lock, "a", opener=no_link))
            fcntl.flock(turn, fcntl.LOCK_EX)
        while (phase := cell.state(own.accept_stale).phase) == "running":
            time.sleep(_PAUSE)
        if phase == "done":
            return
        start = cell.checkpoint(own.accept_stale) or own.branch
        for options in ([f"--ckpt_path={start}"] if start else [], []):
            fit = ["fit", f"--config={own.file}", *options]
            print("python -m fl_lightning", *fit, flush=True)
            try:
                run(fit)
                break
            except SystemExit as stop:  # on other data than now there is nothing to go on from
                if stop.code != OtherData.exit_status:
                    raise


if __name__ == "__main__":
    main(sys.argv[1:])
