"""This machine: a process for each cell, GPUs in turn."""

import os
import signal
import subprocess

import torch

from fl_lightning.studies.engines.base import Engine, Job


class LocalEngine(Engine):
    """Processes of this machine, in a process group each, so that Ctrl-C reaches them through the study alone."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._on_gpu: dict[str, str] = {}

    def submit(self, job: Job) -> None:
        """Start a process."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), **job.environment}
        if job.gpus:
            taken, visible = [*self._on_gpu.values()], os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = (
                visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
            )
            self._on_gpu[job.name] = min(devices, key=taken.count)
            environment["CUDA_VISIBLE_DEVICES"] = self._on_gpu[job.name]
        with job.log.open("ab") as log:
            self._running[job.name] = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                process_group=0,
            )

    def ended(self) -> dict[str, int]:
        """The exit status of each process that has ended."""
        found = {
            name: status for name, process in self._running.items() if (status := process.poll()) is not None
        }
        for name in found:
            del self._running[name]
            self._on_gpu.pop(name, None)
        return found

    def stop(self) -> None:
        """Terminate all processes, which finish their round first, and wait for them."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            process.wait()
