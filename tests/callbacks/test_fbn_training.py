"""What training with FBN equals: Guerraoui et al., arXiv 2405.14670."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_lightning import SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FBN, FixBN, MaintainedMomentum
from tests.support.helpers import (
    SGD,
    States,
    blobs,
    distance,
    plain_step,
    small_cnn,
    train,
    uneven_clients,
    union_batch,
)

MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.02)
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
WIRES = pytest.mark.parametrize("wire", ["run", "batch"])
EQUAL, UNEQUAL = (8, 8, 8), (3, 7, 12)


def one_machine(model, data, rounds, optimizer=SGD):
    """Plain PyTorch on the union batch, normalised with the running statistics of the steps before."""
    model = deepcopy(model).double().eval()
    inputs = {}
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args[0].detach()}))
    stepper = optimizer(model.parameters())
    for step in range(rounds):
        plain_step(model, stepper, union_batch(data, step))
        for layer in layers:
            layer.train()(inputs[layer])
            layer.eval()
    return model.state_dict()


@EXECUTORS
@WIRES
def test_many_clients_equal_one_machine_that_normalises_with_running_statistics(wire, executor):
    methods = [FBN(wire), MaintainedMomentum()]
    settings = {"client_optimizer": MOMENTUM, "executor": executor()}
    federated = train(small_cnn(), blobs(), 12, methods, **settings)
    assert distance(federated, one_machine(small_cnn(), blobs(), 12, MOMENTUM)) < 1e-10
    methods = [FBN(wire), MaintainedMomentum()]
    twin = train(small_cnn(), blobs(), 12, methods, **settings, centralised=True)
    assert distance(federated, twin) < 1e-10


@WIRES
@pytest.mark.parametrize(
    "settings",
    [{"participation": 2}, {"batches": UNEQUAL}, {"bn_momentum": 1.0}],
    ids=["partial participation", "unequal batches", "momentum 1"],
)
def test_any_round_equals_one_client_with_the_union_batch(wire, settings):
    settings = {"client_optimizer": partial(torch.optim.SGD, lr=0.01), "weighting": "samples", **settings}
    data = uneven_clients(settings.pop("batches", EQUAL))
    federated = train(small_cnn(), data, 10, [FBN(wire)], **settings)
    assert (
        distance(federated, train(small_cnn(), data, 10, [FBN(wire)], **settings, centralised=True)) < 1e-10
    )


def test_training_is_not_that_of_batch_norm_on_one_machine():
    shared, ordinary = States(), States()
    train(small_cnn(), blobs(), 3, [FBN(), shared])
    train(small_cnn(), blobs(), 3, [ordinary], centralised=True)
    assert distance(shared.states[3], ordinary.states[3]) > 1e-2
    first = [f"1.{name}" for name in ("running_mean", "running_var")]
    assert distance(*({name: s.states[1][name] for name in first} for s in (shared, ordinary))) < 1e-10
    later = [f"4.{name}" for name in ("running_mean", "running_var")]
    assert distance(*({name: s.states[1][name] for name in later} for s in (shared, ordinary))) > 1e-2


def with_statistics():
    """A network with BN statistics that are not those of a fresh layer."""
    model = small_cnn()
    generator = torch.Generator().manual_seed(3)
    for layer in (model[1], model[4]):
        layer.running_mean.normal_(generator=generator)
        layer.running_var.uniform_(0.5, 4, generator=generator)
    return model


@EXECUTORS
@pytest.mark.parametrize("model", [small_cnn, with_statistics], ids=["fresh", "statistics"])
@pytest.mark.parametrize(
    "work", [{"local_steps": 1}, {"local_steps": 3}, {"local_steps": None, "local_epochs": 1}]
)
def test_a_round_trains_as_with_frozen_statistics(executor, model, work):
    settings = {**work, "executor": executor()}
    data = blobs(sizes=(16, 24, 40))
    shared = train(model(), data, 1, [FBN()], **settings)
    frozen = train(model(), data, 1, [FixBN(freeze_round=0)], **settings)
    parameters = [name for name, _ in model().named_parameters()]
    assert distance({name: shared[name] for name in parameters}, frozen) < 1e-10


@pytest.mark.parametrize("batches", [EQUAL, UNEQUAL])
def test_the_mean_gradient_is_that_of_the_union_loss_of_the_evaluated_network(batches):
    data, model = uneven_clients(batches), with_statistics()
    after = train(deepcopy(model), data, 1, [FBN()], weighting="samples")
    model.double().eval()
    inputs, targets = union_batch(data, 0)
    loss = cross_entropy(model(inputs), targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for (name, before), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert float((before - 0.1 * gradient - after[name]).detach().abs().max()) < 1e-10
