"""A client that never trains decides nothing: neither the inputs' scale, nor validation, nor the best checkpoint."""

import numpy as np
import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import ImageData, InMemoryDataModule, Natural, TensorData

GROUPS = torch.arange(60) % 3
"""Samples 0 to 59 of hospitals a, b and c. Those of c are far from the others."""
FEATURES = torch.where(GROUPS == 2, 200, 20) + torch.arange(60) % 5
LABELS = torch.arange(60) // 3 % 2
NAMES = ["a", "b", "c"]


class Pictures(InMemoryDataModule):
    """Grey pictures of one pixel, with test pictures of each hospital."""

    num_classes, in_channels, image_size = 2, 1, 1

    def load(self):
        pixels = FEATURES.to(torch.uint8).reshape(60, 1, 1, 1)
        return ImageData(pixels, LABELS, pixels[:30], LABELS[:30], GROUPS, GROUPS[:30], NAMES)


def pictures(**settings):
    data = Pictures(partition=Natural(), batch_size=4, **settings)
    data.setup("fit")
    return data


def table(**settings):
    names = np.array(NAMES)[GROUPS.numpy()]
    data = TensorData(
        FEATURES.reshape(60, 1).float(),
        LABELS,
        groups=names,
        partition=Natural(),
        standardize=True,
        batch_size=4,
        **settings,
    )
    data.setup("fit")
    return data


@pytest.mark.parametrize("held_out", [["c"], 1 / 3])
@pytest.mark.parametrize("settings", [{}, {"max_examples": 45}])
def test_validation_and_scale_have_no_sample_of_a_client_that_never_trains(held_out, settings):
    data = pictures(val_fraction=0.4, held_out=held_out, **settings)
    (never,) = data.distribution.groups[data.num_clients :]
    dealt = data.distribution
    assert not (GROUPS[dealt.val] == never).any()
    assert len(dealt.val) > 0
    # the client keeps all of its samples that the run uses
    used = torch.cat([*dealt.clients, dealt.val])
    assert (GROUPS[used] == never).sum() == len(dealt.clients[-1])
    assert torch.equal(GROUPS[dealt.clients[-1]].unique(), torch.tensor([never]))
    pixels = FEATURES[never != GROUPS].double() / 255
    assert float(data.normalize.mean) == pytest.approx(float(pixels.mean()), abs=1e-6)
    assert float(data.normalize.std) == pytest.approx(float(pixels.std(correction=0)), abs=1e-6)


def test_test_data_have_no_sample_of_a_client_that_never_trains_but_the_client_has_its_own():
    data = pictures(held_out=["c"])
    (inputs, _), *more = (
        data.test_dataloader()
    )  # without validation data, the best checkpoint is chosen by these
    assert not more
    assert len(inputs) == 20
    own = [len(targets) for client in range(3) for _, targets in data.own_dataloader(client, "test")]
    assert own == [10, 10, 10]
    whole = pictures()
    assert len(next(iter(whole.test_dataloader()))[0]) == 30


def test_a_table_has_no_validation_sample_of_a_client_that_never_trains():
    data = table(val_fraction=0.25, test_fraction=0.25, held_out=["c"])
    inputs = torch.cat([x for loader in (data.val_dataloader(), data.test_dataloader()) for x, _ in loader])
    assert inputs.max() < 10  # in standard deviations of a and b; samples of c are at 100
    assert next(iter(data.own_dataloader(2, "test")))[0].min() > 100


def test_without_clients_that_never_train_nothing_changes():
    data = pictures(val_fraction=0.4)
    assert len(data.distribution.val) == 24
    assert torch.equal(data.trained(), torch.arange(60))
    assert float(data.normalize.mean) == pytest.approx(float(FEATURES.double().mean()) / 255, abs=1e-6)


def test_clients_that_leave_no_evaluation_data_are_refused():
    labels = torch.arange(8) % 2
    data = TensorData(
        torch.zeros(8, 1),
        labels,
        groups=np.array([*"aaaabbbb"]),
        test_features=torch.zeros(4, 1),
        test_targets=labels[:4],
        test_groups=np.array([*"bbbb"]),
        partition=Natural(),
        held_out=["b"],
    )
    with pytest.raises(
        ConfigurationError, match=r"held_out=\['b'\] leaves no test data, .* hold out fewer clients"
    ):
        data.setup("fit")
