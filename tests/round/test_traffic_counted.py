"""What a method says that it sends is what flows: counted at the tensors, where no method is asked."""

from copy import deepcopy
from functools import partial

import pytest
import torch

import fl_lightning.callbacks.fedtan
from fl_lightning import FederatedCallback
from fl_lightning.batch_norm.joint import cohort_mean
from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.callbacks import (
    FBN,
    SCAFFOLD,
    FedBN,
    FedDNA,
    FedProx,
    FedTAN,
    FixBN,
    MaintainedMomentum,
    MomentMatching,
    SiloBN,
    StaticBN,
)
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import SGD, Received, SaveRounds, blobs, federated_run

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
EVALUATED = {"check_val_every_n_epoch": 2, "limit_val_batches": 1.0}
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)
STATISTICS = 20
"""Floats of running statistics of ``small_cnn``, two layers with 4 and 6 channels."""
KINDS = {"weight": "weights", "affine": "BN gamma, beta", "mean": "BN statistics", "var": "BN statistics"}


class Noise(FederatedCallback):
    """Lets every float of a client change in every round; stands first, so that methods send what has noise on it.

    Args:
        other: Whether the first client of round 3 gets other noise than usual.
    """

    def __init__(self, other):
        self.other = other

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self._add(cohort, cohort.grads)

    def on_before_aggregate(self, trainer, pl_module, cohort):
        kept = [name for name, kind in cohort.buffer_kinds.items() if kind in ("mean", "var")]
        self._add(cohort, {name: cohort.buffers[name] for name in kept})

    def _add(self, cohort, tensors):
        for stacked in tensors.values():
            stacked += 0.01 * torch.rand_like(stacked)  # seeded for this hook, round and step
            if self.other and cohort.round == 3:
                stacked[0] += 0.01 * torch.rand_like(stacked[0])


class Witness(FederatedCallback):
    """What the server holds after every round, and what the first client starts from."""

    def __init__(self, method):
        self.method, self.state, self.memory, self.start = method, {}, {}, {}

    def on_round_start(self, trainer, pl_module, cohort):
        self.start[cohort.round] = deepcopy(cohort.params.row(0) | cohort.buffers.row(0))

    def on_train_epoch_end(self, trainer, pl_module):
        round_number = pl_module.round
        self.state[round_number] = deepcopy(pl_module.state_dict())
        memory = self.method.state_dict().get("memory", {}).get(-1, {})
        self.memory[round_number] = deepcopy({n: t for n, t in memory.items() if t.is_floating_point()})
        cohort = pl_module._cohort
        self.treatments = cohort.policy
        self.kinds = {**cohort.parameter_kinds, **cohort.buffer_kinds}
        self.communication = pl_module.communication


def run(make, optimizer=MOMENTUM, other=False):
    """A witness of three rounds of a method."""
    method = make()
    witness = Witness(method)
    federated_run(Noise(other), method, witness, client_optimizer=optimizer)
    return witness


def differing(first, second):
    """How many floats differ."""
    return int((first != second).sum())


def uploaded(make, optimizer=MOMENTUM):
    """Floats of a client that reach the server in round 3, by kind: those that other noise at the client changes."""
    usual, other = run(make, optimizer), run(make, optimizer, other=True)
    found = {}
    for name, kind in usual.kinds.items():
        # the server's copy of what clients keep is only evaluated
        if kind in KINDS and usual.treatments[kind] != "local":
            count = differing(usual.state[3][name], other.state[3][name])
            found[KINDS[kind]] = found.get(KINDS[kind], 0) + count
    extra = sum(differing(value, other.memory[3][name]) for name, value in usual.memory[3].items())
    found[type(usual.method).__name__] = extra
    return {kind: count for kind, count in found.items() if count}, usual.communication


