"""A run's model outside of its run: with its normalisation, and without its data."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fl_lightning.client_data.federated import SIZES, FederatedDataModule
from fl_lightning.client_data.raw_inputs import NewSamples, Normalize
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.experiments.run_directory.checkpoint_io import load_checkpoint


class TrainedModel(nn.Module):
    """A run's model that takes raw inputs, as ``fl_lightning.load_model`` returns it.

    Args:
        model: The model, which takes normalised inputs.
        normalize: Normalisation of raw inputs; None: the model takes raw inputs.
        class_names: Names of the classes, in the order of the outputs; None without classes.
    """

    def __init__(
        self, model: nn.Module, normalize: Normalize | None, class_names: Sequence[str] | None
    ) -> None:
        super().__init__()
        self.model, self.normalize = model, normalize
        self.class_names = None if class_names is None else list(class_names)
        weights = (x.dtype for x in model.parameters() if x.is_floating_point())
        self.dtype = next(weights, torch.float32)

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's outputs for raw inputs ``[N, ...]``."""
        values = inputs if self.normalize is None else self.normalize(inputs)
        return self.model(values.to(self.dtype) if values.is_floating_point() else values)


class RecalledData(FederatedDataModule):
    """What a checkpoint keeps of its run's data, without the data, and batches of new samples.

    Args:
        checkpoint: Path of the checkpoint.
        seed: Ignored.

    Attributes:
        known: Result of the data module's ``facts()`` in the run.
    """

    drawn_splits = ()

    def __init__(self, checkpoint: str, seed: int = 0) -> None:
        self.samples = _Server()
        super().__init__(server=self.samples, seed=seed)
        self.known: Mapping[str, Any] = load_checkpoint(checkpoint)["fl_lightning"]["data"]
        for name in (*SIZES, "class_names", "client_names", "input_shape", "eval_batch_size"):
            setattr(self, name, self.known[name])
        if self.known["normalize"] is not None:
            self.normalize = Normalize(**self.known["normalize"])

    @property
    def names_of_classes(self) -> list[str] | None:
        """Names of the classes, or their numbers; None without classes."""
        if self.class_names is not None or self.num_classes is None:
            return None if self.class_names is None else [*self.class_names]
        return [*map(str, range(self.num_classes))]

    def client_number(self, client: str) -> int:
        """Return the id of a client, given by its name or its id.

        Raises:
            ConfigurationError: The run has no such client.
        """
        ids = [str(number) for number in range(self.known["num_clients"])]
        for names in (self.client_names, ids):
            if client in names:
                return [*names].index(client)
        names = [*(self.client_names or ids)]
        raise ConfigurationError(
            f"client: {client!r} is no client of the run{nearest(client, names)}; its clients are {', '.join(names)}"
        )

    def evaluate_on(self, samples: NewSamples) -> None:
        """Let ``test`` and ``predict`` read new samples, in the order of their file."""
        self.samples.batches = _Batches(samples, self.normalize, self.eval_batch_size)


class _Batches(Dataset[tuple[Tensor, Tensor | None]]):
    def __init__(self, samples: NewSamples, normalize: Normalize | None, size: int) -> None:
        self.samples, self.normalize, self.size = samples, normalize, size

    def __len__(self) -> int:
        return ceil(len(self.samples.places) / self.size)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor | None]:
        part, targets = slice(index * self.size, (index + 1) * self.size), self.samples.targets
        inputs = self.samples.inputs(part)
        inputs = inputs if self.normalize is None else self.normalize(inputs)
        return inputs, None if targets is None else targets[part]


class _Server(L.LightningDataModule):
    batches: _Batches | None = None

    def test_dataloader(self) -> Any:
        return [] if self.batches is None else DataLoader(self.batches, batch_size=None)
