"""A Slurm cluster, by submitit: cells that are submitted together are one array of jobs."""

import os
import shutil
import signal
import time
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import submitit

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.studies.engines.base import Engine, Job, run_command
from fl_lightning.files import no_link

_MINUTES = 60  # of a job; one that needs longer is queued again and goes on
_TIMES = 10_000  # that a job may be queued again at its time limit
# USR2, which all processes of a job get, tells submitit to have it queued again, and the cell nothing
_UNTIL_TERMINATED = ("sh", "-c", "trap '' USR2; exec \"$@\"", "sh")
_ENDED = [
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "FORGOTTEN", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT",
]  # fmt: skip
_ARRAY = 1000  # jobs, what Slurm allows unless it is told otherwise


class SlurmEngine(Engine):
    """Jobs that are queued again when they are preempted, reach their time limit or lose their node.

    What else ``sbatch`` shall know is said by its own environment variables, such as ``SBATCH_PARTITION``, ``SBATCH_ACCOUNT`` and
    ``SBATCH_TIMELIMIT``. All nodes need this Python and the working directory at the same paths.

    Args:
        cluster: The cluster of submitit.

    Raises:
        ConfigurationError: There is no Slurm here.
    """

    cores = gpus = _ARRAY  # Slurm knows

    def __init__(self, cluster: str = "slurm") -> None:
        if cluster == "slurm":
            if shutil.which("srun") is None:
                raise ConfigurationError(
                    "--engine: slurm is not on this machine: it has no srun; use one that has, or local"
                )
            submitit.SlurmJob.watcher = _Queue(delay_s=60)
        self._cluster = cluster
        self._running: dict[str, tuple[submitit.Job[int], Path]] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, those with equal needs as one array."""
        for threads, gpus in dict.fromkeys((job.threads, ceil(job.gpus)) for job in jobs):
            own = [job for job in jobs if (job.threads, ceil(job.gpus)) == (threads, gpus)]
            folder = own[0].log.parent / "submitit"
            executor = submitit.AutoExecutor(folder, cluster=self._cluster, slurm_max_num_timeout=_TIMES)
            executor.update_parameters(
                timeout_min=_MINUTES,
                cpus_per_task=threads,
                gpus_per_node=gpus or None,
                slurm_array_parallelism=_ARRAY,
                slurm_additional_parameters={"requeue": True},
            )
            queued = {}
            try:
                with executor.batch():
                    for job in own:
                        command = (*_UNTIL_TERMINATED, *job.command)
                        arguments = (command, str(job.log.resolve()), os.getcwd(), job.environment)
                        queued[job.name] = executor.submit(_Command(), *arguments), job.log
            except submitit.core.utils.FailedJobError as error:
                raise ConfigurationError(
                    f"--engine: slurm does not take the jobs: {' '.join(str(error).split())}"
                ) from error
            self._running |= queued

    def ended(self) -> dict[str, int]:
        """The exit status of each job that has ended; 1 of one that Slurm has ended, and its log says why."""
        found = {}
        for name in [name for name, (job, _) in self._running.items() if job.done()]:
            job, path = self._running.pop(name)
            trouble = job.exception()
            found[name] = 1 if trouble else job.result()
            if trouble:
                reason = str(trouble).rpartition("\n")[2] or type(trouble).__name__
                if isinstance(trouble, submitit.core.utils.UncompletedJobError):
                    reason = f"job {job.job_id} is {job.state} and has left no result"
                with open(path, "a", opener=no_link) as log:
                    print(trouble, f"error: Slurm: {reason}", sep="\n", file=log)
        return found

    def stop(self) -> None:
        """Cancel all jobs, and wait for them."""
        for job, _ in self._running.values():
            job.cancel(check=False)  # it may have ended
        while not all(job.done(force_check=True) for job, _ in self._running.values()):
            time.sleep(2)


class _Queue(submitit.slurm.slurm.SlurmInfoWatcher):  # type: ignore[misc]  # submitit tells no types
    """What becomes of jobs, by ``squeue``: ``sacct`` knows nothing where Slurm keeps no accounts."""

    def _make_command(self) -> list[str]:
        return ["squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i|%T"]

    def read_info(self, string: bytes) -> dict[str, dict[str, str]]:
        known = dict(line.split("|") for line in string.decode().splitlines())
        found = {job: known.get(job, "FORGOTTEN") for job in self._registered - self._finished}
        return {job: {"State": state if state in _ENDED else "PENDING"} for job, state in found.items()}


class _Command(submitit.helpers.Checkpointable):  # type: ignore[misc]  # which says: queue it again at its time limit, too
    def __call__(self, *arguments: Any) -> int:
        status = run_command(*arguments)
        if status in (128 + signal.SIGTERM, -signal.SIGTERM):
            os._exit(128 + signal.SIGTERM)  # without a result: Slurm says whether the job is queued again
        return status