def downloaded(make, optimizer=MOMENTUM):
    """Floats that are new at the server after round 2 and that the client has in round 3, by kind."""
    seen = run(make, optimizer)
    found = {}
    for name, kind in seen.kinds.items():
        if kind in KINDS:
            new, start = seen.state[2][name], seen.start[3][name]
            count = int(((new != seen.state[1][name]) & (new == start)).sum())
            found[KINDS[kind]] = found.get(KINDS[kind], 0) + count
    extra = sum(differing(value, seen.memory[1][name]) for name, value in seen.memory[2].items())
    found[type(seen.method).__name__] = extra
    return {kind: count for kind, count in found.items() if count}, seen.communication


METHODS = {
    "FedAvg": (FederatedCallback, SGD),
    "FixBN, stage I": (lambda: FixBN(freeze_round=3), SGD),
    "FixBN, stage II": (lambda: FixBN(freeze_round=1), SGD),
    "FixBN, gamma and beta": (lambda: FixBN(freeze_round=0, freeze="both"), SGD),
    "FBN": (FBN, SGD),
    "FBN, batch": (lambda: FBN(wire="batch"), SGD),
    "SiloBN": (SiloBN, SGD),
    "FedBN": (FedBN, SGD),
    "FedDNA": (FedDNA, SGD),
    "MomentMatching": (MomentMatching, SGD),
    "FedProx": (lambda: FedProx(0.1), SGD),
    "SCAFFOLD": (SCAFFOLD, SGD),
    "momentum, local": (lambda: MaintainedMomentum("local"), MOMENTUM),
    "momentum, global": (lambda: MaintainedMomentum("global"), MOMENTUM),
    "moments of Adam, global": (lambda: MaintainedMomentum("global"), ADAM),
}
EVERY_METHOD = pytest.mark.parametrize("name", METHODS)


def of_a_client(traffic):
    """What each client sends and receives, by kind."""
    for clients in traffic.sent.values():
        assert len({*clients.values()}) == 1
    return {kind: next(iter(clients.values())) for kind, clients in traffic.sent.items()}


