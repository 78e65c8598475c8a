"""The Lightning strategy for runs on several devices or cores."""

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fl_lightning.cores import usable_cores
from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.fork import ForkLauncher
from fl_lightning.ranks import LostRank, Ranks

_MORE_THAN_CORES = 8  # the number of ranks may exceed the number of cores by this number
_POLL = 0.1  # seconds between checks whether a rank has ended


class CohortStrategy(ParallelStrategy):
    """Strategy in which each rank (process) computes the local steps of some of the clients.

    Every rank computes the server's update. Unlike in DDP, the module is not wrapped, gradients are
    not reduced, buffers are not broadcast, and samplers are not replaced. If neither ``torchrun``
    nor Slurm starts the ranks, the ranks are forks with one CPU thread each. CPUs communicate by
    gloo, GPUs by NCCL.

    Several ranks give the same results as a single process, bit for bit, under these conditions:

    - The executor is SequentialExecutor.
    - Every rank has as many threads as the single process.
    - All CPUs support the same vector instructions.

    Each rank holds the parameters, gradients and buffers of all clients in the round. Methods may add
    state. A rank also holds the optimizer's state of the clients that it computes. More ranks do not
    reduce this memory. Forked ranks share the data that the first process has read.

    Args:
        timeout: Longest time to wait for another rank. Default: 30 minutes.
        kwargs: Arguments of Lightning's ``ParallelStrategy``, which the trainer sets.

    Attributes:
        ranks: The connected ranks. Outside of ``fit``, ``validate`` and ``test``, this is a single
            rank.
        meeting_place: File through which forked ranks connect; None if ranks connect by a network
            address.
    """

    is_distributed = True  # Lightning reads this attribute
    strategy_name = "cohort"

    def __init__(self, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.timeout = timeout
        self.num_nodes = 1
        self.ranks = Ranks()
        self.meeting_place: str | None = None

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of ranks on this machine."""
        return len(self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        """Pass the rank and the number of ranks to Lightning."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # an attribute of the function

    def limit(self, ranks: int) -> None:
        """Limit the number of ranks on this machine."""
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
                    f"trainer.devices: {self.num_processes} ranks are too many for {cores} CPU cores: each rank needs a core; "
                    f"use {cores}, at most {cores + _MORE_THAN_CORES}"
                )
            self._launcher: ForkLauncher | None = ForkLauncher(self)

    def setup_environment(self) -> None:
        """Connect to the other ranks."""
        super().setup_environment()
        self.set_world_ranks()
        self.meet()

    def meet(self) -> None:
        """Connect to the other ranks, unless they are already connected.

        Raises:
            ConfigurationError: A rank has ended or does not connect in time.
        """
        if self.world_size == 1:
            return
        if not dist.is_initialized():
            if self.root_device.type == "cuda":  # not in a thread, because CUDA sets the device per thread
                self._join()
            else:
                self._wait_for(self._join)
        self.ranks = Ranks(
            self.global_rank, self.world_size, self.timeout.total_seconds(), self.num_processes
        )

    def _wait_for(self, compute: Callable[[], None]) -> None:
        """Run ``compute`` in a thread.

        During this time, the main thread can react to signals and to the end of another rank.
        """
        future: Future[Any] = Future()
        Thread(target=_fulfil, args=(future, compute), daemon=True).start()
        while not wait([future], _POLL).done:
            if self._launcher is not None and (ended := self._launcher.why_one_ended()):
                raise ended
        future.result()

    def _join(self) -> None:
        environment, gpu = (
            self.cluster_environment,
            self.root_device if self.root_device.type == "cuda" else None,
        )
        assert environment is not None
        if self.meeting_place is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        else:
            os.environ["MASTER_ADDR"] = environment.main_address
            os.environ["MASTER_PORT"] = str(environment.main_port)
        url = f"file://{self.meeting_place}" if self.meeting_place else "env://"
        try:
            store, *_ = next(rendezvous(url, self.global_rank, self.world_size, timeout=self.timeout))
            store.set_timeout(self.timeout)
            # if torchrun restarts the ranks, its store still has the addresses of the dead ranks
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=PrefixStore(f"restart {restarts}", store),
                timeout=self.timeout,
                world_size=self.world_size,
                rank=self.global_rank,
                device_id=gpu,
            )
        except RuntimeError as error:
            raise LostRank(
                f"a rank has not connected within {self.timeout}; start all ranks, with the same MASTER_ADDR and MASTER_PORT "
                f"({str(error).partition(chr(10))[0]})"
            ) from error

    def part(self) -> None:
        """Disconnect from the other ranks."""
        self.ranks = Ranks()
        if dist.is_initialized():
            dist.destroy_process_group()

    def setup(self, trainer: L.Trainer) -> None:
        """Broadcast the first rank's model to all ranks."""
        trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)
        if self.ranks.size > 1:
            assert self.model is not None
            frozen = [x.data for x in self.model.parameters() if not x.requires_grad]  # may not be saved
            state = filter(torch.is_tensor, self.model.state_dict().values())  # not other extra state
            for tensor in (*frozen, *state):
                dist.broadcast(tensor, 0)

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint on the first rank, and broadcast it. The other ranks need no file."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only) if self.is_global_zero else None
        checkpoint: dict[str, Any] = self.broadcast(loaded)
        return checkpoint

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this method."""
        if self.ranks.size > 1:
            with self.ranks.meeting():
                dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank."""
        box = [obj]
        if self.ranks.size > 1:
            with self.ranks.meeting():
                dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Tensor | Any, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor unchanged, because all ranks already have the same result."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the first rank's decision on every rank."""
        return bool(self.broadcast(decision))

    def teardown(self) -> None:
        """Wait for all ranks, then disconnect from them."""
        if self.launcher is not None:
            self.barrier()
            self.part()
        super().teardown()


def _fulfil(future: "Future[Any]", compute: Callable[[], Any]) -> None:
    try:
        future.set_result(compute())
    except Exception as error:  # noqa: BLE001  # the waiting thread raises it
        future.set_exception(error)


StrategyRegistry.register(
    "cohort", CohortStrategy, description="ranks share the clients and replicate the server"
)
