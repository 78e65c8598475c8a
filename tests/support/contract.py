"""Every method with the settings in which it is tested: the shipped ones by their ``examples``, and those of the README."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_flatten_with_path

from fl_lightning import FederatedCallback, callbacks
from fl_lightning.recorded import value_in_words
from tests.support.helpers import blobs, federated_run, small_cnn
from tests.support.readme_code import methods

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)


class Row(NamedTuple):
    """A method (``README's X`` for the class in the README's text), its settings, and those of the module that it needs."""

    callback: str
    settings: dict[str, Any]
    module: dict[str, Any]

    @property
    def name(self):
        """The same in every process, as a test's name must be."""
        return f"{self.callback}-{ {name: value_in_words(value) for name, value in self.settings.items()} }"


SHIPPED = {
    name: getattr(callbacks, name)
    for name in callbacks.__all__
    if issubclass(getattr(callbacks, name), FederatedCallback)
}
# with all clients in every round the state of SiloBN's server is that of FedAvg
_NEEDS = {
    "FedNova": {"local_epochs": 1},  # clients that differ in their local steps
    "FedTAN": {"client_optimizer": MOMENTUM},
    "MaintainedMomentum": {"client_optimizer": MOMENTUM},
    "PrivateFedAvg": dict(SHIPPED["PrivateFedAvg"].needs),
    "SiloBN": {"participation": 2},
}
TABLE = [
    *(Row(name, example, _NEEDS.get(name, {})) for name, cls in SHIPPED.items() for example in cls.examples),
    *(
        Row("MaintainedMomentum", example, {"client_optimizer": ADAM})
        for example in SHIPPED["MaintainedMomentum"].examples
    ),
    Row("SCAFFOLD", {}, {"client_optimizer": ADAM, "participation": 3}),
    Row("README's FedProx", {"mu": 0.5}, {}),
    Row("README's FedBN", {}, {}),
]


def _rows(chosen, mark):
    """Return all rows, with a mark if their place is not chosen."""
    return [
        pytest.param(row, id=row.name, marks=() if place in chosen else mark)
        for place, row in enumerate(TABLE)
    ]


_FIRST = {row.callback: place for place, row in reversed([*enumerate(TABLE)])}.values()
_LAST = {row.callback: place for place, row in enumerate(TABLE)}.values()
EVERY_ROW = pytest.mark.parametrize("row", _rows(_FIRST, pytest.mark.slow))
"""Each method in all its settings, of which those after the first are slow."""
EVERY_METHOD = pytest.mark.parametrize("row", _rows(_LAST, pytest.mark.nightly))
"""Each method in its last settings, which show most of it in a few rounds; its other settings are nightly."""
OF_BATCHES = [
    place for place, row in enumerate(TABLE) if not getattr(SHIPPED.get(row.callback), "per_sample", False)
]
EVERY_METHOD_OF_BATCHES = pytest.mark.parametrize(
    "row", [param for place, param in enumerate(_rows(_LAST, pytest.mark.nightly)) if place in OF_BATCHES]
)
"""The same without methods that need the gradient of each sample."""
ROW_OF_METHOD = [TABLE[place] for place in _LAST]


def method_of(row):
    """A row's callback."""
    name = row.callback.removeprefix("README's ")
    home = callbacks if name == row.callback else methods()
    return getattr(home, name)(**row.settings)


def run(row, rounds=4, extra=(), **settings):
    """A module after training with the method of a row."""
    method = method_of(row)
    settings = {"data": blobs(4, (24, 40, 32)), **row.module, **settings}
    settings = {"model": model_for(method, settings["data"]), **settings}
    return federated_run(method, *extra, rounds=rounds, **settings).module


def model_for(method, data):
    """The small network with the norm layers that suit a method, on data that it takes."""
    if method.per_sample:
        declare_rates(data)
    return small_cnn("gn" if method.per_sample else "bn")


def declare_rates(data):
    """Let methods that need Poisson samples take the batches of a test."""
    for client in data.clients:
        client.sampling_rate = client.batch_size / len(client.dataset)


def contents(path):
    """A checkpoint's tensors and numbers by their place in it, without times and Lightning's own bookkeeping."""
    checkpoint = torch.load(path, weights_only=True)
    kept = {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "callbacks", "fl_lightning")}
    leaves, _ = tree_flatten_with_path(kept)
    texts = {"".join(map(str, place)): leaf for place, leaf in leaves}
    return {place: leaf for place, leaf in texts.items() if "seconds" not in place and "time/" not in place}
