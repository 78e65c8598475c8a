"""A BN layer of several clients as one layer: each client's numbers are those of a layer of its own."""

from copy import deepcopy
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.batch_norm.stacked import StackedBatchNorm

pytestmark = pytest.mark.first_steps

CLIENTS, CHANNELS = 3, 4
LAYERS = {
    "2d": (nn.BatchNorm2d, (2, 3)),
    "1d of vectors": (nn.BatchNorm1d, ()),
    "1d": (nn.BatchNorm1d, (6,)),
    "3d": (nn.BatchNorm3d, (2, 2, 3)),
}


def clients(kind, space, **settings):
    """Layers that differ in everything, and their batches."""
    torch.manual_seed(0)
    layers = [kind(CHANNELS, **settings).double() for _ in range(CLIENTS)]
    for layer in layers:
        for value in (*layer.parameters(), *layer.buffers()):
            if value.is_floating_point():
                value.data = torch.rand_like(value) + 0.5
    return layers, torch.randn(CLIENTS, 7, CHANNELS, *space, dtype=torch.float64)


def one_by_one(layers, batches):
    layers = deepcopy(layers)
    outputs = torch.stack([layer(batch) for layer, batch in zip(layers, batches, strict=True)])
    names = [name for name, _ in layers[0].named_parameters()]
    gradients = torch.autograd.grad(outputs.sin().sum(), [p for layer in layers for p in layer.parameters()])
    per_client = [gradients[i :: len(names)] for i in range(len(names))]
    buffers = [torch.stack(values) for values in zip(*(layer.buffers() for layer in layers), strict=True)]
    return outputs, [torch.stack(each) for each in per_client], buffers


def at_once(layers, batches, place=0, strided=False):
    def stacked(tensors):
        block = torch.stack([each.detach() for each in tensors])
        return torch.stack([block, block], 1)[:, 0] if strided else block

    names = [name for name, _ in layers[0].named_parameters()]
    params = [stacked(each).requires_grad_() for each in zip(*(x.parameters() for x in layers), strict=True)]
    buffers = [stacked(each) for each in zip(*(x.buffers() for x in layers), strict=True)]
    kept = [name for name, _ in layers[0].named_buffers()]

    def run(params, buffers, batch):
        state = dict(zip([*names, *kept], [*params, *buffers], strict=True))
        return torch.func.functional_call(layers[0], state, batch)

    outputs = torch.vmap(run, in_dims=(0, 0, place))(params, buffers, batches.movedim(0, place))
    gradients = torch.autograd.grad(outputs.sin().sum(), params) if params else []
    return outputs, list(gradients), buffers


def assert_close(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_every_client_gets_the_numbers_of_a_layer_of_its_own(name, training, place, strided):
    layers, batches = clients(*LAYERS[name])
    for layer in layers:
        layer.train(training)
    expected = one_by_one(layers, batches)
    with StackedBatchNorm():
        outputs, gradients, buffers = at_once(layers, batches, place, strided)
    assert_close([outputs], [expected[0]])
    assert_close(gradients, expected[1])
    assert_close(buffers, expected[2])


@pytest.mark.parametrize("settings", [{"affine": False}, {"track_running_stats": False}, {"bias": False}])
def test_what_a_layer_lacks_is_lacking_in_all(settings):
    if not settings.keys() <= signature(nn.BatchNorm2d).parameters.keys():
        pytest.skip("this torch has no BN layer without beta alone")
    layers, batches = clients(nn.BatchNorm2d, (2, 2), **settings)
    with StackedBatchNorm():
        outputs, gradients, buffers = at_once(layers, batches)
    layers_only = [torch.stack([layer(batch) for layer, batch in zip(layers, batches, strict=True)])]
    assert_close([outputs], layers_only)
    assert_close(buffers, [torch.stack(each) for each in zip(*(x.buffers() for x in layers), strict=True)])
    assert len(gradients) == len(list(layers[0].parameters()))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def test_statistics_that_are_columns_of_one_buffer_are_updated_there():
    torch.manual_seed(0)
    statistics, batches = torch.rand(3, 4, 2).double(), torch.randn(3, 5, 4, 6).double().requires_grad_()

    def run(both, batch):
        return F.batch_norm(batch, both[:, 0], both[:, 1], training=True).sin()

    expected = statistics.clone()
    outputs = torch.stack([run(both, batch) for both, batch in zip(expected, batches, strict=True)])
    gradient = torch.autograd.grad(outputs.sum(), batches)
    with StackedBatchNorm():
        found = torch.vmap(run)(statistics, batches)
    assert_close(
        [found, statistics, *torch.autograd.grad(found.sum(), batches)], [outputs, expected, *gradient]
    )


def test_it_is_one_operation_forward_and_one_backward():
    layers, batches = clients(nn.BatchNorm2d, (5, 5))

    def names():
        with Operations() as operations:
            at_once(layers, batches, place=1)
        return operations.names

    usual = names()
    with StackedBatchNorm():
        found = names()
    assert found.count("native_batch_norm") == found.count("native_batch_norm_backward") == 1
    taken_apart = [usual.count(name) - found.count(name) for name in ("mul", "add", "sum")]
    assert all(number >= 1 for number in taken_apart)


def test_outside_of_vmap_and_for_one_value_per_channel_nothing_changes():
    layer, batch = nn.BatchNorm2d(2), torch.randn(3, 2, 2, 2)
    expected = deepcopy(layer)(batch)
    with StackedBatchNorm():
        assert torch.equal(layer(batch), expected)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            torch.vmap(nn.BatchNorm1d(2, track_running_stats=False))(torch.randn(3, 1, 2))


def test_a_gradient_inside_of_vmap_goes_by_torchs_own_rules():
    torch.manual_seed(0)
    weights, batches = torch.rand(3, 2), torch.randn(3, 4, 2, 5)

    def gradient(weight, batch):
        def loss(own):
            return F.batch_norm(batch, None, None, own, training=True).sin().sum()

        return torch.func.grad(loss)(weight)

    expected = torch.stack([gradient(w, b) for w, b in zip(weights, batches, strict=True)])
    with StackedBatchNorm():
        torch.testing.assert_close(torch.vmap(gradient)(weights, batches), expected)


def test_running_statistics_that_all_clients_share_are_not_updated_by_each():
    layer, batches = nn.BatchNorm2d(2), torch.randn(3, 4, 2, 2, 2)
    with StackedBatchNorm(), pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(layer)(batches)
    mean, var = torch.zeros(2, 2), torch.ones(2, 2)

    def twice(mean, var, batches):
        return torch.vmap(lambda batch: F.batch_norm(batch, mean, var, training=True))(batches)

    with StackedBatchNorm(), pytest.raises(RuntimeError, match="all clients share"):
        torch.vmap(twice, in_dims=(0, 0, None))(mean, var, batches)
    layer.eval()
    with StackedBatchNorm():
        assert_close([torch.vmap(layer)(batches)], [torch.stack([layer(batch) for batch in batches])])
