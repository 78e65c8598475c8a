"""Maintained momentum: section 7 of Zhong et al., arXiv 2303.06530."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedCallback, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FedBN, FixBN, MaintainedMomentum
from fl_lightning.cohort.rows import parameter_groups
from fl_lightning.optimizers.client_lr import MultiStep
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import blobs, by_hand, centralised, distance, federated_run, small_cnn, train

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.02)
NESTEROV = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.02, nesterov=True)
# The bias of a convolution before BN has gradient zero up to rounding: Adam's default eps would blow the rounding up.
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
SCOPES = pytest.mark.parametrize("scope", ["local", "global"])


def run(model, data, rounds, *callbacks, **settings):
    """The server's final state after training with momentum."""
    return train(model, data, rounds, callbacks, **{"client_optimizer": MOMENTUM, **settings})


def model_with_statistics():
    """BN with statistics and affine parameters that are not those of a fresh layer."""
    model = small_cnn("bn")
    generator = torch.Generator().manual_seed(3)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(generator=generator)
            layer.running_var.uniform_(0.5, 4, generator=generator)
            nn.init.uniform_(layer.weight, 0.5, 2, generator=generator)
    return model


def flat(states, model, key, block):
    """One client's optimizer state in plain PyTorch, as the vector of a block."""
    blocks = parameter_groups(model, {})
    names = [name for name, _ in model.named_parameters()]
    parts = [states["state"][i][key].flatten() for i, name in enumerate(names) if blocks[name] == block]
    return torch.cat(parts)


@SCOPES
@EXECUTORS
@pytest.mark.parametrize("optimizer", [MOMENTUM, NESTEROV])
def test_one_local_step_equals_centralised_momentum_sgd(scope, executor, optimizer):
    federated = run(
        small_cnn("gn"),
        blobs(),
        5,
        MaintainedMomentum(scope),
        client_optimizer=optimizer,
        client_lr_schedule=MultiStep([2, 4], 0.1),
        executor=executor(),
    )
    rates = [0.05, 0.05, 0.005, 0.005, 0.0005]
    assert distance(federated, centralised(small_cnn("gn"), blobs(), 5, optimizer, rates)) < 1e-10


@SCOPES
@EXECUTORS
def test_one_local_step_in_stage_two_of_fixbn_equals_centralised_momentum_sgd(scope, executor):
    federated = run(
        model_with_statistics(),
        blobs(),
        5,
        FixBN(freeze_round=0),
        MaintainedMomentum(scope),
        client_lr_schedule=MultiStep([3], 0.1),
        executor=executor(),
    )
    rates = [0.05, 0.05, 0.05, 0.005, 0.005]
    central = centralised(model_with_statistics(), blobs(), 5, MOMENTUM, rates, frozen_statistics=True)
    assert distance(federated, central) < 1e-10


def test_momentum_that_is_reset_each_round_does_nothing_with_one_local_step():
    reset = run(small_cnn("gn"), blobs(), 4)
    without = partial(torch.optim.SGD, lr=0.05, weight_decay=0.02)
    assert distance(reset, run(small_cnn("gn"), blobs(), 4, client_optimizer=without)) == 0
    assert distance(reset, centralised(small_cnn("gn"), blobs(), 4, MOMENTUM)) > 1e-3


def test_local_and_global_momentum_differ_with_two_local_steps():
    local = run(small_cnn("gn"), blobs(), 3, MaintainedMomentum("local"), local_steps=2)
    average = run(small_cnn("gn"), blobs(), 3, MaintainedMomentum("global"), local_steps=2)
    assert distance(local, average) > 1e-4


def test_global_momentum_starts_every_client_from_the_average():
    callback = MaintainedMomentum("global")
    run(small_cnn("gn"), blobs(sizes=(40, 80, 120)), 1, callback, local_steps=2)
    _, memory = by_hand(small_cnn("gn"), blobs(sizes=(40, 80, 120)), 1, optimizer=MOMENTUM, steps=[2] * 3)
    clients = [flat(memory[i], small_cnn("gn"), "momentum_buffer", "weights") for i in range(3)]
    average = (clients[0] + 2 * clients[1] + 3 * clients[2]) / 6
    assert float((callback.memory[-1]["momentum_buffer/weights"] - average).abs().max()) < 1e-10


@SCOPES
@EXECUTORS
@pytest.mark.parametrize("local_steps", [1, 3])
def test_one_client_equals_centralised_momentum_sgd_for_any_number_of_local_steps(
    scope, executor, local_steps
):
    federated = run(
        small_cnn("bn"), blobs(1), 3, MaintainedMomentum(scope), local_steps=local_steps, executor=executor()
    )
    central = centralised(small_cnn("bn"), blobs(1), 3 * local_steps, MOMENTUM)
    assert distance(federated, central) < 1e-10


