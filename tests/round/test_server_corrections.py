"""Corrections at the server: what ``on_after_aggregate`` gets, what it may change, and what ``verify`` says of others."""

from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import FederatedCallback
from fl_lightning.callbacks import FedBN
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.verification import certify
from tests.support.helpers import SaveRounds, blobs, distance, federated_run, small_cnn, train

DECAY = 0.7


class ServerEMA(FederatedCallback):
    """The server is a moving average of the clients' means, statistics too."""

    def on_round_start(self, trainer, pl_module, cohort):
        self.before = {name: value.clone() for name, value in cohort.server_buffers.items()}

    def on_after_aggregate(self, trainer, pl_module, cohort):
        for gradient in cohort.pseudo_gradient.values():
            gradient *= 1 - DECAY
        for name, kind in cohort.buffer_kinds.items():
            if kind in ("mean", "var"):
                cohort.server_buffers[name].lerp_(self.before[name], DECAY)


class Momentum(FederatedCallback):
    """Momentum at the server, kept by the callback."""

    def __init__(self):
        self.sums = {}

    def on_after_aggregate(self, trainer, pl_module, cohort):
        for name, gradient in cohort.pseudo_gradient.items():
            self.sums[name] = 0.9 * self.sums.get(name, torch.zeros_like(gradient)) + gradient
            gradient.copy_(self.sums[name])

    def state_dict(self):
        return {"sums": self.sums}

    def load_state_dict(self, state):
        self.sums = state["sums"]


class AtTheEnd(Momentum):
    """The same, in a hook that is too late."""

    def on_after_aggregate(self, trainer, pl_module, cohort):
        pass

    def on_round_end(self, trainer, pl_module, cohort):
        for name in cohort.names("weight", "affine"):
            parameter = cohort.server_parameters[name]
            self.sums[name] = 0.9 * self.sums.get(name, torch.zeros_like(parameter)) + parameter.grad
            parameter.detach().sub_(self.sums[name] - parameter.grad)


class Unused(nn.Sequential):
    """A network with a layer that its forward pass leaves out."""

    def __init__(self):
        super().__init__(*small_cnn(), nn.Linear(2, 2))

    def forward(self, inputs):
        for layer in [*self][:-1]:
            inputs = layer(inputs)
        return inputs


class NoisySGD(torch.optim.SGD):
    """A server optimizer that draws random numbers."""

    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
        return result


def run(*callbacks, data=None, **settings):
    return federated_run(*callbacks, data=data or blobs(4), **settings)


def test_a_moving_average_at_the_server_is_the_one_by_hand():
    server, clients = (result := run(ServerEMA())).states, result.clients.end
    for number in (1, 2, 3):
        for name, before in server[number - 1].items():
            if before.is_floating_point():
                mean = torch.stack([state[name] for state in clients[number].values()]).mean(0)
                expected = DECAY * before + (1 - DECAY) * mean
                assert torch.allclose(server[number][name], expected, rtol=0, atol=1e-12)


def test_momentum_in_the_hook_is_the_server_optimizers():
    optimizer = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
    assert distance(run(Momentum()).states[-1], run(server_optimizer=optimizer).states[-1]) < 1e-12


def test_parameters_without_a_gradient_at_any_client_can_be_corrected():
    class Shrinks(FederatedCallback):
        def on_after_aggregate(self, trainer, pl_module, cohort):
            assert all(parameter.grad is not None for parameter in pl_module.model.parameters())
            for name, gradient in cohort.pseudo_gradient.items():
                gradient += 0.5 * cohort.server[name]

    start = Unused().double().state_dict()
    trained = train(Unused(), blobs(), 1, [Shrinks()])
    assert torch.allclose(trained["9.weight"], start["9.weight"] / 2, rtol=0, atol=1e-12)


def test_only_averaged_parameters_have_a_pseudo_gradient_whatever_the_policy_was_before():
    seen = []

    class Freezes(FederatedCallback):
        def policy(self, round_number, total_rounds):
            return {"weight": "frozen"} if round_number == 2 else {}

        def on_after_aggregate(self, trainer, pl_module, cohort):
            seen.append(set(cohort.pseudo_gradient))

    run(Freezes())
    run(Freezes(), FedBN(), rounds=1)
    everything = {name for name, _ in small_cnn().named_parameters()}
    affine = {f"{layer}.{part}" for layer in (1, 4) for part in ("weight", "bias")}
    assert seen == [everything, affine, everything, everything - affine]


def test_a_hook_leaves_the_random_numbers_of_a_server_optimizer_as_they_are():
    noisy = partial(NoisySGD, lr=1.0)
    plain, hooked = run(server_optimizer=noisy), run(FederatedCallback(), server_optimizer=noisy)
    assert distance(plain.states[-1], hooked.states[-1]) == 0
    assert distance(plain.states[-1], run().states[-1]) > 1e-3


def test_clients_that_are_left_out_take_no_part_in_the_hook():
    class Breaks(FederatedCallback):
        def on_before_aggregate(self, trainer, pl_module, cohort):
            cohort.params["0.weight"][1] = torch.nan

        def on_after_aggregate(self, trainer, pl_module, cohort):
            assert cohort.client_ids == [0, 2]
            mean = cohort.mean(cohort.params["0.weight"])
            assert torch.equal(cohort.pseudo_gradient["0.weight"][0], cohort.server["0.weight"] - mean)

    run(Breaks(), data=blobs(3), on_divergence="drop")


def test_a_run_resumes_exactly_and_two_ranks_are_one(tmp_path):
    whole = run(Momentum(), SaveRounds(tmp_path), participation=2, rounds=4).states[-1]
    resumed = run(Momentum(), participation=2, rounds=4, ckpt_path=tmp_path / "2.ckpt").states[-1]
    ranks = {"devices": 2, "strategy": CohortStrategy()}
    shared = run(Momentum(), participation=2, rounds=4, trainer=ranks).states[-1]
    assert distance(whole, resumed) == distance(whole, shared) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("right", "rounds"), [(Momentum, 3), (ServerEMA, 4)])
def test_verify_accepts_a_correction_in_its_hook(right, rounds):
    certificate = certify(right, references=False)
    assert not certificate.failed
    (server,) = (finding for finding in certificate.rules if finding.line == "server state")
    assert server.detail.endswith(f"corrected by on_after_aggregate in {rounds} rounds")


@pytest.mark.slow
def test_verify_sends_any_other_correction_to_the_hook():
    failed = {finding.line: finding.detail for finding in certify(AtTheEnd, references=False).failed}
    assert "only on_after_aggregate may correct the server" in failed["server state"]
    assert "method-server.md#a-correction-at-the-server" in failed["server state"]


def test_bytes_are_those_of_a_run_without_a_correction():
    for name in ("comm/upload_bytes", "comm/download_bytes"):
        assert run(Momentum()).module.metrics[name] == run().module.metrics[name]
