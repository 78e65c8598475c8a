"""Loss terms of layers: their gradients under every executor, the reported loss, and where they are ignored or refused."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    SequentialExecutor,
    SwappedBatchNorm,
    VectorizedExecutor,
    add_loss,
    measured_statistics,
    swap_batch_norm,
)
from fl_lightning.callbacks import FedTAN
from fl_lightning.execution import compiling
from fl_lightning.execution.strategy import CohortStrategy
from tests.support.helpers import blobs, client_batch, distance, federated_run, small_cnn, train

pytestmark = pytest.mark.first_steps

EXECUTORS = pytest.mark.parametrize(
    "executor", [SequentialExecutor, VectorizedExecutor, lambda: VectorizedExecutor(2)]
)
LAM = 0.3


def penalty(inputs, mean, variance, eps=1e-5):
    """KL divergence of the batch's moments from the running statistics."""
    values = inputs.transpose(0, 1).flatten(1)
    u, s, v = values.mean(1), values.var(1, correction=0) + eps, variance + eps
    return 0.5 * ((v / s).log() + (s + (u - mean) ** 2) / v - 1).mean()


class PenalisedNorm(SwappedBatchNorm):
    method, lam = "Penalty", LAM

    def forward(self, inputs):
        if self.training and self.lam:
            before = self.running_mean.detach().clone(), self.running_var.detach().clone()
            add_loss(self.lam * penalty(inputs, *before))
        return super().forward(inputs)


class Penalty(FederatedCallback):
    layer = PenalisedNorm

    def configure_batch_norm(self, pl_module):
        swap_batch_norm(pl_module.model, self.layer)


class Weightless(Penalty):
    layer = type("Weightless", (PenalisedNorm,), {"lam": 0.0})


class CentredNorm(SwappedBatchNorm):
    method = "Centred"

    def forward(self, inputs):
        if self.training:
            add_loss(0.1 * inputs.transpose(0, 1).flatten(1).mean(1).square().sum())
        return super().forward(inputs)


class Centred(Penalty):
    layer = CentredNorm


class Sparse(nn.Module):
    """A layer of a model of one's own that penalises its activations."""

    def forward(self, inputs):
        add_loss(0.1 * inputs.abs().mean())
        return inputs


def sparse():
    return nn.Sequential(*small_cnn(), Sparse())


def by_hand(rounds, lam=LAM, clients=3, steps=2):
    """Separate models whose loss has the penalties, in plain PyTorch; returns the state and the mean task loss."""
    model, data, task = small_cnn().double().train(), blobs(clients), 0.0
    for number in range(rounds):
        states, task = [], 0.0
        for client in range(clients):
            local = deepcopy(model)
            stepper = torch.optim.SGD(local.parameters(), lr=0.1)
            for step in range(steps):
                inputs, targets = client_batch(data, client, number * steps + step)
                terms, hidden = 0.0, inputs
                for place, layer in enumerate(local):
                    if place in (1, 4):
                        before = layer.running_mean.clone(), layer.running_var.clone()
                        terms = terms + penalty(hidden, *before)
                    hidden = layer(hidden)
                loss = cross_entropy(hidden, targets)
                task += float(loss.detach()) / (clients * steps)
                stepper.zero_grad()
                (loss + lam * terms).backward()
                stepper.step()
            states.append(local.state_dict())
        for name, old in model.state_dict().items():
            held = torch.stack([state[name] for state in states])
            old.copy_(held.mean(0) if old.is_floating_point() else held.amax(0))
    return model.state_dict(), task


@EXECUTORS
def test_the_term_is_differentiated_and_the_reported_loss_is_the_tasks(executor):
    result = federated_run(Penalty(), executor=executor())
    state, task = by_hand(3)
    assert distance(result.states[-1], state) < 1e-10
    assert result.rows[3]["train/loss"] == pytest.approx(task, rel=1e-6)
    assert distance(result.states[-1], by_hand(3, lam=0.0)[0]) > 1e-3


@EXECUTORS
def test_a_term_in_a_module_of_ones_own_equals_one_in_the_loss(executor):
    terms = train(sparse(), blobs(), 2, executor=executor(), local_steps=3)

    def loss(outputs, targets):
        return cross_entropy(outputs, targets) + 0.1 * outputs.abs().mean()

    assert distance(terms, train(small_cnn(), blobs(), 2, loss=loss, local_steps=3)) < 1e-12
    assert distance(terms, train(small_cnn(), blobs(), 2, local_steps=3)) > 1e-4


@pytest.mark.slow
def test_compiled_passes_have_the_terms(monkeypatch):
    monkeypatch.setattr(compiling, "_trouble", lambda: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for model, callbacks in ((small_cnn, [Centred]), (sparse, [])):
        eager, compiled = (
            train(
                model(), blobs(), 2, [make() for make in callbacks], local_steps=2,
                executor=SequentialExecutor(compile=compiles),
            )
            for compiles in (False, True)
        )  # fmt: skip
        assert distance(eager, compiled) < 1e-10
        assert distance(eager, train(small_cnn(), blobs(), 2, local_steps=2)) > 1e-4


def test_no_term_is_the_plain_run_bit_for_bit():
    assert distance(federated_run(Weightless()).states[-1], federated_run().states[-1]) == 0


def test_two_ranks_are_one():
    ranks = {"devices": 2, "strategy": CohortStrategy()}
    assert (
        distance(federated_run(Penalty()).states[-1], federated_run(Penalty(), trainer=ranks).states[-1]) == 0
    )


def test_terms_are_ignored_in_evaluations_and_passes_over_the_data():
    class Passes(FederatedCallback):
        def on_round_end(self, trainer, pl_module, cohort):
            measured_statistics(trainer, pl_module, "pooled")

    evaluated = federated_run(Passes(), model=sparse, trainer={"limit_val_batches": None})
    assert distance(evaluated.states[-1], federated_run(model=sparse).states[-1]) == 0


def test_a_term_that_is_no_scalar_is_named():
    class Wrong(nn.Module):
        def forward(self, inputs):
            add_loss(inputs.mean(0))
            return inputs

    with pytest.raises(ConfigurationError, match=r"add_loss: a term of the shape \[3\] is no scalar"):
        federated_run(model=nn.Sequential(*small_cnn(), Wrong()))


def test_a_joint_step_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"add_loss: the joint forward pass of FedTAN .* cannot have"
    ):
        federated_run(FedTAN(), model=sparse, weighting="uniform")
