"""The naive loop, the reference of all timings: FedAvg in PyTorch as papers' repositories write it.

In each round every client trains a deep copy of the model with a new optimizer. A ``DataLoader``
reads the client's images one at a time and applies torchvision transforms. The server averages the
state dicts key by key.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

Batch = tuple[Tensor, Tensor]


class ClientImages(Dataset[Any]):
    """Data set of one client's images, which are transformed one at a time.

    Args:
        images: All clients' images, uint8, shape ``[N, H, W, 3]``; not copied.
        labels: All clients' labels, int64, shape ``[N]``.
        samples: Indices of the client's images, int64, shape ``[n]``.
        transform: Augmentation and normalisation, from a PIL image to a tensor ``[3, H, W]``.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        samples: np.ndarray,
        transform: Callable[[Image.Image], Tensor],
    ) -> None:
        self.images, self.labels, self.samples, self.transform = images, labels, samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample = self.samples[index]
        return self.transform(Image.fromarray(self.images[sample])), int(self.labels[sample])


def train(
    model: nn.Module,
    loader: Iterable[Batch],
    local_steps: int,
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer],
) -> int:
    """Train a model in place and return the number of samples that it saw.

    Args:
        model: The model; the batches are moved to its device.
        loader: Batches of images and labels; restarted at its end.
        local_steps: Number of steps.
        make_optimizer: Function that returns a new optimizer of given parameters.
    """
    model.train()
    device = next(model.parameters()).device
    optimizer, seen = make_optimizer(model.parameters()), 0
    for images, labels in islice(_endless(loader), local_steps):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        optimizer.step()
        seen += len(labels)
    return seen


def train_client(
    server: nn.Module,
    loader: Iterable[Batch],
    local_steps: int,
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer],
) -> dict[str, Tensor]:
    """Train a copy of the server's model on one client and return its state dict."""
    model = copy.deepcopy(server)
    train(model, loader, local_steps, make_optimizer)
    return model.state_dict()


def average(states: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted average of state dicts by key. BN's batch counters become floats."""
    return {
        key: torch.stack([weight * state[key] for weight, state in zip(weights, states, strict=True)]).sum(0)
        for key in states[0]
    }


def fedavg_round(
    server: nn.Module,
    loaders: Sequence[Iterable[Batch]],
    sizes: Sequence[int],
    local_steps: int,
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer],
) -> None:
    """Run one communication round, and update ``server`` in place.

    Args:
        server: The server's model.
        loaders: The loader of each client in the cohort.
        sizes: Number of training samples of each client; the weights of the average.
        local_steps: Local steps E of each client.
        make_optimizer: Function that returns a new optimizer of given parameters.
    """
    states = [train_client(server, loader, local_steps, make_optimizer) for loader in loaders]
    server.load_state_dict(average(states, [size / sum(sizes) for size in sizes]))


def _endless(loader: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from loader
