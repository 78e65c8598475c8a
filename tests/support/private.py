"""Federations whose batches are, or count as, Poisson samples."""

import torch

from fl_lightning.datamodules import TensorData
from tests.support.contract import declare_rates
from tests.support.helpers import small_cnn


def of_rates(data, rates=None):
    """Return data whose batches count as Poisson samples."""
    declare_rates(data)
    for client, rate in (rates or {}).items():
        data.clients[client].sampling_rate = rate
    return data


def poisson(rate, num_clients=3, size=30, seed=0):
    """Return a federation of vectors whose batches are drawn with this rate."""
    draws = torch.Generator().manual_seed(0)
    features = torch.randn(num_clients * size, 4, generator=draws, dtype=torch.float64)
    targets = torch.arange(num_clients * size) % 3
    return TensorData(
        features, targets, test_features=features[:6], test_targets=targets[:6], num_clients=num_clients,
        batch_size=max(1, round(rate * size)), sampling="poisson", seed=seed,
    )  # fmt: skip


def pretrained():
    """Return a network with BN whose statistics are not the initial ones."""
    model = small_cnn("bn").double().train()
    for _ in range(3):
        model(torch.randn(16, 2, 6, 6, dtype=torch.float64) * 2 + 1)
    return model


def steps_of(private):
    """The number of private steps of each client."""
    return {client: sum(n for *_, n in segments) for client, segments in private.history.items()}
