"""The naive loop and the framework on one workload: each runs some rounds and says how long they took."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms

from benchmarks.naive import Batch, ClientImages, fedavg_round
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import (
    BATCH_SIZE,
    CIFAR10_MEAN,
    CIFAR10_STD,
    CLIENT_OPTIMIZER,
    CROP_PADDING,
    SyntheticImages,
    Workload,
)
from fl_lightning import FederatedModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.executors import Executor
from fl_lightning.participation import sample_cohort

EXECUTORS: dict[str, type[Executor]] = {"sequential": SequentialExecutor, "vectorized": VectorizedExecutor}


@dataclass
class Timing:
    """Time of some rounds.

    Attributes:
        total: All of it, from the start of the first round to the end of the last.
        in_rounds: The part inside ``training_step``; the rest is the Trainer's. Empty for the naive loop.
    """

    total: Stopwatch
    in_rounds: Stopwatch


class NaiveLoop:
    """The loop of :mod:`benchmarks.naive` over the same images and clients.

    Args:
        workload: The federation and its local work.
        model: The server's model; it is trained.
        data: Where the images and the partition come from, set up for ``fit``.
    """

    def __init__(self, workload: Workload, model: nn.Module, data: SyntheticImages) -> None:
        self.workload, self.model = workload, model
        self.loaders = [naive_loader(data, client, AUGMENTATION) for client in range(data.num_clients)]
        self.sizes = [data.num_examples(client) for client in range(data.num_clients)]
        self.rounds_done = 0

    def run(self, rounds: int) -> Timing:
        """Run further rounds."""
        total = Stopwatch()
        for _ in range(rounds):
            with total:
                self.rounds_done += 1
                clients = sample_cohort(len(self.loaders), self.workload.cohort_size, 0, self.rounds_done)
                fedavg_round(
                    self.model,
                    [self.loaders[client] for client in clients],
                    [self.sizes[client] for client in clients],
                    self.workload.local_steps,
                    CLIENT_OPTIMIZER,
                )
        return Timing(total, Stopwatch())


class Framework:
    """The same workload as a user runs it: ``Trainer.fit`` on a ``FederatedModule``, without evaluation or logger.

    Args:
        workload: The federation and its local work.
        model: The server's model; it is trained.
        data: The federated data.
        executor: Who computes the clients' gradients.
    """

    def __init__(
        self, workload: Workload, model: nn.Module, data: SyntheticImages, executor: Executor
    ) -> None:
        self.data = data
        self.module = FederatedModule(
            model,
            CLIENT_OPTIMIZER,
            local_steps=workload.local_steps,
            participation=workload.cohort_size,
            executor=executor,
        )

    def run(self, rounds: int) -> Timing:
        """Run rounds in a ``fit`` of their own; preparing the fit is not counted."""
        clock = _RoundClock()
        fit(self.module, self.data, rounds, [clock])
        return Timing(clock.total, clock.in_rounds)


AUGMENTATION = transforms.Compose(
    [
        transforms.RandomCrop(32, padding=CROP_PADDING),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(CIFAR10_MEAN, CIFAR10_STD),
    ]
)


def naive_loader(
    data: SyntheticImages, client: int, transform: Callable[[Any], Tensor], order: Tensor | None = None
) -> DataLoader[Batch]:
    """The loader that the naive loop has for a client.

    Args:
        data: Where its images come from.
        client: The client's number.
        transform: Augmentation and normalisation of one PIL image.
        order: Positions among the training images that are read in this order; None shuffles the client's own.
    """
    samples = data.client_samples(client) if order is None else order
    images = data.pixels[samples].permute(0, 2, 3, 1).contiguous().numpy()
    dataset = ClientImages(images, data.train_images.labels[samples].numpy(), transform)
    return DataLoader(dataset, BATCH_SIZE, shuffle=order is None, drop_last=True)


def fit(
    module: FederatedModule, data: SyntheticImages, rounds: int, callbacks: list[L.Callback], **settings: Any
) -> None:
    """Train some rounds with the Trainer and nothing else: no logger, checkpoint, evaluation or progress bar."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning's own use of torch
        trainer = L.Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            **settings,
        )
        trainer.fit(module, datamodule=data)


class _RoundClock(L.Callback):
    def __init__(self) -> None:
        self.total, self.in_rounds = Stopwatch(), Stopwatch()

    def on_train_start(self, *args: Any) -> None:
        self.total.start()

    def on_train_batch_start(self, *args: Any) -> None:
        self.in_rounds.start()

    def on_train_batch_end(self, *args: Any) -> None:
        self.in_rounds.stop()

    def on_train_end(self, *args: Any) -> None:
        self.total.stop()
