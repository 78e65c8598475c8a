"""Per-client clipping is PyTorch's own on every client's model."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from fl_lightning import ConfigurationError, FederatedCallback, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import ClientGradientClipping, FedProx, FixBN
from tests.support.helpers import blobs, client_batch, distance, small_cnn, train

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
INFINITY = float("inf")
SIZES = (16, 24, 40)
STEPS = (2, 3, 5)


def run(*callbacks, rounds=3, **settings):
    settings = {"local_steps": None, "local_epochs": 1, **settings}
    return train(small_cnn(), blobs(sizes=SIZES), rounds, callbacks, **settings)


def clipped(rounds, clip, mu=0.0, freeze_round=None):
    """Separate models; ``clip`` changes a model's gradients, ``mu`` is that of a proximal term, BN freezes after a round."""
    model, data = deepcopy(small_cnn()).double().train(), blobs(sizes=SIZES)
    for number in range(rounds):
        for layer in model.modules():
            if number == freeze_round and isinstance(layer, torch.nn.BatchNorm2d):
                layer.eval().requires_grad_(False)
        states = []
        for client in range(3):
            local = deepcopy(model)
            stepper = torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=0.1)
            for step in range(STEPS[client]):
                inputs, targets = client_batch(data, client, number * STEPS[client] + step)
                stepper.zero_grad()
                pairs = zip(local.parameters(), model.parameters(), strict=True)
                apart = sum((mine - server.detach()).square().sum() for mine, server in pairs)
                (cross_entropy(local(inputs), targets) + mu / 2 * apart).backward()
                clip(local.parameters())
                stepper.step()
            states.append(local.state_dict())
        for name, old in model.state_dict().items():
            held = torch.stack([state[name] for state in states])
            shares = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
            old.copy_(torch.tensordot(shares, held, 1) if old.is_floating_point() else held.amax(0))
    return model.state_dict()


class OneNormForAll(ClientGradientClipping):
    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        rows = torch.cat(list(cohort.grads.blocks.values()), 1)
        scale = (self.max_norm / rows.norm(self.norm)).clamp(max=1)
        for block in cohort.grads.blocks.values():
            block *= scale


class EachBlockByItself(ClientGradientClipping):
    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for block in cohort.grads.blocks.values():
            block *= (self.max_norm / (block.norm(self.norm, dim=1, keepdim=True) + 1e-6)).clamp(max=1)


@EXECUTORS
@pytest.mark.parametrize(("max_norm", "norm"), [(2.0, 2.0), (5.0, 1.0), (0.5, INFINITY)])
def test_it_equals_clip_grad_norm_on_each_clients_own_model(max_norm, norm, executor):
    reference = clipped(3, lambda parameters: clip_grad_norm_(parameters, max_norm, norm))
    assert distance(run(ClientGradientClipping(max_norm, norm), executor=executor()), reference) < 1e-10
    assert distance(run(executor=executor()), reference) > 1e-3
    for mutant in (OneNormForAll, EachBlockByItself) if norm == 2.0 else ():
        assert distance(run(mutant(max_norm, norm)), reference) > 1e-4


@EXECUTORS
def test_an_infinite_norm_changes_nothing_bit_for_bit(executor):
    unclipped = run(executor=executor())
    assert distance(run(ClientGradientClipping(INFINITY), executor=executor()), unclipped) == 0
    assert distance(run(ClientGradientClipping(1e9), executor=executor()), unclipped) == 0


def test_norms_are_at_most_the_largest_and_clients_that_have_finished_are_left_alone():
    seen = []

    class Before(FederatedCallback):
        def on_after_local_backward(self, trainer, pl_module, cohort, step):
            for block in cohort.grads.blocks.values():
                block[~cohort.active] = 7.0

    class After(FederatedCallback):
        def on_after_local_backward(self, trainer, pl_module, cohort, step):
            rows = torch.cat(list(cohort.grads.blocks.values()), 1)
            assert bool((rows[~cohort.active] == 7.0).all())
            seen.extend(rows[cohort.active].norm(dim=1).tolist())

    run(Before(), ClientGradientClipping(2.0), After())
    assert len(seen) == 3 * sum(STEPS)
    assert max(seen) <= 2.0
    assert 0 < sum(norm < 1.99 for norm in seen) < len(seen)


def test_parameters_that_are_not_trained_any_more_do_not_count():
    method = FixBN(freeze_round=1, freeze="both")
    reference = clipped(3, partial(clip_grad_norm_, max_norm=0.5), freeze_round=1)
    assert distance(run(method, ClientGradientClipping(0.5)), reference) < 1e-10


def test_after_fedprox_in_the_list_it_bounds_the_whole_gradient_before_it_the_clients_own_part():
    whole = clipped(3, partial(clip_grad_norm_, max_norm=0.3), mu=5.0)
    after = run(FedProx(5.0), ClientGradientClipping(0.3))
    before = run(ClientGradientClipping(0.3), FedProx(5.0))
    assert distance(after, whole) < 1e-10
    assert distance(before, whole) > 1e-4


@pytest.mark.parametrize(
    ("settings", "named"), [({"max_norm": 0}, "max_norm: 0"), ({"max_norm": 1.0, "norm": -2}, "norm: -2")]
)
def test_a_setting_out_of_range_is_named(settings, named):
    with pytest.raises(ConfigurationError, match=rf"ClientGradientClipping\.{named} must be above 0"):
        ClientGradientClipping(**settings)


def adaptively(parameters, every_layer=False, whole=False, least=1e-3, norm=2.0):
    """Adaptive clipping with l = 0.05 of one model's gradients, unit by unit."""
    parameters = [*parameters]
    for parameter in parameters if every_layer else parameters[:-2]:
        units = [parameter] if whole or parameter.dim() < 2 else [*parameter]
        grads = [parameter.grad] if whole or parameter.dim() < 2 else [*parameter.grad]
        for unit, gradient in zip(units, grads, strict=True):
            limit = 0.05 * max(unit.detach().norm(norm), torch.tensor(least))
            if gradient.norm(norm) > limit:
                gradient *= limit / gradient.norm(norm)


@EXECUTORS
@pytest.mark.parametrize("norm", [2.0, 1.0, INFINITY])
def test_adaptive_clipping_equals_the_formula_unit_by_unit_on_each_clients_own_model(executor, norm):
    found = run(ClientGradientClipping(0.05, norm, adaptive=True), executor=executor())
    assert distance(found, clipped(3, partial(adaptively, norm=norm))) < 1e-10
    for mutant in ({"every_layer": True}, {"whole": True}, {"least": 1.0}, {"norm": 3.0}):
        assert distance(found, clipped(3, partial(adaptively, **{"norm": norm, **mutant}))) > 1e-4
