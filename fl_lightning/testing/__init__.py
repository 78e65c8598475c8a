"""Small federations, a small network and reference trainers for tests and for ``verify``."""

from fl_lightning.testing.clients import (
    ArrayClient,
    blobs,
    client_batch,
    uneven_clients,
    union_batch,
    union_of,
)
from fl_lightning.testing.models import small_cnn
from fl_lightning.testing.training import (
    SGD,
    ClientStates,
    Rows,
    States,
    by_hand,
    centralised,
    distance,
    fit,
    plain_step,
    train,
)

__all__ = [
    "SGD",
    "ArrayClient",
    "ClientStates",
    "Rows",
    "States",
    "blobs",
    "by_hand",
    "centralised",
    "client_batch",
    "distance",
    "fit",
    "plain_step",
    "small_cnn",
    "train",
    "uneven_clients",
    "union_batch",
    "union_of",
]
