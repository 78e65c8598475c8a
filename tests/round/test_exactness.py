"""FedAvg against ordinary PyTorch on the same batches."""

from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import SequentialExecutor, VectorizedExecutor
from fl_lightning.optimizers.client_lr import MultiStep
from tests.support.helpers import SGD, blobs, by_hand, centralised, distance, small_cnn, train

DECAYED = partial(torch.optim.SGD, lr=0.1, weight_decay=0.05)
# The bias of a convolution before BN has gradient zero up to rounding: Adam's default eps would blow the rounding up.
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])


def cumulative_cnn():
    """A model whose BN layers keep cumulative averages, which depend on the counter."""
    model = small_cnn("bn")
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
    return model


@EXECUTORS
@pytest.mark.parametrize("norm", ["gn", "none"])
def test_one_local_step_without_bn_equals_centralised_sgd_on_the_union_batch(executor, norm):
    federated = train(
        small_cnn(norm),
        blobs(),
        5,
        client_optimizer=DECAYED,
        client_lr_schedule=MultiStep([2, 0.8], 0.1),
        executor=executor(),
    )
    rates = [0.1, 0.1, 0.01, 0.01, 0.001]
    assert distance(federated, centralised(small_cnn(norm), blobs(), 5, DECAYED, rates)) < 1e-10


def test_one_local_step_of_unequal_clients_equals_centralised_sgd_with_uniform_weights():
    sizes = {"sizes": (16, 40, 64)}
    federated = train(small_cnn("gn"), blobs(**sizes), 4, weighting="uniform")
    central = centralised(small_cnn("gn"), blobs(**sizes), 4)
    assert distance(federated, central) < 1e-10
    assert distance(train(small_cnn("gn"), blobs(**sizes), 4), central) > 1e-3


def test_one_local_step_with_bn_differs_from_centralised_sgd():
    federated, central = train(small_cnn("bn"), blobs(), 2), centralised(small_cnn("bn"), blobs(), 2)
    weights = [name for name, _ in small_cnn("bn").named_parameters()]
    assert distance({n: federated[n] for n in weights}, {n: central[n] for n in weights}) > 1e-3


def test_several_local_steps_differ_from_centralised_sgd():
    federated = train(small_cnn("gn"), blobs(), 2, local_steps=2)
    assert distance(federated, centralised(small_cnn("gn"), blobs(), 4)) > 1e-3


@EXECUTORS
@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01), ADAMW]
)
def test_one_client_equals_plain_training_with_bn_and_a_fresh_optimizer_each_round(
    executor, local_steps, optimizer
):
    federated = train(
        small_cnn("bn"), blobs(1), 3, client_optimizer=optimizer, local_steps=local_steps, executor=executor()
    )
    plain, _ = by_hand(small_cnn("bn"), blobs(1), 3, optimizer=optimizer, steps=[local_steps])
    assert distance(federated, plain) < 1e-10
    assert federated["1.num_batches_tracked"] == 3 * local_steps


@EXECUTORS
@pytest.mark.parametrize("local_steps", [1, 3])
def test_one_client_equals_plain_training_with_cumulative_statistics(executor, local_steps):
    federated = train(cumulative_cnn(), blobs(1), 3, local_steps=local_steps, executor=executor())
    plain, _ = by_hand(cumulative_cnn(), blobs(1), 3, steps=[local_steps])
    assert distance(federated, plain) < 1e-10


@EXECUTORS
def test_several_clients_equal_separate_models_averaged_by_hand(executor):
    federated = train(small_cnn("bn"), blobs(), 3, local_steps=3, executor=executor())
    assert distance(federated, by_hand(small_cnn("bn"), blobs(), 3, steps=[3, 3, 3])[0]) < 1e-10


def test_the_initial_model_is_the_one_that_was_given():
    model = small_cnn("bn")
    before = {name: value.clone().double() for name, value in model.state_dict().items()}
    still = train(model, blobs(), 1, client_optimizer=partial(SGD.func, lr=0.0))
    weights = [name for name, _ in model.named_parameters()]
    assert distance({n: still[n] for n in weights}, {n: before[n] for n in weights}) < 1e-15
