"""A tiny federation with synthetic, label-skewed data. A run takes less than a second."""

from collections.abc import Sequence
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.client_data.federated import ClientDataModule, FederatedDataModule
from fl_lightning.randomness import generator
from fl_lightning.testing.models import small_cnn

CLASSES, CHANNELS, IMAGE_SIZE, BATCH = 3, 2, 6, 8
SIZES = (8, 16, 24, 8, 16)
"""Number of training samples of each client.

The numbers differ. The clients' weights and numbers of local steps therefore differ, too.
"""


class Disturbance(NamedTuple):
    """Change of one client in one round, to test its effect on other clients.

    Attributes:
        client: Id of the changed client.
        round: Round of the change.
        what: The data or the state that changes. ``("data",)`` changes the client's inputs. Any
            other tuple changes state of the client after the local steps. Each of its strings names
            a treatment, and all state with this treatment changes. The string ``"optimizer"``
            stands for the state of the client optimizer.
    """

    client: int
    round: int
    what: tuple[str, ...]


class MaterialisedClient(ClientDataModule):
    """Client whose batches depend on the step.

    ``identity`` decides the mean and the scale of the inputs. ``identity`` also decides the most
    frequent class.
    """

    def __init__(self, identity: int, size: int, batch_size: int) -> None:
        super().__init__()
        self.num_examples, self.steps_per_epoch, self.batch_size = size, size // batch_size, batch_size
        self.inputs, self.targets = skewed_images(identity, size)
        self.disturbed_steps = range(0)

    def train_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of local step ``step``.

        An epoch starts three samples after the start of the previous epoch.
        """
        epoch = step // self.steps_per_epoch
        rows = (torch.arange(self.batch_size) + step * self.batch_size + 3 * epoch) % self.num_examples
        inputs = self.inputs[rows]
        return inputs * 1.5 + 0.5 if step in self.disturbed_steps else inputs, self.targets[rows]

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader with the batches of the first epoch."""
        return DataLoader(TensorDataset(self.inputs, self.targets), self.batch_size, drop_last=True)


def skewed_images(identity: int, size: int) -> tuple[Tensor, Tensor]:
    """Return float64 images ``[size, 2, 6, 6]`` and their labels. Most have the same class."""
    draw = generator(identity, "verification data")
    favourite = torch.tensor(identity % CLASSES)
    targets = torch.where(
        torch.rand(size, generator=draw) < 0.7, favourite, torch.randint(CLASSES, (size,), generator=draw)
    )
    noise = torch.randn(size, CHANNELS, IMAGE_SIZE, IMAGE_SIZE, generator=draw, dtype=torch.float64)
    return noise * (1 + identity / 2) + targets.view(-1, 1, 1, 1) + identity / 4, targets


def federation(
    identities: Sequence[int],
    batch_sizes: Sequence[int] | None = None,
    disturbance: Disturbance | None = None,
) -> FederatedDataModule:
    """Return a federation. Client i has the data, size and batch size of ``identities[i]``."""
    clients = [
        MaterialisedClient(identity, SIZES[identity], batch_sizes[identity] if batch_sizes else BATCH)
        for identity in identities
    ]
    if disturbance is not None and "data" in disturbance.what:
        steps = clients[disturbance.client].steps_per_epoch
        clients[disturbance.client].disturbed_steps = range(
            (disturbance.round - 1) * steps, disturbance.round * steps
        )
    evaluation = TensorDataset(*skewed_images(99, 16))
    return FederatedDataModule(
        clients, L.LightningDataModule.from_datasets(val_dataset=evaluation, batch_size=16)
    )


def reference_model(norm: str = "bn") -> nn.Sequential:
    """Create :func:`~fl_lightning.testing.models.small_cnn` in float64, with fixed weights."""
    model = small_cnn(norm, classes=CLASSES, channels=CHANNELS).double()
    model[6] = nn.Identity()  # in place of torch's dropout, which a run would replace
    draw = generator(0, "verification model")
    with torch.no_grad():
        for layer in (model[0], model[3], model[8]):
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.3)
    return model
