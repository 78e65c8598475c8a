"""FixBN: Algorithm 1 and Table H of Zhong et al., arXiv 2303.06530."""

from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FixBN
from tests.support.helpers import (
    SGD,
    SaveRounds,
    States,
    blobs,
    by_hand,
    centralised,
    distance,
    fit,
    small_cnn,
    train,
)

STATISTICS = [
    f"{layer}.{name}" for layer in (1, 4) for name in ("running_mean", "running_var", "num_batches_tracked")
]
AFFINE = [f"{layer}.{name}" for layer in (1, 4) for name in ("weight", "bias")]
DECAYED = partial(torch.optim.SGD, lr=0.1, weight_decay=0.05)
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])


class Affine(nn.Module):
    """BN with running mean 0 and variance 1, written out."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.scale = (1 + eps) ** -0.5

    def forward(self, x):
        return x * (self.scale * self.weight).view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def states(rounds, *callbacks, **settings):
    """The server's state after rounds 0, 1, ..., ``rounds``."""
    recorder = States()
    train(small_cnn("bn"), blobs(), rounds, [recorder, *callbacks], **settings)
    return recorder.states


def same(first, second, names):
    return [name for name in names if torch.equal(first[name], second[name])]


@EXECUTORS
def test_stage_two_equals_centralised_sgd_with_bn_frozen_at_the_statistics_of_t_star(executor):
    history = states(6, FixBN(freeze_round=2), client_optimizer=DECAYED, executor=executor())
    model = small_cnn("bn").double()
    model.load_state_dict(history[2])
    central = centralised(model, blobs(), 4, DECAYED, first=2, frozen_statistics=True)
    assert distance(history[6], central) < 1e-10
    assert distance(history[6], centralised(model, blobs(), 4, DECAYED, first=2)) > 1e-3


@EXECUTORS
@pytest.mark.parametrize("freeze", ["statistics", "both"])
def test_statistics_are_bitwise_constant_after_t_star(executor, freeze):
    history = states(5, FixBN(freeze_round=2, freeze=freeze), local_steps=2, executor=executor())
    for state in history[3:]:
        assert same(state, history[2], STATISTICS) == STATISTICS


def test_round_t_star_still_changes_the_statistics_and_the_next_one_does_not():
    history = states(4, FixBN(freeze_round=3))
    for r in (1, 2, 3):
        assert same(history[r], history[r - 1], STATISTICS) == []
    assert same(history[4], history[3], STATISTICS) == STATISTICS
    assert distance(history[4], history[3]) > 1e-3


@pytest.mark.parametrize(
    ("fraction", "rounds", "t_star"),
    [(0.5, 640, 320), (0.5, 5, 2), (0.29, 100, 29), (0.9, 100, 90), (1.0, 7, 7), (0.0, 7, 0), (0.99, 10, 9)],
)
def test_t_star_is_the_floor_of_the_fraction_of_the_rounds(fraction, rounds, t_star):
    callback = FixBN(freeze_round=fraction)
    assert ["frozen" in callback.policy(r, rounds).values() for r in range(1, rounds + 1)] == [
        r > t_star for r in range(1, rounds + 1)
    ]


def test_t_star_is_half_of_the_rounds_by_default():
    history = states(5, FixBN())
    assert same(history[2], history[1], STATISTICS) == []
    assert same(history[3], history[2], STATISTICS) == STATISTICS


def test_t_star_at_the_last_round_is_fedavg_bitwise():
    fixed = states(4, FixBN(freeze_round=4), local_steps=2)[-1]
    plain = states(4, local_steps=2)[-1]
    assert same(fixed, plain, fixed) == list(fixed)


def test_both_stages_are_equal_up_to_t_star():
    fixed, plain = states(4, FixBN(freeze_round=2)), states(4)
    assert same(fixed[2], plain[2], plain[2]) == list(plain[2])
    assert distance(fixed[3], plain[3]) > 1e-3


