"""Engine for a Slurm cluster, based on submitit. Cells submitted together form a job array."""

import os
import shutil
import signal
import time
from collections.abc import Sequence
from math import ceil, inf
from pathlib import Path
from typing import Any

import submitit

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.studies.engines.base import Engine, Job, run_command

_MINUTES = 60  # time limit of a job in minutes; a longer cell is requeued and resumes
# smallest limit in minutes: submitit asks for a signal 90 s before the limit, which may come 60 s early
_SHORTEST = 3
_TIMES = 10_000  # largest number of times that a job is requeued at its time limit
# Slurm sends USR2 to all processes of a job: submitit requeues the job; cells must ignore USR2
_UNTIL_TERMINATED = ("sh", "-c", "trap '' USR2; exec \"$@\"", "sh")
_ENDED = [
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "FORGOTTEN", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT",
]  # fmt: skip
_ARRAY = 1000  # Slurm's default limit on the number of jobs in an array


class SlurmEngine(Engine):
    """Engine whose jobs are requeued after preemption, a time limit or a node failure.

    The environment variables of ``sbatch``, such as ``SBATCH_PARTITION``, ``SBATCH_ACCOUNT`` and
    ``SBATCH_TIMELIMIT``, set further options of the jobs. All nodes need this Python and the
    working directory at the same paths.

    Args:
        module: Module of all jobs.
        cluster: Cluster of submitit, such as ``"slurm"`` (default) or ``"local"``.

    Raises:
        ConfigurationError: Slurm is not installed on this machine, or ``SBATCH_TIMELIMIT`` is too
            short for a cell to make progress.
    """

    cores = gpus = _ARRAY  # upper limits: Slurm decides how many jobs run at a time

    def __init__(self, module: str, cluster: str = "slurm") -> None:
        super().__init__(module)
        if cluster == "slurm":
            if shutil.which("srun") is None:
                raise ConfigurationError(
                    "--engine: slurm needs srun, which this machine lacks; use a machine of the cluster or --engine local"
                )
            limit = os.environ.get("SBATCH_TIMELIMIT", "")
            if _seconds(limit) < 60 * _SHORTEST:
                raise ConfigurationError(
                    f"SBATCH_TIMELIMIT: {limit} is too short, because Slurm may requeue a job 150 seconds before its limit; set "
                    f"at least {_SHORTEST} minutes"
                )
            submitit.SlurmJob.watcher = _Queue(delay_s=60)
        self._cluster = cluster
        self._running: dict[str, tuple[submitit.Job[int], Path]] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs. Jobs with equal numbers of threads and GPUs form an array."""
        for threads, gpus in dict.fromkeys((job.threads, ceil(job.gpus)) for job in jobs):
            array = [job for job in jobs if (job.threads, ceil(job.gpus)) == (threads, gpus)]
            folder = array[0].log.parent / "submitit"
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
                    for job in array:
                        command = (*_UNTIL_TERMINATED, *job.command)
                        arguments = (command, str(job.log.resolve()), os.getcwd(), job.environment)
                        queued[job.name] = executor.submit(_Command(), *arguments), job.log
            except submitit.core.utils.FailedJobError as error:
                reason = " ".join(str(error).split())
                raise ConfigurationError(f"--engine: slurm rejects the jobs: {reason}") from error
            self._running |= queued

    def ended(self) -> dict[str, int]:
        """Return the exit status of each job that has ended.

        If Slurm itself ends a job, the exit status is 1, and the reason is in the job's log.
        """
        statuses = {}
        for name in [name for name, (job, _) in self._running.items() if job.done()]:
            job, path = self._running.pop(name)
            trouble = job.exception()
            statuses[name] = 1 if trouble else job.result()
            if trouble:
                reason = str(trouble).rpartition("\n")[2] or type(trouble).__name__
                if isinstance(trouble, submitit.core.utils.UncompletedJobError):
                    reason = f"job {job.job_id} is {job.state} and has left no result"
                with open(path, "a") as log:
                    print(trouble, f"error: Slurm: {reason}", sep="\n", file=log)
        return statuses

    def stop(self) -> None:
        """Cancel all jobs and wait until all have ended."""
        for job, _ in self._running.values():
            job.cancel(check=False)  # no error if the job has already ended
        while not all(job.done(force_check=True) for job, _ in self._running.values()):
            time.sleep(2)


def _seconds(limit: str) -> float:
    """Return a time limit of Slurm in seconds; infinity for a text that is no number of units.

    The formats are minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes
    and days-hours:minutes:seconds.
    """
    days, dash, rest = limit.rpartition("-")
    units = (3600, 60, 1) if dash or limit.count(":") == 2 else (60, 1)
    try:
        parts = [*map(int, rest.split(":"))]
        seconds = sum(unit * part for unit, part in zip(units, parts, strict=False))
        return 86400 * int(days or 0) + seconds or inf  # Slurm reads 0 as no limit
    except ValueError:
        return inf


class _Queue(submitit.slurm.slurm.SlurmInfoWatcher):  # type: ignore[misc]  # submitit is untyped
    """Reader of job states.

    It calls ``squeue``, because ``sacct`` needs Slurm's accounting database.
    """

    def _make_command(self) -> list[str]:
        return ["squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i|%T"]

    def read_info(self, string: bytes) -> dict[str, dict[str, str]]:
        known = dict(line.split("|") for line in string.decode().splitlines())
        states = {job: known.get(job, "FORGOTTEN") for job in self._registered - self._finished}
        return {job: {"State": state if state in _ENDED else "PENDING"} for job, state in states.items()}


class _Command(submitit.helpers.Checkpointable):  # type: ignore[misc]  # requeued at its time limit
    def __call__(self, *arguments: Any) -> int:
        status = run_command(*arguments)
        if status in (128 + signal.SIGTERM, -signal.SIGTERM):
            # exit without a result, so that Slurm may requeue the job
            os._exit(128 + signal.SIGTERM)
        return status
