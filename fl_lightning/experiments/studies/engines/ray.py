"""Engine for a Ray cluster: a task for each cell. Ray retries a task if its node is lost."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import ray

from fl_lightning.experiments.studies.engines import base
from fl_lightning.experiments.studies.engines.base import Engine, Job


class RayEngine(Engine):
    """Engine that runs cells as tasks of a Ray cluster.

    If the environment variable ``RAY_ADDRESS`` is set, the engine uses the cluster at this address.
    Otherwise it uses a local cluster, and starts one if needed. All nodes need this Python and the
    working directory at the same paths.

    Args:
        module: Module of all jobs.
    """

    def __init__(self, module: str) -> None:
        super().__init__(module)
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(
            include_dashboard=False, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True
        )
        # with Ray's own handler, SIGTERM would end the study silently
        signal.signal(signal.SIGTERM, handler)
        # pickle the module by value, since workers may lack it
        ray.cloudpickle.register_pickle_by_value(base)
        resources = ray.cluster_resources()
        self.cores, self.gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
        self._running: dict[Any, Job] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Submit a task for each job.

        Ray retries a task whenever the task's node is lost.
        """
        shared = {name: x for name, x in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        for job in jobs:
            options = {"num_cpus": job.threads, "num_gpus": job.gpus, "max_retries": -1, "name": job.name}
            arguments = (job.command, str(job.log.resolve()), os.getcwd(), {**shared, **job.environment})
            self._running[ray.remote(base.run_command).options(**options).remote(*arguments)] = job

    def ended(self) -> dict[str, int]:
        """Return the exit status of each task that has ended.

        If Ray cannot run a task, the exit status is 1, and the reason is in the job's log.
        """
        running = [*self._running]
        statuses = {}
        for task in ray.wait(running, num_returns=len(running), timeout=0)[0] if running else []:
            job = self._running.pop(task)
            try:
                statuses[job.name] = ray.get(task)
            except ray.exceptions.RayError as error:
                statuses[job.name] = 1
                with open(job.log, "a") as log:
                    print(error, f"error: Ray: {type(error).__name__}", sep="\n", file=log)
        return statuses

    def stop(self) -> None:
        """Cancel all tasks, and wait until all have ended.

        A cancelled task terminates its cell.
        """
        for task in self._running:
            ray.cancel(task)
        ray.wait([*self._running], num_returns=max(len(self._running), 1))
