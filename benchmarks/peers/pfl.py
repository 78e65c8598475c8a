"""FedAvg by pfl-research: ``FederatedAveraging`` on a ``SimulatedBackend``, in one process."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchDataDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from benchmarks.contenders import Timing, client_images
from benchmarks.recipe import BATCH_SIZE, CLIENT_OPTIMIZER, LEARNING_RATE, make_model
from benchmarks.workloads import SyntheticImages, Workload


class Peer:
    """FedAvg by pfl, which averages only parameters. All clients share one set of BN statistics."""

    def __init__(self, workload: Workload, model_name: str, data: SyntheticImages) -> None:
        self.workload, self.rounds_done = workload, 0
        model = _WithLoss(make_model(model_name))
        self.model = PyTorchModel(model, CLIENT_OPTIMIZER, torch.optim.SGD(model.parameters(), lr=1.0))
        images = [client_images(data, client) for client in range(workload.num_clients)]

        def dataset(client: int) -> Any:
            sampler = RandomSampler(images[client], num_samples=workload.local_steps * BATCH_SIZE)
            return PyTorchDataDataset(images[client], user_id=str(client), sampler=sampler)

        users = get_user_sampler("minimize_reuse", list(range(workload.num_clients)))
        self.backend = SimulatedBackend(FederatedDataset(dataset, users), None)
        self.algorithm = _WithoutEvaluation()
        self.local = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH_SIZE
        )

    def run(self, rounds: int) -> Timing:
        """Run ``rounds`` further rounds and return their time."""
        self.rounds_done += rounds
        settings = NNAlgorithmParams(
            central_num_iterations=self.rounds_done,
            evaluation_frequency=1,
            train_cohort_size=self.workload.cohort_size,
            val_cohort_size=None,
        )
        timing = Timing()
        with timing.total:
            self.algorithm.run(settings, self.backend, self.model, self.local, send_metrics_to_platform=False)
        return timing


class _WithLoss(nn.Module):
    """The model with the methods ``loss`` and ``metrics`` that pfl requires."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        return {}


class _WithoutEvaluation(FederatedAveraging):  # type: ignore[misc]  # pfl need not be installed
    """pfl's FedAvg without the evaluation of each client before and after local training."""

    def get_next_central_contexts(self, *args: Any, **kwargs: Any) -> Any:
        contexts, model, metrics = super().get_next_central_contexts(*args, **kwargs)
        if contexts is not None:
            contexts = tuple(replace(context, do_evaluation=False) for context in contexts)
        return contexts, model, metrics
