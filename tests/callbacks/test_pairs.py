"""Which methods may be combined: allowed pairs keep the contract, all others are refused with a reason before they train.

A method's kind is what it does to a round: it observes; it keeps state local, fixed (frozen or discarded) or averaged; or it
declares no policy, and changes gradients or something else of a round. In CI each method trains with a partner of each kind
that it may be combined with; the other pairs are nightly.
"""

from functools import cache
from itertools import combinations

import pytest
import torch

from fl_lightning import (
    ConfigurationError,
    FederatedModule,
    SequentialExecutor,
    VectorizedExecutor,
    callbacks,
)
from tests.support.contract import MOMENTUM, SHIPPED, contents, declare_rates, model_for
from tests.support.helpers import SGD, SaveRounds, blobs, distance, federated_run, fit, small_cnn

SETTINGS = {name: cls.examples[-1] for name, cls in SHIPPED.items()}
"""What shows most of a method in a few rounds."""
BEFORE_NOISE_AT_THE_SERVER = (
    "AdaBN", "AggregationDiagnostics", "BatchNormDiagnostics", "BatchRenormalization", "ClassifierBias", "ClientEvaluation",
    "ClientGradientClipping", "CommunicationLedger", "FedBABU", "FedProx", "FixBN", "GradientInversion",
    "LabelInference", "ParticipationGap", "StatisticsSources",
)  # fmt: skip
"""What reads no update at the server but to measure it."""
COMPANIONS = {
    "AdaBN",
    "AggregationDiagnostics",
    "BatchNormDiagnostics",
    "Byzantine",
    "ClassifierBias",
    "ClientEvaluation",
    "ClientGradientClipping",
    "CommunicationLedger",
    "FedBABU",
    "FedDyn",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "GradientInversion",
    "LabelInference",
    "MaintainedMomentum",
    "ParticipationGap",
    "SCAFFOLD",
}
REFUSED = {
    *(frozenset(pair) for pair in combinations(("MaintainedMomentum", "FedNova", "FedTAN"), 2)),
    *(
        frozenset(pair)
        for pair in combinations(("BNSCAFFOLD", "FedDyn", "FedNova", "FedProx", "SCAFFOLD"), 2)
    ),
    *(frozenset(pair) for pair in combinations(("FedBABU", "FedPer", "FedRep"), 2)),
    *(frozenset({"FedRep", other}) for other in ("FedNova", "FedTAN", "MaintainedMomentum")),
    *(frozenset({"FedBABU", other}) for other in ("FedBN", "MTFL", "SiloBN")),
    # without Batch Normalization, and without values beside the update
    *(
        frozenset({"PrivateSGD", other})
        for other in ("AdaBN", "BatchNormDiagnostics", "MaintainedMomentum", "SCAFFOLD")
    ),
    *(frozenset({"PrivateSGD", other}) for other in SETTINGS if other not in COMPANIONS),
    *(frozenset({"PrivateFedAvg", other}) for other in SETTINGS if other not in BEFORE_NOISE_AT_THE_SERVER),
}
BESIDE_AFFINE = (
    "FBN", "FedDNA", "FedExFixBN", "FedTAN", "MomentMatching", "SiloBN", "SlidingWindowFixBN", "StaticBN", "StatisticsSources",
)  # fmt: skip
BESIDE_OWN_BATCHES = (
    "FedBN", "FedDNA", "FixBN", "MTFL", "MomentMatching", "SiloBN", "SlidingWindowFixBN", "StaticBN",
)  # fmt: skip
ALLOWED = {
    *(frozenset({one, other}) for one in COMPANIONS for other in SETTINGS if one != other),
    frozenset({"FedTAN", "StatisticsSources"}),
    *(frozenset({"MTFL", other}) for other in BESIDE_AFFINE),
    frozenset({"HybridBN", "MTFL"}),
    *(frozenset({"BNSCAFFOLD", other}) for other in (*BESIDE_OWN_BATCHES, "StatisticsSources")),
    *(frozenset({"BatchRenormalization", other}) for other in BESIDE_OWN_BATCHES),
    *(frozenset({"PrivateFedAvg", other}) for other in BEFORE_NOISE_AT_THE_SERVER),
} - REFUSED
"""What changes a client's step goes with every method, but for momentum that one keeps, restarts or counts on, two remedies of
client drift at once, and two treatments of the head; statistics of any averaged kind; gamma and beta beside any statistics."""
PAIRS = [frozenset(pair) for pair in combinations(sorted(SETTINGS), 2)]
KINDS = {
    "local": "local",
    "frozen": "fixed",
    "discarded": "fixed",
    "averaged": "averaged",
    "pooled": "averaged",
}


