"""Methods on images whose pixels are classified: the same code, the same numbers from every executor."""

from functools import cache

import pytest
import torch

from fl_lightning import Segmentation, SequentialExecutor, VectorizedExecutor
from fl_lightning.datamodules import Cityscapes
from fl_lightning.models import SmallDeepLab
from tests.support.contract import MOMENTUM, OF_BATCHES, ROW_OF_METHOD, TABLE, method_of
from tests.support.helpers import SGD, distance, federated_run
from tests.support.street_scenes import write_scenes


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes"))


@cache
def trained(root, executor, method=None, rounds=2, crop=(12, 16), width=4, **settings):
    """The server's states and last metrics with a method on the scenes; ``method`` is the place of a row in the table."""
    row = None if method is None else TABLE[method]
    settings = {**(row.module if row else {}), **settings}
    data = Cityscapes(str(root), batch_size=2, crop_size=crop, horizontal_flip=True)
    torch.manual_seed(0)
    model = SmallDeepLab(19, width=width)
    callbacks = [method_of(row)] if row else []
    settings |= {"trainer": {"limit_val_batches": 1.0}, "task": Segmentation(), "executor": executor()}
    module, _, states, *_ = federated_run(*callbacks, model=model, data=data, rounds=rounds, **settings)
    return states, dict(module.metrics)


IN_CI = ("BNSCAFFOLD", "FBN", "FedBN", "FedPer", "FedTAN", "FixBN", "SCAFFOLD", "StatisticsSources")
"""A method of each kind: layers of its own, statistics, parts of clients, a joint step, freezing, gradients, observers."""


def rows():
    """Methods of each kind in their last settings; the other rows are nightly."""
    for place, row in enumerate(TABLE):
        # two need one label a sample, this model takes no batch of one, and Poisson samples are of data in memory
        left_out = ("ClassifierBias", "GradientInversion", "LabelInference")
        if row.callback not in left_out and place in OF_BATCHES:
            in_ci = row.callback in IN_CI and row in ROW_OF_METHOD
            yield pytest.param(place, id=row.name, marks=() if in_ci else pytest.mark.nightly)


@pytest.mark.parametrize("method", [*rows()])
def test_every_method_segments_with_the_same_numbers_from_every_executor(scenes, method):
    one, metrics = trained(scenes, SequentialExecutor, method)
    all_at_once, _ = trained(scenes, VectorizedExecutor, method)
    # a corrected variance near its floor enlarges rounding errors
    tolerance = 1e-7 if TABLE[method].callback == "BNSCAFFOLD" else 1e-10
    assert max(distance(*pair) for pair in zip(one, all_at_once, strict=True)) < tolerance
    assert 0 <= metrics["test/mean_iou"] < 1
    assert 0 <= metrics["test/pixel_accuracy"] < 1


def test_fedtan_at_one_step_is_centralised_batch_norm_where_all_pixels_count(tmp_path):
    scenes = write_scenes(tmp_path, kinds=4)
    settings = {"local_steps": 1, "weighting": "uniform", "client_optimizer": SGD}
    place = next(place for place, row in enumerate(TABLE) if row.callback == "FedTAN" and not row.settings)
    federated, _ = trained(scenes, SequentialExecutor, place, **settings)
    central, _ = trained(scenes, SequentialExecutor, centralised=True, **settings)
    assert max(distance(*pair) for pair in zip(federated, central, strict=True)) < 1e-10


@pytest.mark.slow
def test_segmentation_is_learnt(tmp_path):
    scenes = write_scenes(tmp_path, size=(32, 48), block=16)
    settings = {"crop": None, "width": 8, "client_optimizer": MOMENTUM}
    _, last = trained(scenes, SequentialExecutor, rounds=30, **settings)
    assert last["test/pixel_accuracy"] > 0.8


def test_the_small_deeplab_is_as_large_as_its_page_says():
    model = SmallDeepLab()
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert (sum(p.numel() for p in model.parameters()), len(layers)) == (241_475, 14)
    assert model(torch.rand(2, 3, 33, 50)).shape == (2, 19, 33, 50)
