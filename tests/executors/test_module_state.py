"""What a module holds beside its clients' tensors: found again in full whenever something of it has changed."""

import pytest
import torch
from torch import nn

from fl_lightning.executors.module_state import ModuleStateReader, attributes_of, objects_of


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.number, self.word = 1.5, "a"
        self.list, self.dict, self.nested = [1, 2], {"a": [1]}, (1, [2])
        self.tensor, self.tensors = torch.zeros(()), [torch.zeros(2)]
        self.child = nn.Linear(2, 2)


def module():
    whole = nn.Module()
    whole.model = nn.Sequential(Part(), nn.BatchNorm1d(2))
    whole.loss = nn.CrossEntropyLoss()
    return whole


def assert_true_of(state, of):
    assert state.attributes == attributes_of(of)
    assert list(map(id, state.objects)) == list(map(id, objects_of(of)))


CHANGES = {
    "a number": lambda part: setattr(part, "number", 2.5),
    "an equal tensor": lambda part: setattr(part, "tensor", torch.zeros(())),
    "a new attribute": lambda part: setattr(part, "new", 1),
    "an attribute less": lambda part: delattr(part, "word"),
    "an element of a list": lambda part: part.list.append(3),
    "deep in a dict": lambda part: part.dict["a"].append(3),
    "deep in a tuple": lambda part: part.nested[1].append(3),
    "a tensor in a list of numbers": lambda part: part.list.__setitem__(0, torch.zeros(2)),
    "tensors that become numbers": lambda part: part.tensors.__setitem__(0, 0.5),
    "another dictionary of attributes": lambda part: setattr(part, "__dict__", {**vars(part), "number": 2.5}),
    "a child": lambda part: setattr(part, "child", nn.Linear(2, 2)),
    "a child of a part without any": lambda part: part.child.add_module("grandchild", nn.ReLU()),
    "its child's name": lambda part: part._modules.update(other=part._modules.pop("child")),
    "the mode": lambda part: part.child.eval(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_is_found(what):
    whole, stocktaker = module(), ModuleStateReader()
    before = stocktaker.read(whole)
    assert_true_of(before, whole)
    CHANGES[what](whole.model[0])
    after = stocktaker.read(whole)
    assert after is not before
    assert_true_of(after, whole)
    assert stocktaker.read(whole) is after


def test_another_loss_and_another_module_are_found():
    whole, stocktaker = module(), ModuleStateReader()
    before = stocktaker.read(whole)
    assert before.has_objects_of(before)
    whole.loss = nn.CrossEntropyLoss()
    after = stocktaker.read(whole)
    assert not after.has_objects_of(before)
    other = module()
    assert_true_of(stocktaker.read(other), other)


def test_a_module_that_nobody_changes_is_looked_at_closely_once(monkeypatch):
    whole, stocktaker = module(), ModuleStateReader()
    before = stocktaker.read(whole)
    monkeypatch.setattr(
        "fl_lightning.executors.module_state.objects_of", lambda module: pytest.fail("looked again")
    )
    whole.model[0].number = whole.model[0].number
    assert stocktaker.read(whole) is before
    whole.train()
    assert stocktaker.read(whole) is before


def test_numbers_that_change_are_no_other_objects():
    whole, stocktaker = module(), ModuleStateReader()
    before = stocktaker.read(whole)
    whole.model[0].number = 2.5
    after = stocktaker.read(whole)
    assert after is not before
    assert after.has_objects_of(before)


# people still have scripted modules
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_a_scripted_part_has_a_state():
    whole, stocktaker = module(), ModuleStateReader()
    whole.model = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    before = stocktaker.read(whole)
    assert_true_of(before, whole)
    assert stocktaker.read(whole).has_objects_of(before)


def test_the_same_parts_under_other_names_are_no_longer_the_same():
    whole, stocktaker = nn.Module(), ModuleStateReader()
    whole.parts = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    before = stocktaker.read(whole)
    first, second = whole.parts["first"], whole.parts["second"]
    whole.parts.clear()
    whole.parts.update({"second": first, "first": second})
    assert not stocktaker.read(whole).has_objects_of(before)
