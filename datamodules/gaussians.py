"""Toy data of the FBN paper: points in the plane from a mixture of Gaussians."""

from math import inf, pi

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fl_lightning.client_data.batches import copied
from fl_lightning.client_data.federated import ClientDataModule, FederatedDataModule, PartitionRecord
from fl_lightning.datamodules.images import Batch
from fl_lightning.datamodules.partitions import GammaSimilarity
from fl_lightning.errors import check_at_least, check_number
from fl_lightning.randomness import generator


class Gaussians(FederatedDataModule):
    """Clients with one Gaussian each; all centres lie on a circle (FBN paper, sections 3 and 4).

    The paper is Guerraoui et al., arXiv 2405.14670. The mixture consists of n Gaussians in the
    plane (its components). Component i, for i = 1 to n, has its centre at the angle (2 pi i - 1)/n.
    It belongs to client i - 1, and its points have the label i - 1. Every local step draws a batch
    of new points, which depend only on (seed, client, step). An epoch has only this one batch. The
    variance of the mixture along each axis is ``std**2 + radius**2 / 2``, by default 51.

    Args:
        num_clients: Number n of clients, components and classes, at least 2.
        radius: Distance of the centres from the origin.
        std: Standard deviation of each component along each axis.
        samples_per_client: Number of points in a client's batch.
        gamma: Share of each batch, in [0, 1], that is drawn from the mixture of all components. The
            number of these points is rounded. With 0, each client has one class. With 1, the
            clients are IID.
        eval_samples_per_class: Number of points of each class in the server's validation data. The
            server's test data have the same number.
        seed: Seed of all points.

    Attributes:
        centres: Centre of each component, shape ``[n, 2]``.
        num_mixed: Number of points of a batch that come from the mixture. They are the first points.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    def __init__(
        self,
        num_clients: int = 10,
        radius: float = 10.0,
        std: float = 1.0,
        samples_per_client: int = 30,
        gamma: float = 0.0,
        eval_samples_per_class: int = 100,
        seed: int = 0,
    ) -> None:
        check_at_least(2, num_clients=num_clients)
        points = {"samples_per_client": samples_per_client, "eval_samples_per_class": eval_samples_per_class}
        check_at_least(1, **points)
        check_number("radius", radius, least=0, below=inf)
        check_number("std", std, above=0, below=inf)
        self.gamma = GammaSimilarity(gamma).gamma
        angles = (2 * pi * torch.arange(1, num_clients + 1) - 1) / num_clients
        self.centres = radius * torch.stack([angles.cos(), angles.sin()], dim=1)
        self.std, self.batch_size, self.num_mixed = std, samples_per_client, round(gamma * samples_per_client)
        super().__init__([GaussianClient(client, self) for client in range(num_clients)], seed=seed)
        self.num_classes = num_clients
        self.loaded = "drawn by the seed"  # points come from no file, so they need no digest
        self.eval_samples_per_class = eval_samples_per_class

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the server's validation data: equally many points of each class, in one batch."""
        return self._evaluation_loader("gaussian validation")

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the server's test data: new points from the same distribution."""
        return self._evaluation_loader("gaussian test")

    def describe_partition(self) -> str:
        """Return gamma and the number of clients, such as ``"gamma=0.0, 10 clients"``."""
        return f"gamma={self.gamma}, {self.num_clients} clients"

    def partition_record(self) -> PartitionRecord:
        """Return the record of the partition, with the seed."""
        return {**super().partition_record(), "seed": self.seed}

    def class_histograms(self) -> list[list[int]]:
        """Return ``[i][c]``, the number of points of class c in client i's first batch."""
        labels = [client.train_batch(0)[1] for client in self._clients if isinstance(client, GaussianClient)]
        return [own.bincount(minlength=len(self.centres)).tolist() for own in labels]

    def _evaluation_loader(self, purpose: str) -> DataLoader[Batch]:
        labels = torch.arange(len(self.centres)).repeat_interleave(self.eval_samples_per_class)
        points = sample_points(labels, self.centres, self.std, generator(self.seed, purpose))
        return DataLoader([points], batch_size=None, collate_fn=copied)  # type: ignore[arg-type]  # a list is a map-style dataset


class GaussianClient(ClientDataModule):
    """A client that draws a new batch at every local step.

    Args:
        client_id: Id of the client, from 0. It is the number of the client's own component.
        data: The data module of all clients.
    """

    steps_per_epoch = 1

    def __init__(self, client_id: int, data: Gaussians) -> None:
        super().__init__()
        self.client_id, self.data, self.num_examples = client_id, data, data.batch_size

    def train_batch(self, step: int) -> Batch:
        """Return points ``[b, 2]`` and labels ``[b]`` of local step ``step``, counted from 0."""
        data = self.data
        draws = generator(data.seed, "gaussian points", self.client_id, step)
        labels = torch.full((data.batch_size,), self.client_id)
        labels[: data.num_mixed] = torch.randint(data.num_clients, (data.num_mixed,), generator=draws)
        return sample_points(labels, data.centres, data.std, draws)


def sample_points(labels: Tensor, centres: Tensor, std: float, draws: torch.Generator) -> Batch:
    """Draw one point for each label; return the points ``[b, 2]`` and the labels ``[b]``."""
    return centres[labels] + std * torch.randn(len(labels), 2, generator=draws), labels
