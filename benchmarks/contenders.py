"""Contenders of this repository: the naive loop and the framework."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.naive import Batch, ClientImages, fedavg_round
from benchmarks.process_tree import cpu_seconds
from benchmarks.recipe import AUGMENTATION, BATCH_SIZE, CLIENT_OPTIMIZER
from benchmarks.stopwatch import Stopwatch, nothing
from benchmarks.workloads import SyntheticImages, Workload
from fl_lightning import FederatedModule, GraphExecutor, SequentialExecutor, VectorizedExecutor
from fl_lightning.execution.base import Executor
from fl_lightning.round.first_steps import check_first_steps
from fl_lightning.round.plan import sample_cohort

EXECUTORS: dict[str, Callable[[], Executor]] = {
    "sequential": partial(SequentialExecutor, compile=False),
    "vectorized": VectorizedExecutor,
    "ranks": partial(SequentialExecutor, compile=False),
}
COMPILED: dict[str, Callable[[], Executor]] = {"compiled": partial(SequentialExecutor, compile=True)}
"""Executors with ``torch.compile``; the first round compiles and is not timed."""

RANKED = ("ranks", "compiled", "ranks_bf16")
"""Contenders that run one rank on each core."""

GRAPHS: dict[str, Callable[[], Executor]] = {"graphs": GraphExecutor}
"""Executors that run on a GPU only."""

OURS = {**EXECUTORS, **COMPILED, **GRAPHS}
"""All contenders of this framework in float32."""


@dataclass
class Timing:
    """Time of several rounds.

    Attributes:
        total: Time from the start of the first round to the end of the last round. Its processor
            time includes all child processes.
        in_rounds: Time inside ``training_step``, in this process alone. The rest of ``total`` is
            the Trainer's time. Zero for contenders other than the framework.
    """

    total: Stopwatch = field(default_factory=lambda: Stopwatch(cpu_clock=cpu_seconds))
    in_rounds: Stopwatch = field(default_factory=Stopwatch)

    @classmethod
    def on(cls, device: str) -> "Timing":
        """Return new clocks for ``"cpu"`` or ``"cuda"``; ``total`` waits for the device's work."""
        settle = torch.cuda.synchronize if device == "cuda" else nothing
        return cls(Stopwatch(cpu_clock=cpu_seconds, settle=settle))


class Contender(Protocol):
    """A loop or framework that runs communication rounds of a workload."""

    def run(self, rounds: int) -> Timing:
        """Run ``rounds`` further rounds and return their time."""
        ...


class NaiveLoop:
    """Contender that runs the loop of :mod:`benchmarks.naive`.

    Args:
        workload: The federation and its local work.
        model: The server's model; the rounds train it in place.
        data: Data module with the images and the partition, set up for ``fit``.
        device: Device of the model and of each batch, ``"cpu"`` or ``"cuda"``.
    """

    def __init__(
        self, workload: Workload, model: nn.Module, data: SyntheticImages, device: str = "cpu"
    ) -> None:
        self.workload, self.model, self.device = workload, model.to(device), device
        images = [client_images(data, client) for client in range(data.num_clients)]
        self.loaders = [DataLoader(own, BATCH_SIZE, shuffle=True, drop_last=True) for own in images]
        self.sizes = [data.num_examples(client) for client in range(data.num_clients)]
        self.rounds_done = 0

    def run(self, rounds: int) -> Timing:
        """Run ``rounds`` further rounds and return their time."""
        timing = Timing.on(self.device)
        with timing.total:
            for _ in range(rounds):
                self.rounds_done += 1
                clients = sample_cohort(len(self.loaders), self.workload.cohort_size, 0, self.rounds_done)
                fedavg_round(
                    self.model,
                    [self.loaders[client] for client in clients],
                    [self.sizes[client] for client in clients],
                    self.workload.local_steps,
                    CLIENT_OPTIMIZER,
                )
        return timing


