"""The strategy of a run on several devices or cores: clients are shared between ranks, the server is on each of them."""

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from torch import Tensor

from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.choice import usable_cores
from fl_lightning.execution.fork import ForkLauncher
from fl_lightning.ranks import LostRank, Ranks

_MORE_THAN_CORES = 8  # ranks that a small machine has beside one for each core, to try what many do
_GLANCE = 0.1  # seconds between two looks whether a rank that is waited for has ended


class CohortStrategy(ParallelStrategy):
    """Every rank computes the local steps of its clients, and all of them the server's part of a round, over the whole cohort.

    The module stays as it is: no gradient is reduced and no buffer broadcast, no loader gets another sampler. With the same
    threads per rank and the same CPU capability the numbers are those of one process, bit for bit, where clients are computed one
    after the other. Ranks on one machine are copies of the process (``fork``), with one CPU thread each; under ``torchrun`` or Slurm
    they are what these have started. CPUs talk by gloo, GPUs by NCCL.

    Args:
        timeout: How long the ranks wait for one of them.
        accelerator: Set by the trainer, as what follows.
        parallel_devices: A device for each rank of this machine.
        cluster_environment: Where the ranks are.
        checkpoint_io: How checkpoints are written.
        precision_plugin: The precision.

    Attributes:
        ranks: The ranks; one outside of ``fit`` and its like.
        meeting_place: The file by which copies of a process find each other; None where an address is known.
    """

    is_distributed = True  # Lightning asks
    strategy_name = "cohort"

    def __init__(
        self,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.timeout = timeout
        self.num_nodes = 1
        self.ranks = Ranks()
        self.meeting_place: str | None = None

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        """Tell everybody who this process is."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # an attribute of the function

    def limit(self, ranks: int) -> None:
        """Have at most so many ranks on this machine."""
        assert self.parallel_devices is not None
        self.parallel_devices = self.parallel_devices[:ranks]
        self.set_world_ranks()

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        environment.validate_settings(self.num_processes, self.num_nodes)
        if not environment.creates_processes_externally:
            cores = usable_cores()
            if self.root_device.type == "cpu" and self.num_processes > cores + _MORE_THAN_CORES:
                raise ConfigurationError(
                    f"trainer.devices: {self.num_processes} ranks are too many for {cores} CPU cores: each computes on one core, and "
                    f"more ranks wait for each other; use {cores}, at most {cores + _MORE_THAN_CORES}"
                )
            self._launcher: ForkLauncher | None = ForkLauncher(self)

    def setup_environment(self) -> None:
        """Meet the other ranks."""
        super().setup_environment()
        self.set_world_ranks()
        self.meet()

    def meet(self) -> None:
        """Meet the other ranks, if there are any and they have not met yet.

        Raises:
            ConfigurationError: One does not come, or has ended.
        """
        if self.world_size == 1:
            return
        if not dist.is_initialized():
            store = self._wait_for(self._find_others)
            if self.root_device.type == "cuda":  # whose current device is each thread's own
                self._join(store)
            else:
                self._wait_for(lambda: self._join(store))
        self.ranks = Ranks(
            self.global_rank, self.world_size, self.timeout.total_seconds(), self.num_processes
        )

    def _wait_for(self, compute: Callable[[], Any]) -> Any:
        """Compute in a thread: a signal or the end of a rank stops the waiting, which neither can do in C++."""
        found: Future[Any] = Future()
        Thread(target=_fulfil, args=(found, compute), daemon=True).start()
        while not wait([found], _GLANCE).done:
            if self._launcher is not None and (ended := self._launcher.why_one_ended()):
                raise ended
        return found.result()

    def _join(self, store: Any) -> None:
        gpu = self.root_device if self.root_device.type == "cuda" else None
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            timeout=self.timeout,
            world_size=self.world_size,
            rank=self.global_rank,
            store=store,
            device_id=gpu,
        )

    def _find_others(self) -> Any:
        """Where the ranks leave their addresses, once all have come."""
        environment = self.cluster_environment
        assert environment is not None
        store: Any = None
        keys = [f"came {rank}" for rank in range(self.world_size)]
        try:
            if self.meeting_place is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
                store = dist.FileStore(self.meeting_place, self.world_size)  # type: ignore[attr-defined]  # torch's own pages name it so
            else:
                os.environ["MASTER_ADDR"] = environment.main_address
                os.environ["MASTER_PORT"] = str(environment.main_port)
                where = ("env://", self.global_rank, self.world_size)
                store, _, _ = next(dist.rendezvous(*where, timeout=self.timeout))  # type: ignore[attr-defined]  # likewise
            store.set(keys[self.global_rank], "")
            store.wait(keys, self.timeout)
        except dist.DistError as error:
            late = [f"rank {rank}" for rank, key in enumerate(keys) if store and not store.check([key])]
            raise LostRank(
                f"{' and '.join(late) or 'a rank'} has not come within {self.timeout}; start all of them, with the same "
                "MASTER_ADDR and MASTER_PORT"
            ) from error
        return store

    def part(self) -> None:
        """Part from the other ranks."""
        self.ranks = Ranks()
        if dist.is_initialized():
            dist.destroy_process_group()

    def setup(self, trainer: L.Trainer) -> None:
        """Begin on every rank with the model of the first."""
        trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)
        if self.ranks.size > 1:
            assert self.model is not None
            for tensor in self.model.state_dict().values():
                dist.broadcast(tensor, 0)

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What a checkpoint holds; only the first rank needs to have the file."""
        own = super().load_checkpoint(checkpoint_path, weights_only) if self.is_global_zero else None
        found: dict[str, Any] = self.broadcast(own)
        return found

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.ranks.size > 1:
            with self.ranks.meeting():
                dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank ``src`` has, on every rank."""
        box = [obj]
        if self.ranks.size > 1:
            with self.ranks.meeting():
                dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Tensor | Any, *args: Any, **kwargs: Any) -> Any:
        """The tensor as it is: every rank has the number of the whole run."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The decision of the first rank."""
        return bool(self.broadcast(decision))

    def teardown(self) -> None:
        """Part from the other ranks, once all are here."""
        if self.launcher is not None:
            self.barrier()
            self.part()
        super().teardown()


def _fulfil(future: "Future[Any]", compute: Callable[[], Any]) -> None:
    try:
        future.set_result(compute())
    except Exception as error:  # noqa: BLE001  # whoever waits raises it
        future.set_exception(error)


StrategyRegistry.register(
    "cohort", CohortStrategy, description="clients shared between ranks, the server on each of them"
)
