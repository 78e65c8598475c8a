"""State of methods in checkpoints: the attributes that ``saved`` names."""

import pytest
import torch

from fl_lightning import ClientMemory, ConfigurationError, FederatedCallback
from fl_lightning.callbacks import SlidingWindowFixBN
from tests.support.helpers import blobs, small_cnn, train


class Counts(FederatedCallback):
    saved = ("memory", "rounds")

    def __init__(self):
        self.memory, self.rounds, self.other = ClientMemory(), 0, 0


def test_checkpoints_have_the_attributes_that_saved_names():
    method, again = Counts(), Counts()
    method.memory[3], method.rounds, method.other = {"control": torch.ones(2)}, 4, 5
    again.load_state_dict(method.state_dict())
    assert isinstance(again.memory, ClientMemory)
    assert again.memory is not method.memory
    assert torch.equal(again.memory[3]["control"], torch.ones(2))
    assert (again.rounds, again.other) == (4, 0)
    assert FederatedCallback().state_dict() == {}
    assert SlidingWindowFixBN(2, 0.1).state_dict().keys() == {"freeze_round", "changes", "statistics"}


class More(Counts):
    saved = ("other", "rounds")


def test_a_subclass_saves_what_its_base_saves_too():
    assert More().state_dict().keys() == {"memory", "rounds", "other"}
    assert More.saved == ("memory", "rounds", "other")


class Misspelt(Counts):
    saved = ("memry",)


def test_an_attribute_that_is_missing_is_named_before_round_1():
    with pytest.raises(ConfigurationError, match=r"Misspelt.saved: there is no attribute 'memry'.*memory"):
        train(small_cnn(), blobs(), 1, [Misspelt()])


class Scales(FederatedCallback):
    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for block in cohort.grads.blocks.values():
            block *= 0.5


def test_a_run_may_have_two_callbacks_of_one_class_without_state():
    train(small_cnn(), blobs(), 1, [Scales(), Scales()])
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `Counts`"):
        train(small_cnn(), blobs(), 1, [Counts(), Counts()])
