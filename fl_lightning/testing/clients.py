"""Federations of clients with random images and ordinary data loaders."""

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.client_data.federated import FederatedDataModule

Batch = tuple[Tensor, Tensor]
"""A batch: inputs ``[b, ...]`` and labels ``[b]``."""


class ArrayClient(L.LightningDataModule):
    """Client with inputs ``[n, ...]`` and labels ``[n]``. Training batches are shuffled."""

    def __init__(self, inputs: Tensor, targets: Tensor, batch_size: int) -> None:
        super().__init__()
        self.dataset = TensorDataset(inputs, targets)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader of shuffled batches, without an incomplete last batch."""
        return DataLoader(self.dataset, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader of all samples in order."""
        return DataLoader(self.dataset, 64)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader of all samples in order."""
        return DataLoader(self.dataset, 64)


def blobs(
    num_clients: int = 3,
    sizes: Sequence[int] = (40, 40, 40),
    batch_size: int = 8,
    seed: int = 0,
    shape: Sequence[int] = (2, 6, 6),
    classes: int = 3,
) -> FederatedDataModule:
    """Return a federation with label skew.

    Most samples of client i have the class ``i % classes``. The noise of client i has standard
    deviation ``1 + i``.

    Args:
        num_clients: Number of clients.
        sizes: Number of samples of each client. If ``sizes`` is too short, its entries are
            repeated.
        batch_size: Number of samples in a batch.
        seed: Seed for the samples and their order.
        shape: Shape of an image. Images are float64.
        classes: Number of classes.
    """
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for i in range(num_clients):
        n = sizes[i % len(sizes)]
        targets = torch.where(
            torch.rand(n, generator=generator) < 0.8,
            torch.tensor(i % classes),
            torch.randint(classes, (n,), generator=generator),
        )
        inputs = torch.randn(n, *shape, generator=generator, dtype=torch.float64) * (1 + i)
        clients.append(ArrayClient(inputs + targets.view(-1, 1, 1, 1), targets, batch_size))
    everything = [torch.cat(parts) for parts in zip(*(c.dataset.tensors for c in clients), strict=True)]
    return FederatedDataModule(clients, ArrayClient(everything[0], everything[1], batch_size), seed=seed)


def uneven_clients(
    batches: Sequence[int] = (8, 8, 8),
    examples: Sequence[int] = (24, 60, 40),
    shape: Sequence[int] = (2, 6, 6),
    classes: int = 3,
) -> FederatedDataModule:
    """Return a federation whose clients differ in the mean and the scale of their inputs.

    Args:
        batches: Batch size of each client.
        examples: Number of samples of each client.
        shape: Shape of an image. Images are float64.
        classes: Number of classes.
    """
    generator = torch.Generator().manual_seed(0)
    clients = [
        ArrayClient(
            (1 + i) * torch.randn(count, *shape, generator=generator, dtype=torch.float64) + 4 * i,
            torch.randint(classes, (count,), generator=generator),
            size,
        )
        for i, (size, count) in enumerate(zip(batches, examples, strict=True))
    ]
    return FederatedDataModule(clients, clients[0])


def client_batch(data: FederatedDataModule, client: int, step: int) -> Batch:
    """Return a client's batch at a local step. The first step of training has number 0."""
    batch: Batch = tuple(data.cohort_batch([client], [step]).batches()[0])
    return batch


def union_batch(data: FederatedDataModule, step: int) -> Batch:
    """Join the batches of all clients at a local step into one batch."""
    clients = range(data.num_clients)
    return union_of(data, clients, [[step] for _ in clients])


def union_of(data: FederatedDataModule, clients: Sequence[int], steps: Sequence[Sequence[int]]) -> Batch:
    """Join several batches into one batch.

    Args:
        data: The federated data.
        clients: Ids of the clients.
        steps: For each client in ``clients``, the local steps whose batches are joined.
    """
    pairs = [(client, step) for client, taken in zip(clients, steps, strict=True) for step in taken]
    inputs, targets = zip(*(client_batch(data, client, step) for client, step in pairs), strict=True)
    return torch.cat(inputs), torch.cat(targets)
