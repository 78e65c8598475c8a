"""A run's model outside of its run: with its normalisation, and without its data."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.client_data.new_samples import NewSamples
from fl_lightning.client_data.preprocessing import restored_preprocessing
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.experiments.run_directory.checkpoint_io import load_checkpoint


class TrainedModel(nn.Module):
    """A run's model that takes raw inputs, as ``fl_lightning.load_model`` returns it.

    Args:
        model: The model, which takes normalised inputs.
        normalize: Normalisation of raw inputs.
        class_names: Names of the classes, in the order of the outputs; None without classes.
    """

    def __init__(self, model: nn.Module, normalize: nn.Module, class_names: Any) -> None:
        super().__init__()
        self.model, self.normalize, self.class_names = model, normalize, class_names
        self.dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's outputs for raw inputs ``[N, ...]``."""
        values = self.normalize(inputs)
        return self.model(values.to(self.dtype) if values.is_floating_point() else values)


class _RecalledData(FederatedDataModule):
    """Facts about a run's data that a checkpoint keeps, and samples of a new file.

    Args:
        checkpoint: Path of the checkpoint.
        seed: Ignored.

    Attributes:
        round: The checkpoint's round.
        samples: Samples that ``test`` and ``predict`` read.
    """

    num_clients: Any = 0
    samples: NewSamples | None = None

    def __init__(self, checkpoint: str, seed: int = 0) -> None:
        super().__init__(seed=seed)
        content = load_checkpoint(checkpoint)
        self.round = content["global_step"]
        vars(self).update(content["fl_lightning"]["data"])
        facts: Any = self.normalize
        self.normalized = restored_preprocessing(facts)

    def evaluation_digest(self, split: Literal["val", "test"] = "val") -> str:
        """Return no digest, as the samples are new."""
        return ""

    def test_dataloader(self) -> Any:
        """Return the batches ``(inputs, targets)`` of the new samples, in the order of their file."""
        if self.samples is None:
            return []
        count, size = len(self.samples.places), self.eval_batch_size
        parts = [slice(start, start + size) for start in range(0, count, size)]
        return DataLoader(self.samples, sampler=parts, batch_size=None, collate_fn=self._normalized)

    def _normalized(self, batch: Any) -> Any:
        return self.normalized(batch[0]), batch[1]

    def client_number(self, client: str) -> int:
        """Return the id of a client, given by its name, or by its id if the clients have no names.

        Raises:
            ConfigurationError: The run has no such client.
        """
        # no ids beside names: hospital 1 would be another client than client 1
        names = [*(self.client_names or map(str, range(self.num_clients)))]
        if client not in names:
            raise ConfigurationError(
                f"client: {client!r} is no client of the run{nearest(client, names)}; its clients are {', '.join(names)}"
            )
        return names.index(client)
