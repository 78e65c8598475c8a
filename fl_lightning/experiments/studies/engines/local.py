"""Engine that runs each cell in a process on this machine."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import BinaryIO

import torch

from fl_lightning.experiments.studies.engines.base import Engine, Job
from fl_lightning.experiments.studies.engines.forks import Forked, ForkServer, adopt_orphans
from fl_lightning.files import no_link

_GPU = "CUDA_VISIBLE_DEVICES"


class LocalEngine(Engine):
    """Engine that runs each cell in a process on this machine.

    Each process has a separate process group. Ctrl-C therefore reaches only the study, which stops
    its cells.

    On Linux, a cell is a fork of a server that has already imported PyTorch and Lightning. Cells
    with equal numbers of threads share a server. If the server fails, a cell starts as a new
    process.

    Args:
        forks: Whether cells may be forks (default True).
    """

    def __init__(self, forks: bool = True) -> None:
        visible = os.environ.get(_GPU)
        self._devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        self.cores, self.gpus = len(os.sched_getaffinity(0)), len(self._devices)
        self._running: dict[str, subprocess.Popen[bytes] | Forked] = {}
        self._on_gpu: dict[str, str] = {}
        self._forks = forks and sys.platform == "linux" and adopt_orphans()
        self._servers: dict[tuple[object, ...], ForkServer] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start a process for each job.

        A job with GPUs runs on the GPU with the fewest jobs.
        """
        for job in jobs:
            environment = {**os.environ, **job.environment}
            if job.gpus:
                taken = [*self._on_gpu.values()]
                self._on_gpu[job.name] = min(self._devices, key=taken.count)
                environment[_GPU] = self._on_gpu[job.name]
            with open(job.log, "ab", opener=no_link) as log:
                if not self._fork(job, environment, log):
                    self._running[job.name] = subprocess.Popen(
                        job.command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        process_group=0,
                    )

    def _fork(self, job: Job, environment: dict[str, str], log: BinaryIO) -> bool:
        """Start a job ``python -m MODULE`` as a fork; return False if that is not possible.

        In the fork, only the environment variable that selects the GPU is set. All other variables
        are set when the server starts, because some packages read variables such as
        ``OMP_NUM_THREADS`` on import.
        """
        if not self._forks or [*job.command[:2]] != [sys.executable, "-m"]:
            return False
        _, _, module, *arguments = job.command
        gpu = {name: value for name, value in environment.items() if name == _GPU}
        shared = {name: value for name, value in environment.items() if name != _GPU}
        key = (os.getcwd(), module, *sorted(shared.items()))
        if key not in self._servers:
            self._servers[key] = ForkServer(module, shared, log)
        server = self._servers[key]
        if not server.close.alive:  # the server ended before it served a job
            return False
        try:
            with server.start(arguments, log, gpu) as process:
                self._running[job.name] = process
        except ConnectionError:
            server.close()
            if server.has_served:
                del self._servers[key]  # the next job starts a new server
            return False
        return True

    def ended(self) -> dict[str, int]:
        """Return the exit status of each process that has ended."""
        polled = {name: process.poll() for name, process in self._running.items()}
        statuses = {name: status for name, status in polled.items() if status is not None}
        for name in statuses:
            del self._running[name]
            self._on_gpu.pop(name, None)
        return statuses

    def stop(self) -> None:
        """Send all processes a signal to stop; wait until all have finished their rounds."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            process.wait()
        for server in self._servers.values():
            server.close()
        self._servers = {}
