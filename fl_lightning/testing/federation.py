"""A tiny federation with synthetic, label-skewed data. A run takes less than a second."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.client_data.federated import ClientDataModule, FederatedDataModule
from fl_lightning.randomness import generator
from fl_lightning.testing.models import small_cnn

CLASSES, CHANNELS, IMAGE_SIZE, BATCH = 3, 2, 6, 8
SHAPE = (CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
"""Shape of an input."""
CLIENT_SIZES = (8, 16, 24, 8, 16)
"""Number of training samples of each client.

Clients with different sizes have different weights and different numbers of local steps.
"""


class Disturbance(NamedTuple):
    """Change of one client in one round, to test whether other clients are affected.

    Attributes:
        client: Id of the changed client.
        round: Round of the change.
        what: What changes. ``"data"`` changes the client's inputs. ``"optimizer"`` changes the
            state of the client optimizer after the local steps. ``"memory"`` changes the server's
            part of the method's memory before the round. A treatment such as ``"local"`` changes
            all state with this treatment after the local steps.
        replayed: Whether the client sends the same state as in the undisturbed run.
    """

    client: int
    round: int
    what: tuple[str, ...]
    replayed: bool = False


class MaterialisedClient(ClientDataModule):
    """Client whose batches are a function of the local step.

    The integer ``identity`` determines the most frequent class, and the mean and scale of the
    inputs. ``form`` are further arguments of :func:`skewed_images`. The declared sampling rate lets
    methods that need Poisson samples run.
    """

    def __init__(self, identity: int, size: int, batch_size: int, **form: Any) -> None:
        super().__init__()
        self.num_examples, self.steps_per_epoch, self.batch_size = size, size // batch_size, batch_size
        self.sampling_rate = batch_size / size
        self.inputs, self.targets = skewed_images(identity, size, **form)
        self.disturbed_steps = range(0)

    def train_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of local step ``step``.

        Each epoch starts three samples later than the previous epoch.
        """
        epoch = step // self.steps_per_epoch
        rows = (torch.arange(self.batch_size) + step * self.batch_size + 3 * epoch) % self.num_examples
        inputs = self.inputs[rows]
        return inputs * 1.5 + 0.5 if step in self.disturbed_steps else inputs, self.targets[rows]

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader with the batches of the first epoch."""
        return DataLoader(TensorDataset(self.inputs, self.targets), self.batch_size, drop_last=True)


def skewed_images(
    identity: int, size: int, shape: Sequence[int] = SHAPE, classes: int = CLASSES, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return float64 inputs ``[size, *shape]`` and labels. More than 70 % of the labels are equal.

    ``scale`` multiplies the inputs.
    """
    draw = generator(identity, "verification data")
    favourite = torch.tensor(identity % classes)
    targets = torch.where(
        torch.rand(size, generator=draw) < 0.7, favourite, torch.randint(classes, (size,), generator=draw)
    )
    noise = torch.randn(size, *shape, generator=draw, dtype=torch.float64)
    return (noise * (1 + identity / 2) + targets.view(-1, *[1] * len(shape)) + identity / 4) * scale, targets


def federation(
    identities: Sequence[int],
    batch_sizes: Sequence[int] | None = None,
    disturbance: Disturbance | None = None,
    **form: Any,
) -> FederatedDataModule:
    """Return a federation in which client i has the data and batch size of ``identities[i]``.

    ``form`` are further arguments of :func:`skewed_images`.
    """
    clients = [
        MaterialisedClient(i, CLIENT_SIZES[i], batch_sizes[i] if batch_sizes else BATCH, **form)
        for i in identities
    ]
    if disturbance is not None and "data" in disturbance.what:
        steps = clients[disturbance.client].steps_per_epoch
        clients[disturbance.client].disturbed_steps = range(
            (disturbance.round - 1) * steps, disturbance.round * steps
        )
    evaluation = TensorDataset(*skewed_images(99, 16, **form))
    return FederatedDataModule(
        clients, L.LightningDataModule.from_datasets(val_dataset=evaluation, batch_size=16)
    )


def reference_model(norm: str = "bn") -> nn.Sequential:
    """Create :func:`~fl_lightning.testing.models.small_cnn` in float64, with fixed weights.

    A BN layer whose gamma and beta are not trained replaces dropout, which runs would replace.
    """
    model = small_cnn(norm, classes=CLASSES, channels=CHANNELS)
    model[6] = nn.BatchNorm2d(6).requires_grad_(False) if norm == "bn" else nn.Identity()
    model.double()
    draw = generator(0, "verification model")
    with torch.no_grad():
        for layer in (model[0], model[3], model[8]):
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.3)
    return model
