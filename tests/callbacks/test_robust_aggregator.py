"""A robust aggregator covers all that a method's clients send: one bad client of five does no harm by another way."""

from functools import partial

import pytest
import torch

from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.aggregation import (
    NNM,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
    WeightedMean,
)
from fl_lightning.callbacks import SCAFFOLD, FedDNA, FedTAN, MaintainedMomentum, MomentMatching
from fl_lightning.cohort.cohort import SERVER
from tests.support.helpers import blobs, distance, small_cnn, train

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
    settings = {"aggregator": rule, "local_steps": 2, "client_optimizer": MOMENTUM}
    trained = train(small_cnn("gn"), blobs(**CLIENTS), 3, [BadClient("momenta"), method], **settings)
    assert largest(method.memory[SERVER].values()) < 10
    assert largest(trained.values()) < 10


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_scaffolds_c_is_the_rules(rule):
    method = SCAFFOLD()
    trained = train(small_cnn("gn"), blobs(**CLIENTS), 3, [BadClient("gradients"), method], aggregator=rule)
    assert largest(method.memory[SERVER].values()) < 10
    assert largest(trained.values()) < 10
    assert largest(method.memory[0].values()) == 1e6  # its own is its own


class Ends(FederatedCallback):
    """Keeps the optimizer's state that the clients of the last round end with."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.params = cohort.params
        self.states = {
            f"{key}/{block}": rows.clone()
            for key in cohort.optimizer_state_keys
            for block, rows in cohort.optimizer_state(key).blocks.items()
        }


def by_layer(params, rows, rule):
    """The aggregate of rows by a name that ends with the block's, each layer a vector of its own."""
    found = {name: torch.full_like(own[0], torch.nan) for name, own in rows.items()}
    for parts in params.columns_by_layer(params.blocks).values():
        places = [
            (name, columns) for name in rows for block, columns in parts if name.rpartition("/")[2] == block
        ]
        vectors = [rows[name][:, columns] for name, columns in places]
        whole = rule(torch.cat(vectors, 1), torch.full((len(vectors[0]),), 1 / len(vectors[0])))
        for (name, columns), piece in zip(places, whole.split([x.shape[1] for x in vectors]), strict=True):
            found[name][columns] = piece
    return found


def test_a_rule_of_each_layer_takes_scaffolds_c_and_kept_momentum_layer_by_layer():
    rule, ends, scaffold = Krum(1, per="layer"), Ends(), SCAFFOLD()
    train(small_cnn(), blobs(**CLIENTS), 1, [scaffold, ends], aggregator=rule, local_steps=2)
    own = {block: torch.stack([scaffold.memory[i][block] for i in range(5)]) for block in ends.params.blocks}
    c = {block: scaffold.memory[SERVER][block] for block in own}
    assert distance(by_layer(ends.params, own, rule), c) < 1e-12
    chosen = {(own[block] == c[block]).all(1).any().item() for block in own}
    assert chosen != {True}  # or the rule chose one client for all layers

    for optimizer in (MOMENTUM, partial(torch.optim.Adam, lr=0.01)):
        momentum = MaintainedMomentum("global")
        settings = {"aggregator": rule, "local_steps": 2, "client_optimizer": optimizer}
        train(small_cnn(), blobs(**CLIENTS), 1, [momentum, ends], **settings)
        held = {name: momentum.memory[SERVER][name] for name in ends.states}
        assert distance(by_layer(ends.params, ends.states, rule), held) < 1e-12


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


class Masked(torch.nn.Module):
    """A network with a constant mask of infinities and a buffer that each forward pass changes."""

    def __init__(self):
        super().__init__()
        self.network = small_cnn(classes=4)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, images):
        self.largest.copy_(torch.maximum(self.largest, images.detach().amax()))
        return self.network(images) + self.mask


@pytest.mark.parametrize(
    "rule",
    [TrimmedMean(1), MultiKrum(1), GeometricMedian(), CenteredClipping(9.0), Median(f=1, pre=NNM())],
    ids=lambda rule: type(rule).__name__,
)
def test_a_mask_of_infinities_stays_under_a_rule(rule):
    trained = train(Masked(), blobs(**CLIENTS), 2, aggregator=rule)
    assert trained["mask"].tolist() == [0, 0, 0, -torch.inf]
    assert 1 < trained["largest"] < 30
