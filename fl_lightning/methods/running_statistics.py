"""Functions for the running statistics of all BN layers, concatenated along the channels."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from fl_lightning.cohort.cohort import Cohort


def sent_kinds(cohort: "Cohort") -> dict[str, str]:
    """Return the kinds of all buffers that clients do not keep, by name.

    Raises:
        ConfigurationError: Clients keep the statistics of all BN layers.
    """
    treatments = cohort.treatments
    kinds = {name: kind for name, kind in cohort.buffer_kinds.items() if treatments[name] != "local"}
    if "mean" not in kinds.values():
        raise ConfigurationError(
            "callbacks: a method uses the statistics that clients send, but another method keeps the statistics of all BN layers "
            "at the clients; leave a BN layer out of the head, or use one of the methods"
        )
    return kinds


def client_statistics(cohort: "Cohort") -> Tensor:
    """Return the running means and variances of all clients, ``[2, C, channels]``.

    The channels of all BN layers whose statistics are not local are concatenated.
    """
    return joined_statistics(cohort.buffers, sent_kinds(cohort))


def server_statistics(cohort: "Cohort") -> Tensor:
    """Return the running means and variances of the server, ``[2, channels]``.

    The channels of all BN layers whose statistics are not local are concatenated.
    """
    return joined_statistics(cohort.server_buffers, sent_kinds(cohort))


def set_server_statistics(cohort: "Cohort", mean: Tensor, variance: Tensor) -> None:
    """Set the running means and variances of the server, each ``[channels]``.

    The channels of all BN layers whose statistics are not local are concatenated.
    """
    for name, value in split_statistics(cohort.server_buffers, sent_kinds(cohort), mean, variance).items():
        cohort.server_buffers[name].copy_(value)


def split_statistics(
    buffers: Mapping[str, Tensor], kinds: Mapping[str, str], mean: Tensor, variance: Tensor
) -> dict[str, Tensor]:
    """Split concatenated statistics into the running mean and variance of each layer.

    The keys of the result are names of buffers.

    Args:
        buffers: A model's buffers by name, whose sizes give the sizes of the split statistics.
        kinds: Kind of each buffer, from ``fl_lightning.batch_norm.kinds.buffer_kinds``.
        mean: Means of all layers, concatenated, ``[..., channels]``.
        variance: Variances of all layers, concatenated, ``[..., channels]``.
    """
    pieces: dict[str, Tensor] = {}
    for names, joined in zip(_names(kinds), (mean, variance), strict=True):
        sizes = [len(buffers[name]) for name in names]
        pieces.update(zip(names, torch.split(joined, sizes, -1), strict=True))
    return pieces


def joined_statistics(buffers: Mapping[str, Tensor], kinds: Mapping[str, str]) -> Tensor:
    """Return running means (row 0) and variances (row 1) of all layers, ``[2, ..., channels]``.

    Args:
        buffers: Buffers ``[..., channels]`` by name.
        kinds: Kind of each buffer, from ``fl_lightning.batch_norm.kinds.buffer_kinds``.
    """
    return torch.stack([torch.cat([buffers[name] for name in names], -1) for names in _names(kinds)])


def _names(kinds: Mapping[str, str]) -> list[list[str]]:
    return [[name for name, kind in kinds.items() if kind == wanted] for wanted in ("mean", "var")]