@EVERY_METHOD
def test_a_client_sends_the_floats_that_the_server_depends_on(name):
    counted, traffic = uploaded(*METHODS[name])
    assert counted == {kind: up // 8 for kind, (up, _) in of_a_client(traffic).items()}


@EVERY_METHOD
def test_a_client_receives_the_floats_of_the_server_that_are_new(name):
    counted, traffic = downloaded(*METHODS[name])
    assert counted == {kind: down // 8 for kind, (_, down) in of_a_client(traffic).items()}


class Rewrites(FederatedCallback):
    """Lets the server set state that clients do not send."""

    def __init__(self, *names):
        self.names = names

    def policy(self, round_number, total_rounds):
        return dict.fromkeys(self.names, "discarded")

    def on_round_end(self, trainer, pl_module, cohort):
        state = cohort.server_parameters | cohort.server_buffers
        for name, treatment in cohort.treatments.items():
            if treatment == "discarded" and state[name].is_floating_point():
                state[name].detach().copy_(torch.rand_like(state[name]))


@pytest.mark.parametrize(
    ("names", "floats"),
    [
        (["mean", "var", "counter"], STATISTICS),
        (["var"], STATISTICS / 2),
        (["affine"], STATISTICS),
        (["last layer"], 3 * 24 + 3),
    ],
)
def test_reset_state_that_the_server_sets_is_received_and_not_sent(names, floats):
    counted, traffic = downloaded(lambda: Rewrites(*names), SGD)
    pairs = {kind: pair for kind, pair in of_a_client(traffic).items() if kind in KINDS.values()}
    assert counted == {kind: down // 8 for kind, (_, down) in pairs.items()}
    assert sum(down - up for up, down in pairs.values()) == 8 * floats


def test_the_statistics_that_a_pass_of_static_bn_measures_are_received_with_the_weights():
    received = {}

    class Beside(FederatedCallback):
        def on_train_epoch_end(self, trainer, pl_module):
            pairs = pl_module.communication.sent.get("BN statistics", {})
            received[pl_module.round] = {*pairs.values()}

    federated_run(StaticBN("per_client"), Beside(), rounds=5, trainer=EVALUATED)
    once = {(0, 8 * STATISTICS)}
    assert received == {1: once, 2: set(), 3: once, 4: set(), 5: once}


def test_reset_state_is_received_once_by_each_client_after_each_change(tmp_path):
    """It changes after round 4; two of five clients take part in a round."""

    class Seldom(Rewrites):
        def on_round_end(self, trainer, pl_module, cohort):
            if cohort.round == 4:
                super().on_round_end(trainer, pl_module, cohort)

    def train(ckpt_path=None):
        received = Received()
        callbacks = [Seldom("mean", "var"), received, SaveRounds(tmp_path)]
        federated_run(*callbacks, data=data, rounds=8, participation=2, ckpt_path=ckpt_path)
        return received.received

    data = partial(blobs, 5, sizes=(40,) * 5)
    cohorts = [set(sample_cohort(5, 2, 0, number)) for number in range(1, 9)]
    known = [set().union(*cohorts[place // 4 * 4 : place]) for place in range(8)]
    new = [len(cohort - clients) for cohort, clients in zip(cohorts, known, strict=True)]
    rounds = train()
    assert [down - up for up, down in rounds] == [8 * STATISTICS * number for number in new]
    assert train(tmp_path / "5.ckpt") == rounds[5:]


def test_a_method_that_sends_more_than_it_says_is_found():
    class Silent(SCAFFOLD):
        def extra_payload(self, cohort):
            return 0, 0

    for counted, traffic in (uploaded(Silent, SGD), downloaded(Silent, SGD)):
        assert counted["Silent"] > 100
        assert "Silent" not in traffic.sent


def test_a_method_that_sends_what_it_calls_frozen_is_found():
    class Frozen(FixBN):
        def on_round_end(self, trainer, pl_module, cohort):
            for name, kind in cohort.buffer_kinds.items():
                if kind == "mean":
                    cohort.server_buffers[name].copy_(cohort.mean(cohort.buffers[name]))

    counted, traffic = uploaded(lambda: Frozen(freeze_round=1), SGD)
    assert counted["BN statistics"] == STATISTICS / 2
    assert not any(up for up, _ in traffic.sent.get("BN statistics", {}).values())


def count_exchanges(monkeypatch, **settings):
    """Tensors and floats that a client of FedTAN exchanges in one round: (forward, backward), each (tensors, floats)."""
    forward, backward = [], []

    class Counted(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(mean):
            return mean.clone()

        @staticmethod
        def setup_context(context, inputs, output):
            pass

        @staticmethod
        def backward(context, gradient):
            backward.append(gradient.numel())
            return gradient

    def counted_mean(own, clients):
        forward.append(own.numel())
        return Counted.apply(cohort_mean(own, clients))

    monkeypatch.setattr(fl_lightning.callbacks.fedtan, "cohort_mean", counted_mean)
    module = federated_run(FedTAN(**settings), rounds=1).module
    layers = len(batch_norm_layers(module.model))
    return (len(forward), sum(forward)), (len(backward), sum(backward)), layers, module.communication


def test_fedtan_exchanges_in_the_forward_and_the_backward_pass_what_it_says(monkeypatch):
    forward, backward, layers, traffic = count_exchanges(monkeypatch)
    assert forward == (2 * layers, STATISTICS)
    assert backward == (2 * layers, STATISTICS)
    # the gradients of a layer's mean and variance are known together and go in one message
    assert traffic.exchanges == 1 + forward[0] + backward[0] // 2 == 3 * layers + 1
    assert of_a_client(traffic)["FedTAN"] == (8 * (forward[1] + backward[1]),) * 2


@pytest.mark.parametrize("backward", ["own", "none"])
def test_the_forward_only_form_exchanges_nothing_in_the_backward_pass(backward, monkeypatch):
    forward, back, layers, traffic = count_exchanges(monkeypatch, backward=backward)
    assert forward == (2 * layers, STATISTICS)
    assert back == (0, 0)
    assert traffic.exchanges == 1 + forward[0] == 2 * layers + 1
    assert of_a_client(traffic)["FedTAN"] == (8 * forward[1],) * 2
