"""Engine that runs each cell in a process on this machine."""

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, invalidate_caches
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGTERM

import torch

from fl_lightning.cores import usable_cores
from fl_lightning.experiments.studies.engines.base import Engine, Job

_GPU = "CUDA_VISIBLE_DEVICES"
_SERVER = "fl_lightning.experiments.studies.engines.fork_server"


class LocalEngine(Engine):
    """Engine that runs each cell in a process on this machine.

    Each process has a separate process group. Ctrl-C therefore reaches only the study, which stops
    its cells. If the study is killed, the processes continue.

    A cell is a fork of a server (``multiprocessing``) that has already imported PyTorch and
    Lightning. A cell imports modules of your own itself. If the server is killed, its cells continue,
    and the next cell starts a new server. A cell that was just starting fails with exit status 255.

    Args:
        module: Module of all jobs.
        forks: Whether processes are forks of a server (default True). Otherwise each process is
            new and imports everything itself.
    """

    def __init__(self, module: str, forks: bool = True) -> None:
        super().__init__(module)
        visible = os.environ.get(_GPU)
        self._devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        self.cores, self.gpus = usable_cores(), len(self._devices)
        self._context = get_context("forkserver") if forks else get_context("spawn")
        self._context.set_forkserver_preload([module, _SERVER])
        self._running: dict[str, BaseProcess] = {}
        self._on_gpu: dict[str, str] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start a process for each job.

        A job with GPUs runs on the GPU with the fewest jobs.
        """
        for job in jobs:
            before, environment = dict(os.environ), {**os.environ, **job.environment}
            if job.gpus:
                taken = [*self._on_gpu.values()]
                environment[_GPU] = self._on_gpu[job.name] = min(self._devices, key=taken.count)
            known, make_known = self._context.Pipe(duplex=False)
            arguments = (job.module, job.arguments, job.log, environment, known)
            process = self._context.Process(target=_run, args=arguments, name=job.name)
            with known, make_known:
                # a server that starts now imports PyTorch with the job's OMP_NUM_THREADS
                os.environ |= environment
                try:
                    process.start()
                finally:
                    os.environ.clear()
                    os.environ |= before
                self._running[job.name] = process
                make_known.send(None)

    def ended(self) -> dict[str, int]:
        """Return the exit status of each process that has ended."""
        polled = {name: process.exitcode for name, process in self._running.items()}
        statuses = {name: status for name, status in polled.items() if status is not None}
        for name in statuses:
            del self._running[name]
            self._on_gpu.pop(name, None)
        return statuses

    def stop(self) -> None:
        """Send all processes a signal to stop; wait until all have finished their rounds."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.join()


def _run(
    module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], known: Connection
) -> None:
    """Run a job in this process.

    If the study ends before it knows this process, the other end of the pipe ``known`` is closed,
    and the job does not begin.
    """
    os.setpgid(0, 0)
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ |= environment
    try:
        known.recv()
    except EOFError:
        sys.exit(128 + SIGTERM)
    invalidate_caches()  # the user may have added modules since the server started
    server = sys.modules.get(_SERVER)
    if server is not None and not server.is_current():
        # a source file has changed since the server imported it: import everything anew
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    try:
        import_module(module).main(arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not call these functions
