"""Standard output may go away while a run is under way: `| head`, a full disk, a terminal that is closed."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.command_line import rows, run, write_config


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


def full_device():
    return open("/dev/full", "w", buffering=1)


@pytest.mark.parametrize("stream", [closed_pipe, full_device, lambda: None])
def test_run_whose_output_nobody_takes_ends_with_its_result(stream, monkeypatch, capsys):
    every_round = {"class_path": "RoundProgress", "init_args": {"every_n_seconds": 0}}
    write_config({"trainer.callbacks": [every_round]})
    with stream() or nullcontext() as output:
        monkeypatch.setattr(sys, "stdout", output)
        attempt = run().attempt
        assert sys.stdout is output
    assert capsys.readouterr().err == ""
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2, 3, 4]
    assert attempt.result.exists()


@pytest.mark.slow
def test_a_full_disk_from_the_first_line_on_ends_no_run():
    write_config({"trainer.max_epochs": 1})
    with open("/dev/full", "w") as output:
        command = [sys.executable, "-m", "fl_lightning", "fit", "--config", "tiny.yaml"]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len([*Path("runs").glob("*/*/result.json")]) == 1


def test_error_that_nobody_reads_still_sets_the_exit_status(monkeypatch):
    with closed_pipe() as output:
        monkeypatch.setattr(sys, "stderr", output)
        with pytest.raises(SystemExit) as stop:
            run("--trainer.max_epochs", "many")
    assert stop.value.code == 2
