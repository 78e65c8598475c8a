"""Mixed precision is for the clients' losses: what the server makes of them keeps the precision of the weights."""

from functools import partial

import pytest
import torch

from fl_lightning import (
    FederatedDataModule,
    FederatedModule,
    NetworkTask,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.callbacks import FBN, FedTAN, FixBN
from tests.support.helpers import ArrayClient, blobs, distance, fit, small_cnn


def single(data):
    """The same clients in single precision, which is what mixed precision starts from."""
    clients = [
        ArrayClient(client.dataset.tensors[0].float(), client.dataset.tensors[1], client.batch_size)
        for client in data.clients
    ]
    return FederatedDataModule(clients, clients[0])


@pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
@pytest.mark.parametrize("method", [None, FBN, FixBN, FedTAN])
def test_a_round_without_learning_leaves_the_weights_alone_in_mixed_precision(method, executor):
    model = small_cnn()
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    module = FederatedModule(model, partial(torch.optim.SGD, lr=0.0), local_steps=2, executor=executor())
    fit(module, single(blobs()), 2, [method()] if method else [], precision="bf16-mixed")
    assert distance(start, {name: value.detach() for name, value in model.named_parameters()}) < 1e-7
    assert module.model[1].running_mean.dtype == torch.float32


def test_losses_are_computed_in_mixed_precision():
    seen = []

    class Watched(NetworkTask):
        def client_loss(self, batch):
            seen.append(self.model[0](batch[0]).dtype)
            return super().client_loss(batch)

    fit(
        FederatedModule(Watched(small_cnn()), partial(torch.optim.SGD, lr=0.1), local_steps=1),
        single(blobs()),
        1,
        precision="bf16-mixed",
    )
    assert set(seen) == {torch.bfloat16}
