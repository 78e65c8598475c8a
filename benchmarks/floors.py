"""Unavoidable parts of a round in plain PyTorch: passes, augmentation and optimizer arithmetic.

The tensors have the shapes of a workload: there are as many clients as in its cohort, and each
client has separate weights.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.recipe import CLIENT_OPTIMIZER
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import SyntheticImages, Workload


class Floors:
    """Timings of the unavoidable parts of a workload's rounds, each part alone.

    Args:
        workload: The federation and its local work.
        model: The model; each client gets a copy.
        data: The federated data, set up for ``fit``.
    """

    def __init__(self, workload: Workload, model: nn.Module, data: SyntheticImages) -> None:
        self.workload, self.data = workload, data
        self.models = [copy.deepcopy(model).train() for _ in range(workload.cohort_size)]
        self.params, self.buffers = torch.func.stack_module_state(self.models)
        clients = range(workload.cohort_size)
        self.draws = torch.stack([data.step_draws(client, 0) for client in clients])
        self.images, self.labels = data.samples.batch(self.draws)
        numel = sum(parameter.numel() for parameter in model.parameters())
        self.block = torch.randn(workload.cohort_size, numel)
        self.block.grad = torch.randn_like(self.block)
        self.server = copy.deepcopy(model)
        for parameter in self.server.parameters():
            parameter.grad = torch.randn_like(parameter)

    def forward_backward(self, executor: str, rounds: int) -> Stopwatch:
        """Time all clients' losses and gradients.

        Args:
            executor: ``"sequential"`` (one client after the other) or ``"vectorized"`` (``vmap``).
            rounds: Number of rounds.
        """
        step = {"sequential": self._each_model, "vectorized": self._stacked_models}[executor]
        return self._timed(step, rounds * self.workload.local_steps)

    def augmentation(self, rounds: int) -> Stopwatch:
        """Time the augmentation, which takes the batches of all clients at once."""
        return self._timed(lambda: self.data.samples.batch(self.draws), rounds * self.workload.local_steps)

    def optimizer(self, rounds: int) -> Stopwatch:
        """Time the client optimizer's steps on one block of all clients, and the server's step."""
        optimizer, server = CLIENT_OPTIMIZER([self.block]), torch.optim.SGD(self.server.parameters(), lr=1.0)
        optimizer.step()

        def one_round() -> None:
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
            for _ in range(self.workload.local_steps):
                optimizer.step()
            server.step()

        return self._timed(one_round, rounds)

    def _each_model(self) -> None:
        for model, images, labels in zip(self.models, self.images, self.labels, strict=True):
            loss = F.cross_entropy(model(images), labels)
            torch.autograd.grad(loss, list(model.parameters()))

    def _stacked_models(self) -> None:
        losses = torch.func.vmap(self._loss)(self.params, self.buffers, self.images, self.labels)
        torch.autograd.grad(losses.sum(), list(self.params.values()))

    def _loss(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], images: Tensor, labels: Tensor
    ) -> Tensor:
        outputs = torch.func.functional_call(self.models[0], (params, buffers), (images,))
        return F.cross_entropy(outputs, labels)

    def _timed(self, step: Callable[[], object], times: int) -> Stopwatch:
        watch = Stopwatch()
        with watch:
            for _ in range(times):
                step()
        return watch