@EXECUTORS
@pytest.mark.parametrize(
    ("optimizer", "keys"), [(MOMENTUM, ["momentum_buffer"]), (ADAM, ["exp_avg", "exp_avg_sq"])]
)
def test_each_client_keeps_its_own_state_with_partial_participation_and_uneven_local_epochs(
    executor, optimizer, keys
):
    sizes = (16, 24, 40, 32)
    callback = MaintainedMomentum("local")
    settings = {"participation": 2, "local_steps": None, "local_epochs": 1, "seed": 1, "executor": executor()}
    federated = run(small_cnn("bn"), blobs(4, sizes), 6, callback, client_optimizer=optimizer, **settings)
    reference, memory = by_hand(
        small_cnn("bn"),
        blobs(4, sizes),
        6,
        optimizer=optimizer,
        steps=[size // 8 for size in sizes],
        cohort=partial(sample_cohort, 4, 2, 1),
        weights=sizes,
        keep=True,
    )
    assert distance(federated, reference) < 1e-10
    assert sorted(callback.memory) == sorted(memory)
    for client, states in memory.items():
        for key in keys:
            for block in ("weights", "batch_norm"):
                by_itself = flat(states, small_cnn("bn"), key, block)
                assert float((callback.memory[client][f"{key}/{block}"] - by_itself).abs().max()) < 1e-10
        if optimizer is ADAM:
            assert callback.memory[client]["steps"] == states["state"][0]["step"]
    counts = {int(kept["steps"]) for kept in callback.memory.values()}
    assert len(counts) > 1


def test_adam_step_counts_start_from_zero_without_maintained_state():
    fresh = run(small_cnn("bn"), blobs(), 3, client_optimizer=ADAM)
    assert distance(fresh, by_hand(small_cnn("bn"), blobs(), 3, optimizer=ADAM)[0]) < 1e-10
    kept = run(small_cnn("bn"), blobs(), 3, MaintainedMomentum(), client_optimizer=ADAM)
    assert distance(kept, by_hand(small_cnn("bn"), blobs(), 3, optimizer=ADAM, keep=True)[0]) < 1e-10
    assert distance(fresh, kept) > 1e-3


def test_the_memory_of_absent_clients_is_untouched_bitwise():
    seen = []

    class Watched(MaintainedMomentum):
        def on_round_end(self, trainer, pl_module, cohort):
            copy = {c: {k: v.clone() for k, v in kept.items()} for c, kept in self.memory.items()}
            seen.append((set(cohort.client_ids), copy))

    run(small_cnn("gn"), blobs(4), 6, Watched("local"), participation=2, local_steps=2)
    changes = 0
    for (_, before), (present, after) in pairwise(seen):
        for client, kept in before.items():
            equal = all(torch.equal(value, after[client][key]) for key, value in kept.items())
            assert equal == (client not in present)
            changes += not equal
    assert changes > 0


def test_a_client_optimizer_without_state_is_refused():
    plain = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match="set momentum > 0"):
        run(small_cnn("gn"), blobs(), 1, MaintainedMomentum(), client_optimizer=plain)


def test_adagrad_is_kept_from_its_initial_accumulator_on():
    adagrad = partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)
    settings = {"client_optimizer": adagrad, "participation": 2, "local_steps": 2}
    kept = run(small_cnn("gn"), blobs(), 4, MaintainedMomentum(), **settings)
    cohort = partial(sample_cohort, 3, 2, 0)
    reference, _ = by_hand(
        small_cnn("gn"), blobs(), 4, optimizer=adagrad, steps=[2] * 3, cohort=cohort, keep=True
    )
    assert distance(kept, reference) < 1e-10


@pytest.mark.parametrize("optimizer", [torch.optim.Rprop, torch.optim.NAdam])
def test_state_that_does_not_start_from_zero_is_refused(optimizer):
    with pytest.raises(ConfigurationError, match="cannot be kept across rounds"):
        run(small_cnn("gn"), blobs(), 1, MaintainedMomentum(), client_optimizer=partial(optimizer, lr=0.1))


def test_an_unknown_scope_is_named():
    with pytest.raises(ConfigurationError, match="'both' must be one of local, global"):
        MaintainedMomentum("both")


def test_global_momentum_of_parameters_that_clients_keep_stays_with_them():
    """Nothing of FedBN's gamma and beta reaches another client, and nothing of their momentum is sent."""
    method = MaintainedMomentum("global")
    module = federated_run(FedBN(), method, client_optimizer=MOMENTUM, local_steps=1).module
    weights = sum(p.numel() for p in module.parameters()) - 2 * (4 + 6)
    assert module.metrics["comm/upload_bytes"] == 3 * 8 * 2 * weights
    assert [key for key in method.memory[-1] if "batch_norm" in key] == []
    own = [method.memory[client]["momentum_buffer/batch_norm"] for client in range(3)]
    assert not torch.equal(own[0], own[1])
    assert [int(method.memory[client]["steps"]) for client in (-1, 0, 1, 2)] == [3] * 4


class FirstSteps(FederatedCallback):
    """How far gamma moves in the first local step of each newcomer."""

    def __init__(self):
        self.changes, self.seen = {}, set()

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        if step == 0:
            for row, client in enumerate(cohort.client_ids):
                if client not in self.seen and cohort.round > 1:
                    moved = cohort.params["1.weight"][row] - 1  # where a newcomer starts
                    self.changes[client] = float(moved.abs().max())
                self.seen.add(client)


def test_parameters_of_its_own_that_a_newcomer_trains_take_adams_first_step_with_global_moments():
    adam = partial(torch.optim.Adam, lr=0.01, eps=1e-30)
    watch = FirstSteps()
    settings = {"client_optimizer": adam, "participation": 2}
    run(small_cnn(), blobs(6, sizes=(40,) * 6), 6, FedBN(), MaintainedMomentum("global"), watch, **settings)
    assert len(watch.changes) >= 3
    # a first step is lr * sign(gradient): moments of zero and their correction begin together
    assert list(watch.changes.values()) == pytest.approx([0.01] * len(watch.changes), rel=1e-6)