def ids(pair):
    return "+".join(sorted(pair))


@cache
def kind(name):
    method = SHIPPED[name](**SETTINGS[name])
    if method.role == "observer":
        return "observer"
    treatments = {treatment for number in (1, 2, 3) for treatment in method.policy(number, 3).values()}
    kinds = [kind for treatment, kind in KINDS.items() if treatment in treatments]
    return kinds[0] if kinds else "gradients" if "on_after_local_backward" in vars(type(method)) else "other"


def covers(pair):
    one, other = sorted(pair)
    return {(one, kind(other)), (other, kind(one))}


def covering():
    """Add pair after pair: the first that adds most combinations of a method and a kind of partner."""
    pairs, chosen = sorted(ALLOWED, key=ids), []
    missing = set().union(*map(covers, pairs))
    while missing:
        chosen.append(max(pairs, key=lambda pair: len(covers(pair) & missing)))
        missing -= covers(chosen[-1])
    return chosen


IN_CI = covering()


def rows():
    for pair in sorted(ALLOWED, key=ids):
        yield pytest.param(pair, id=ids(pair), marks=() if pair in IN_CI else pytest.mark.nightly)


def methods(pair):
    """The methods of a pair; clipping comes after FedRep, and the gap after methods with models of the clients."""
    order = sorted(pair, key=lambda name: (name in ("ClientGradientClipping", "ParticipationGap"), name))
    return [getattr(callbacks, name)(**SETTINGS[name]) for name in order]


def run(*callbacks, **settings):
    data, chosen = (
        blobs(3, (24, 40, 32)),
        next((x for x in callbacks[:2] if getattr(x, "per_sample", False)), callbacks[0]),
    )
    usual = {"model": model_for(chosen, data), "client_optimizer": MOMENTUM, "participation": 2}
    needs = {name: value for method in callbacks[:2] for name, value in getattr(method, "needs", {}).items()}
    return federated_run(*callbacks, data=data, **usual, **needs, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*rows()])
def test_an_allowed_pair_trains_resumes_exactly_and_runs_alike_under_both_executors(pair, tmp_path):
    sequential = run(*methods(pair), executor=SequentialExecutor()).states
    vectorized = run(*methods(pair), SaveRounds(tmp_path), executor=VectorizedExecutor()).states
    for first, second in zip(sequential, vectorized, strict=True):
        assert distance(first, second) < 1e-10
    whole = contents(tmp_path / "3.ckpt")
    run(*methods(pair), SaveRounds(tmp_path), ckpt_path=tmp_path / "2.ckpt", executor=VectorizedExecutor())
    resumed = contents(tmp_path / "3.ckpt")
    assert whole.keys() == resumed.keys()
    for place, leaf in whole.items():
        assert torch.equal(leaf, resumed[place]) if torch.is_tensor(leaf) else leaf == resumed[place]


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in ALLOWED], ids=ids)
def test_any_other_pair_is_refused_with_a_reason_before_the_first_round(pair):
    module = FederatedModule(small_cnn(), SGD, local_steps=2)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    declare_rates(data := blobs())
    for order in (1, -1):
        with pytest.raises(ConfigurationError) as refusal:
            fit(module, data, 4, methods(pair)[::order])
        reasons = ("cannot be combined", "restart_momentum", "normalises with its batch in round 1")
        assert any(reason in str(refusal.value) for reason in reasons)
        assert "\n" not in str(refusal.value)
    assert distance({n: v.double() for n, v in module.state_dict().items()}, start) == 0


def test_every_pair_is_either_allowed_or_refused():
    assert set(PAIRS) >= ALLOWED


def test_each_method_trains_in_ci_with_a_partner_of_each_kind_that_it_may_have():
    for name in SETTINGS:
        partners, trained = (
            {kind(*pair - {name}) for pair in pairs if name in pair} for pairs in (ALLOWED, IN_CI)
        )
        assert trained == partners, name
    assert len({kind(name) for name in SETTINGS}) == 6
    assert len(IN_CI) < len(ALLOWED) / 3
