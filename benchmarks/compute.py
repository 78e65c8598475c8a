"""Lower bounds of a round's time: passes, or only their convolutions, on all cores."""

import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contenders import Timing
from benchmarks.workloads import Workload
from fl_lightning.cores import usable_cores

Process = subprocess.Popen[str]


class Compute:
    """Contender that computes only the forward and backward passes of a workload's client steps.

    It loads no data and has no augmentation, optimizer or aggregation. All passes use the same
    model and the same batch of 20 normalised images in channels_last.

    There is one process per core, with one thread. Each process runs its share of the passes.
    Processes do not wait for each other between rounds. If the number of client steps is not a
    multiple of the number of cores, each process rounds its number of passes up, and the time is
    scaled down to client steps / cores. The start of the processes is not timed. The processes end
    with this object.

    Args:
        workload: The federation and its local work; only the number of client steps is used.
        model_name: A name of ``recipe.MODELS``.
        num_processes: Number of processes. Default: the number of cores that this process may use.
        kind: ``"compute"`` for whole passes, ``"convolutions"`` for only their convolutions, or
            ``"compute_compiled"`` for compiled passes.
    """

    def __init__(
        self, workload: Workload, model_name: str, num_processes: int | None = None, kind: str = "compute"
    ) -> None:
        self.client_steps = workload.client_steps
        self.processes: list[Process] = []
        weakref.finalize(self, _end, self.processes)
        for _ in range(num_processes or usable_cores()):
            self.processes.append(_start(kind, model_name))
        for process in self.processes:
            _await(process, "ready")

    def run(self, rounds: int) -> Timing:
        """Run the passes of ``rounds`` rounds and return their time."""
        timing, steps = Timing(), rounds * self.client_steps
        passes = -(-steps // len(self.processes))
        with timing.total:
            for process in self.processes:
                _tell(process, passes)
            for process in self.processes:
                _await(process, "done")
        share = steps / (passes * len(self.processes))
        timing.total.wall *= share
        timing.total.cpu *= share
        return timing


def _start(kind: str, model_name: str) -> Process:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.passes", kind, model_name],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C must reach only the parent process, which ends the others
    )


def _tell(process: Process, passes: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{passes}\n")
    process.stdin.flush()


def _await(process: Process, answer: str) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != answer:
        raise RuntimeError("compute: a process has failed, see above")


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()