@EXECUTORS
def test_t_star_zero_makes_bn_an_affine_layer(executor):
    affine = small_cnn("bn")
    affine[1], affine[4] = Affine(4), Affine(6)
    frozen = states(3, FixBN(freeze_round=0), local_steps=3, executor=executor())[-1]
    reference, _ = by_hand(affine, blobs(), 3, steps=[3, 3, 3])
    assert distance(reference, frozen) < 1e-10
    assert all(torch.equal(frozen[f"{i}.running_mean"], torch.zeros(4 + i // 2).double()) for i in (1, 4))


@EXECUTORS
@pytest.mark.parametrize("freeze", ["affine", "both"])
def test_frozen_gamma_and_beta_are_bitwise_constant_and_no_weight_decay_touches_them(executor, freeze):
    history = states(
        4,
        FixBN(freeze_round=2, freeze=freeze),
        local_steps=2,
        client_optimizer=DECAYED,
        server_optimizer=partial(torch.optim.SGD, lr=1.0, momentum=0.9, weight_decay=0.05),
        executor=executor(),
    )
    assert same(history[2], history[1], AFFINE) == []
    for state in history[3:]:
        assert same(state, history[2], AFFINE) == AFFINE
        assert not torch.equal(state["0.weight"], history[2]["0.weight"])


@pytest.mark.parametrize(
    ("freeze", "frozen", "learning"),
    [("statistics", STATISTICS, AFFINE), ("affine", AFFINE, STATISTICS), ("both", STATISTICS + AFFINE, [])],
)
def test_each_row_of_table_h_freezes_exactly_what_it_says(freeze, frozen, learning):
    history = states(3, FixBN(freeze_round=2, freeze=freeze))
    assert same(history[3], history[2], frozen) == frozen
    assert same(history[3], history[2], learning) == []


@EXECUTORS
def test_frozen_affine_parameters_with_batch_statistics_equal_a_bn_without_learning(executor):
    settings = {"local_steps": 3, "client_optimizer": DECAYED, "executor": executor()}
    history = states(3, FixBN(freeze_round=0, freeze="affine"), **settings)
    model = small_cnn("bn")
    for name in AFFINE:
        model.get_parameter(name).requires_grad_(False)
    reference, _ = by_hand(model, blobs(), 3, optimizer=DECAYED, steps=[3] * 3)
    assert distance(history[-1], reference) < 1e-10


@pytest.mark.filterwarnings("ignore:Found 2 module.s. in eval mode")
def test_bn_is_back_in_train_mode_when_a_frozen_model_is_trained_again():
    model = small_cnn("bn")
    train(model, blobs(), 1, [FixBN(freeze_round=0)])
    before = model[1].running_mean.clone()
    train(model, blobs(), 1)
    assert not torch.equal(before, model[1].running_mean)


def test_t_star_stays_where_it_was_planned_when_a_run_goes_on_longer(tmp_path):
    states(4, FixBN(), SaveRounds(tmp_path))
    module = FederatedModule(small_cnn("bn"), SGD, local_steps=1)
    recorder = States()
    fit(module, blobs(), 9, [FixBN(), recorder], tmp_path / "1.ckpt")
    assert module.planned_rounds == 4
    assert same(recorder.states[1], recorder.states[0], STATISTICS) == []
    for state in recorder.states[2:]:
        assert same(state, recorder.states[1], STATISTICS) == STATISTICS


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"freeze_round": -1}, "freeze_round: -1"),
        ({"freeze_round": 1.5}, "freeze_round: 1.5"),
        ({"freeze": "gamma"}, "'gamma'"),
    ],
)
def test_settings_out_of_range_are_named(settings, named):
    with pytest.raises(ConfigurationError, match=named):
        FixBN(**settings)


def test_a_model_without_bn_is_refused():
    with pytest.raises(ConfigurationError, match="no Batch Normalization layer"):
        train(small_cnn("gn"), blobs(), 1, [FixBN()])


@pytest.mark.parametrize("shift", [-1, 1])
def test_freezing_one_round_early_or_late_is_another_algorithm(shift):
    class Shifted(FixBN):
        def last_batch_round(self, total_rounds):
            return super().last_batch_round(total_rounds) + shift

    right, wrong = states(4, FixBN(freeze_round=2)), states(4, Shifted(freeze_round=2))
    assert same(right[2], right[1], STATISTICS) == []
    assert same(right[3], right[2], STATISTICS) == STATISTICS
    assert (same(wrong[2], wrong[1], STATISTICS), same(wrong[3], wrong[2], STATISTICS)) != ([], STATISTICS)
    assert distance(right[4], wrong[4]) > 1e-3
