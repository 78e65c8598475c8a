"""Engine of this machine: a process for each cell, spread over the GPUs."""

import os
import signal
import subprocess
from collections.abc import Sequence

import torch

from fl_lightning.experiments.studies.engines.base import Engine, Job
from fl_lightning.files import no_link


class LocalEngine(Engine):
    """Runs each cell in a separate process group, so that Ctrl-C reaches only the study."""

    def __init__(self) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        self.cores, self.gpus = len(os.sched_getaffinity(0)), len(self._devices)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._on_gpu: dict[str, str] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start a process for each job, on the GPU with the fewest processes."""
        for job in jobs:
            environment = {**os.environ, **job.environment}
            if job.gpus:
                taken = [*self._on_gpu.values()]
                self._on_gpu[job.name] = min(self._devices, key=taken.count)
                environment["CUDA_VISIBLE_DEVICES"] = self._on_gpu[job.name]
            with open(job.log, "ab", opener=no_link) as log:
                self._running[job.name] = subprocess.Popen(
                    job.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    process_group=0,
                )

    def ended(self) -> dict[str, int]:
        """Return the exit status of each process that has ended."""
        polled = {name: process.poll() for name, process in self._running.items()}
        statuses = {name: status for name, status in polled.items() if status is not None}
        for name in statuses:
            del self._running[name]
            self._on_gpu.pop(name, None)
        return statuses

    def stop(self) -> None:
        """Terminate all processes and wait until they have finished their rounds."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            process.wait()
