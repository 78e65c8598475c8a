"""One client of a data set that is held in memory."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fl_lightning.client_data.federated import ClientDataModule
from fl_lightning.datamodules.images import Batch, TrainImages
from fl_lightning.randomness import generator, permutation


class InMemoryClient(ClientDataModule):
    """A client's share of the training images.

    Epoch e walks over the permutation of the client's samples that belongs to (seed, client, e), in batches
    of exactly ``batch_size``; an incomplete last batch is dropped. Local step s is batch ``s %
    steps_per_epoch`` of epoch ``s // steps_per_epoch``.

    Args:
        client_id: Position of the client in the federation.
        images: The training images of all clients.
        indices: The client's samples among them, int64, shape ``[n]``.
        batch_size: Samples in a batch.
        horizontal_flip: Whether each sample is flipped with probability 1/2.
        seed: The run's seed.
    """

    def __init__(
        self,
        client_id: int,
        images: TrainImages,
        indices: Tensor,
        batch_size: int,
        horizontal_flip: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.client_id = client_id
        self.images = images
        self.indices = indices
        self.batch_size = batch_size
        self.horizontal_flip = horizontal_flip
        self.seed = seed
        self.num_examples = len(indices)
        self.steps_per_epoch = len(indices) // batch_size
        self._epoch = -1
        self._draws = torch.empty(0)

    def epoch_draws(self, epoch: int) -> Tensor:
        """All random choices of one epoch, int64, shape ``[steps_per_epoch, batch_size, 4]``.

        The last axis is the ``draws`` of :meth:`~fl_lightning.datamodules.images.TrainImages.batch`. The data order does not depend on
        whether, or how, the samples are augmented.
        """
        if epoch != self._epoch:
            order = permutation(self.num_examples, self.seed, "data order", self.client_id, epoch)
            augmentation = generator(self.seed, "augmentation", self.client_id, epoch)
            offsets = torch.randint(
                2 * self.images.padding + 1, (self.num_examples, 2), generator=augmentation
            )
            flips = torch.randint(1 + self.horizontal_flip, (self.num_examples, 1), generator=augmentation)
            draws = torch.cat([self.indices[order][:, None], offsets, flips], dim=1)
            used = self.steps_per_epoch * self.batch_size
            self._draws = draws[:used].view(self.steps_per_epoch, self.batch_size, 4)
            self._epoch = epoch
        return self._draws

    def step_draws(self, step: int) -> Tensor:
        """The random choices of local step ``step``, int64, shape ``[batch_size, 4]``."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return self.epoch_draws(epoch)[index]

    def train_batch(self, step: int) -> Batch:
        """The batch of local step ``step`` (from 0, counted over the whole training)."""
        return self.images.batch(self.step_draws(step))

    def train_dataloader(self) -> DataLoader[Batch]:
        """The batches of one epoch: epoch 0, or the one that ``loader.sampler.set_epoch(epoch)`` chooses."""
        return DataLoader(ClientImages(self), sampler=EpochSampler(self), batch_size=None)


class EpochSampler:
    """Yields the random choices of each batch of an epoch, ``[batch_size, 4]``: a sampler of whole batches.

    Args:
        client: The client whose epochs are walked.
    """

    def __init__(self, client: InMemoryClient) -> None:
        self.client = client
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0; Lightning calls this where it drives the loader itself."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.client.steps_per_epoch

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.client.epoch_draws(self.epoch))


class ClientImages(Dataset[Batch]):
    """A client's samples; indexed by a position for the plain sample, by the sampler's choices for a batch.

    Args:
        client: The client whose samples they are.
    """

    def __init__(self, client: InMemoryClient) -> None:
        self.client = client

    def __len__(self) -> int:
        return self.client.num_examples

    def __getitem__(self, index: int | Tensor) -> Batch:
        images = self.client.images
        if isinstance(index, int):
            sample = int(self.client.indices[index])
            image, label = images.batch(torch.tensor([[sample, images.padding, images.padding, 0]]))
            return image[0], label[0]
        return images.batch(index)
