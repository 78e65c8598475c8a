"""Class paths are part of configurations and of the hash that names a run's folder: no move of a file may change one."""

import inspect
import pkgutil
from importlib import import_module

import pytest
import torch
from lightning.pytorch.callbacks import Callback

import fl_lightning
from fl_lightning import models
from fl_lightning.aggregation import Aggregator, PreAggregator
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.datamodules.partitions import Partition
from fl_lightning.execution.base import Executor
from fl_lightning.optimizers.client_lr import LRSchedule

OPTIONAL = ("ray", "submitit", "wandb_workspaces")
"""Packages that the README's command does not install, and that a module imports."""

# classes of a module are known once it is imported, and other tests in this process import more modules
for _module in pkgutil.walk_packages(fl_lightning.__path__, "fl_lightning."):
    if not _module.name.endswith("__main__"):
        try:
            import_module(_module.name)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise

FRONT_DOORS = [
    import_module(name)
    for name in (
        "fl_lightning",
        "fl_lightning.aggregation",
        "fl_lightning.models",
        "callbacks",
        "datamodules",
    )
]
BASES = (Callback, FederatedDataModule, Executor, Aggregator, PreAggregator, LRSchedule, Partition)


def subclasses(base):
    for kind in type.__subclasses__(base):
        yield kind
        yield from subclasses(kind)


PARTS = {
    "FinishRound",  # the command line gives it to every run
    "RunStart",  # likewise
    "KeptBatches",  # of a prediction, which takes batches in their order
    "Companion",  # of the verification
    "FoundFreezing",  # a base of methods
    "Observer",  # a base of observers
    "PrivateMethod",  # a base of methods
}
"""What belongs to a class that can be named, or to the program."""


def can_be_named(kind):
    """Whether a configuration would name this class: it is shipped, whole, and neither a base nor a part."""
    ours = kind.__module__.split(".")[0] in ("fl_lightning", "callbacks", "datamodules")
    part = kind.__name__.startswith("_") or kind.__name__ in PARTS or inspect.isabstract(kind)

    return (
        ours
        and not part
        and not kind.__module__.startswith(("fl_lightning.testing", "fl_lightning.verification"))
    )


@pytest.mark.parametrize("base", [*BASES, torch.optim.Optimizer], ids=lambda base: base.__name__)
def test_every_class_that_a_configuration_can_name_has_a_path_that_does_not_tell_its_file(base):
    named = [kind for kind in subclasses(base) if can_be_named(kind)]
    hidden = {
        kind.__name__
        for kind in named
        if not any(getattr(door, kind.__name__, None) is kind for door in FRONT_DOORS)
    }
    assert hidden == set()
    assert named


def test_models_are_named_by_their_package():
    assert all(
        kind.__module__.startswith("fl_lightning.models.")
        for kind in vars(models).values()
        if isinstance(kind, type)
    )
