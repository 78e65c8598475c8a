"""A robust aggregator covers all that a method's clients send: one bad client of five does no harm by another way."""

from functools import partial

import pytest
import torch
from helpers import blobs, small_cnn, train

from callbacks import SCAFFOLD, FedDNA, FedTAN, MaintainedMomentum, MomentMatching
from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.aggregation import GeometricMedian, Krum, Median, WeightedMean
from fl_lightning.cohort.cohort import SERVER

CLIENTS = {"num_clients": 5, "sizes": (40,) * 5}
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
RULES = [Median(), GeometricMedian(), Krum(1)]


class BadClient(FederatedCallback):
    """Client 0 sends enormous momenta, gradients and statistics; keeps what all clients send."""

    def __init__(self, *what):
        self.what = what

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        if "gradients" in self.what:
            for block in cohort.grads.blocks.values():
                block[0] = 1e6

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if "momenta" in self.what:
            for block in cohort.optimizer_state("momentum_buffer").blocks.values():
                block[0] = 1e6
        for rows in cohort.params.values():
            rows[0] = 1e6 if "gradients" in self.what else rows[0]
        if "statistics" in self.what:
            for name, kind in cohort.buffer_kinds.items():
                if kind in ("mean", "var"):
                    cohort.buffers[name][0] = 1e6


def largest(tensors):
    return max(float(tensor.abs().max()) for tensor in tensors)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_kept_global_momentum_is_the_rules(rule):
    method = MaintainedMomentum("global")
    trained = train(
        small_cnn("gn"),
        blobs(**CLIENTS),
        3,
        [BadClient("momenta"), method],
        aggregator=rule,
        local_steps=2,
        client_optimizer=MOMENTUM,
    )
    assert largest(method.memory[SERVER].values()) < 10
    assert largest(trained.values()) < 10


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_scaffolds_c_is_the_rules(rule):
    method = SCAFFOLD()
    trained = train(small_cnn("gn"), blobs(**CLIENTS), 3, [BadClient("gradients"), method], aggregator=rule)
    assert largest(method.memory[SERVER].values()) < 10
    assert largest(trained.values()) < 10
    assert largest(method.memory[0].values()) == 1e6  # its own is its own


def test_matched_moments_are_the_rules():
    trained = train(
        small_cnn(), blobs(**CLIENTS), 3, [BadClient("statistics"), MomentMatching()], aggregator=Median()
    )
    assert largest(trained.values()) < 10


@pytest.mark.parametrize("method", [FedDNA, FedTAN])
def test_a_method_whose_sums_a_rule_cannot_reach_is_refused_with_it(method):
    name = method.__name__
    with pytest.raises(
        ConfigurationError,
        match=f"model.(statistics_)?aggregator: Median cannot protect {name}, which .*; use WeightedMean",
    ):
        train(small_cnn(), blobs(**CLIENTS), 1, [method()], aggregator=Median())
    train(small_cnn(), blobs(**CLIENTS), 1, [method()], aggregator=WeightedMean(), local_steps=1)
