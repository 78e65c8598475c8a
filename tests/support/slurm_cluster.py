"""The Slurm cluster of this machine, where there is one: tests of it are skipped, with the reason, where there is none."""

import shutil
import subprocess

import pytest

from tests.support.cells import wait_until


def needs_slurm():
    """Skip the test unless a node of Slurm answers."""
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        pytest.skip("Slurm is not installed")
    nodes = subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True, check=False)
    if not {"idle", "mix", "alloc"} & {*nodes.stdout.split()}:
        pytest.skip(f"no node of Slurm answers: {(nodes.stdout or nodes.stderr).strip()}")


def slurm(*command):
    """Run a command of Slurm and return what it prints."""
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout.strip()


def state(job):
    return slurm("squeue", "-h", "-j", job, "-o", "%T")


def wait_until_queued_again(job):
    """Wait until a job is back in the queue, and let it start now: Slurm would wait for two minutes."""
    wait_until(lambda: state(job) == "PENDING", 100)
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60")