class Framework:
    """Contender that runs ``Trainer.fit`` on a ``FederatedModule`` without evaluation or logger.

    Args:
        workload: The federation and its local work.
        model: The server's model; the rounds train it in place.
        data: The federated data.
        executor: Executor of the clients' gradients.
        device: Device of the whole run, ``"cpu"`` or ``"cuda"``.
        precision: Lightning's ``precision``, such as ``"bf16-mixed"``.
        ranks: Number of ranks (processes) that share the clients.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        data: SyntheticImages,
        executor: Executor,
        device: str = "cpu",
        precision: Any = "32-true",
        ranks: int = 1,
    ) -> None:
        self.data, self.device = data, device
        self.settings: dict[str, Any] = {"precision": precision, "devices": ranks}
        if ranks > 1:
            self.settings["strategy"] = "cohort"
        self.module = FederatedModule(
            model,
            CLIENT_OPTIMIZER,
            local_steps=workload.local_steps,
            participation=workload.cohort_size,
            executor=executor,
            check_first_steps=False,  # the check is before round 1 and would not be timed
        )

    def run(self, rounds: int) -> Timing:
        """Run rounds in a new ``fit`` and return their time, without the preparation of ``fit``.

        On a GPU, the preparation includes a further round, in which CUDA graphs are recorded.
        """
        untimed = int(self.device == "cuda")
        clock = _RoundClock(Timing.on(self.device), untimed)
        fit(self.module, self.data, rounds + untimed, [clock], self.device, **self.settings)
        return clock.timing

    def first_steps(self) -> Stopwatch:
        """Run a round with the check of the first steps, and return the time of the check."""
        watch = Timing.on(self.device).total

        def timed(module: FederatedModule) -> None:
            with watch:
                check_first_steps(module)

        self.module.check_first_steps = True
        with patch("fl_lightning.round.module.check_first_steps", timed):
            self.run(1)
        self.module.check_first_steps = False
        return watch


def client_images(
    data: SyntheticImages, client: int, transform: Callable[[Any], Tensor] = AUGMENTATION
) -> ClientImages:
    """Return a client's images as a data set, for contenders that read one image at a time.

    Args:
        data: Data module with the images, set up for ``fit``.
        client: The client's number.
        transform: Augmentation and normalisation of one PIL image.
    """
    samples = data.client_samples(client).numpy()
    return ClientImages(data.pictures, data.samples.labels.cpu().numpy(), samples, transform)


def round_loader(images: ClientImages, local_steps: int) -> DataLoader[Batch]:
    """Return a loader with ``local_steps`` batches per epoch, for frameworks that count epochs."""
    sampler = RandomSampler(images, num_samples=local_steps * BATCH_SIZE)
    return DataLoader(images, BATCH_SIZE, sampler=sampler)


def fit(
    module: FederatedModule,
    data: SyntheticImages,
    rounds: int,
    callbacks: list[L.Callback],
    device: str = "cpu",
    **settings: Any,
) -> None:
    """Train ``rounds`` rounds without logger, checkpoints, evaluation and progress bar."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # caused by Lightning's code
        trainer = L.Trainer(
            max_epochs=rounds,
            accelerator="gpu" if device == "cuda" else "cpu",
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            **{"devices": 1, **settings},
        )
        trainer.fit(module, datamodule=data)


class _RoundClock(L.Callback):
    def __init__(self, timing: Timing, untimed: int) -> None:
        self.timing, self.untimed, self.begun = timing, untimed, 0

    def on_train_batch_start(self, *args: Any) -> None:
        if self.begun == self.untimed:
            self.timing.total.start()
        if self.begun >= self.untimed:
            self.timing.in_rounds.start()
        self.begun += 1

    def on_train_batch_end(self, *args: Any) -> None:
        if self.begun > self.untimed:
            self.timing.in_rounds.stop()

    def on_train_end(self, *args: Any) -> None:
        self.timing.total.stop()
