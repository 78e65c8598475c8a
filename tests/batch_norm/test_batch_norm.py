"""BN layers, the kinds of their state, and what a method does with each kind."""

import math

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedModule,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.aggregation import Aggregator, Median
from fl_lightning.batch_norm.kinds import buffer_kinds, parameter_kinds
from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.batch_norm.swapping import SwappedBatchNorm, restore_batch_norm, swap_batch_norm
from fl_lightning.callbacks import FBN, FedTAN, FixBN
from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.round.policy import policy_table, resolve_policy
from tests.support.helpers import SGD, blobs, federated_run, fit, small_cnn, train, union_batch

pytestmark = pytest.mark.first_steps

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])


class Nested(nn.Module):
    """BN layers whose names say nothing, and names that say BN without being one."""

    def __init__(self):
        super().__init__()
        self.bn = nn.Linear(4, 4)
        self.first = nn.ModuleDict({"a": nn.BatchNorm1d(4), "b": nn.Sequential(nn.BatchNorm2d(2), nn.ReLU())})
        self.second = nn.SyncBatchNorm(3, affine=False)
        self.third = nn.BatchNorm3d(2, track_running_stats=False)
        self.batch_norm = nn.GroupNorm(2, 4)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scratchpad", torch.zeros(2), persistent=False)


class Counting(nn.Sequential):
    """A model with a non-persistent buffer of its own that changes in training."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64), persistent=False)

    def forward(self, x):
        self.seen = self.seen + x.detach().mean()
        return super().forward(x)


class Declares(FederatedCallback):
    def __init__(self, **policy):
        self.declared = policy

    def policy(self, round_number, total_rounds):
        return self.declared


class Other(Declares):
    pass


class Overwrites(FederatedCallback):
    """Writes a value into one row before the aggregation of a round."""

    def __init__(self, round_number, row, name, value):
        self.round_number, self.row, self.name, self.value = round_number, row, name, value

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if cohort.round == self.round_number:
            {**cohort.params, **cohort.buffers}[self.name][self.row].flatten()[0] = self.value


def test_layers_are_found_by_type_and_never_by_name():
    assert list(batch_norm_layers(Nested())) == ["first.a", "first.b.0", "second", "third"]


def test_resnet18_has_twenty_bn_layers_three_of_them_in_shortcuts():
    with torch.device("meta"):
        layers = batch_norm_layers(resnet18())
    assert len(layers) == 20
    assert sum("downsample" in name for name in layers) == 3


def test_every_parameter_and_buffer_has_its_kind():
    model = Nested()
    kinds = parameter_kinds(model)
    assert {name for name, kind in kinds.items() if kind == "affine"} == {
        f"{layer}.{name}" for layer in ("first.a", "first.b.0", "third") for name in ("weight", "bias")
    }
    assert kinds.keys() == dict(model.named_parameters()).keys()
    assert buffer_kinds(model) == {
        "mean": "buffer",
        "scratchpad": "scratch",
        **{
            f"{layer}.{name}": kind
            for layer in ("first.a", "first.b.0", "second")
            for name, kind in [
                ("running_mean", "mean"),
                ("running_var", "var"),
                ("num_batches_tracked", "counter"),
            ]
        },
    }


def test_parameters_that_are_not_trained_have_no_kind():
    model = small_cnn()
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in parameter_kinds(model)
    start = small_cnn()[0].weight.detach().double()
    assert torch.equal(train(model, blobs(), 2)["0.weight"].detach(), start)


@EXECUTORS
def test_counters_stay_integers_and_are_the_largest_of_the_clients(executor):
    settings = {"local_steps": None, "local_epochs": 1, "executor": executor()}
    state = train(small_cnn(), blobs(sizes=(16, 40, 24)), 3, **settings)
    for layer in (1, 4):
        counter = state[f"{layer}.num_batches_tracked"]
        assert counter.dtype == torch.int64
        assert counter == 15


def test_the_policy_table_tells_when_layers_freeze_one_by_one():
    class ByLayers(FederatedCallback):
        def policy(self, round_number, total_rounds):
            return {part: "frozen" for part, first in (("1", 2), ("4", 3)) if round_number >= first}

    table = policy_table(small_cnn(), [ByLayers()], 5)
    between = "frozen in some layers, averaged"
    assert table["mean"] == table["var"] == [(1, "averaged"), (2, between), (3, "frozen")]
    assert table["affine"] == [(1, "averaged")]


def test_the_policy_table_tells_when_fixbn_freezes():
    averaged, frozen = [(1, "averaged")], [(1, "averaged"), (3, "frozen")]
    both, counter = FixBN(freeze_round=2, freeze="both"), [(1, "max"), (3, "frozen")]
    table = {"weight": averaged, "affine": averaged, "mean": frozen, "var": frozen, "counter": counter}
    assert policy_table(small_cnn(), [FixBN(freeze_round=2)], 5) == table
    assert policy_table(small_cnn(), [both], 5) == {**table, "affine": frozen}
    assert policy_table(small_cnn(), [FixBN(0)], 5)["mean"] == [(1, "frozen")]
    assert policy_table(small_cnn(), [FixBN(5)], 5)["mean"] == averaged
    assert policy_table(small_cnn("gn"), [], 5) == {"weight": averaged}


def test_callbacks_that_contradict_each_other_are_refused_by_name():
    with pytest.raises(ConfigurationError, match="FixBN and Other cannot be combined: one wants mean frozen"):
        train(small_cnn(), blobs(), 2, [FixBN(freeze_round=0), Other(mean="local", var="local")])
    assert resolve_policy([Declares(affine="frozen"), Other(affine="frozen")], 1, 1)["affine"] == "frozen"


@pytest.mark.parametrize("declared", [{"gamma": "frozen"}, {"mean": "kept"}, {"mean": "frozen"}])
def test_an_unknown_or_half_frozen_policy_is_refused(declared):
    with pytest.raises(ConfigurationError, match=r"policy"):
        train(small_cnn(), blobs(), 1, [Declares(**declared)])


def test_a_negative_variance_names_layer_client_and_round():
    with pytest.raises(
        ConfigurationError,
        match=r"round 2: client 1 .* BN layer '4'; .*domain: variance.*Median.*stay_valid: true",
    ):
        train(small_cnn(), blobs(), 3, [Overwrites(2, 1, "4.running_var", -0.5)])


def test_a_negative_variance_that_an_aggregation_rule_makes_is_the_servers():
    class Negative(Aggregator):
        def __call__(self, rows, weights):
            return -rows.abs().amax(0)

    with pytest.raises(
        ConfigurationError, match=r"round 1: the server .* BN layer '1'; .*statistics_domain: log_variance"
    ):
        train(small_cnn(), blobs(), 1, aggregator=Negative())
    train(small_cnn(), blobs(), 1, statistics_aggregator=Negative(), statistics_domain="log_variance")


@pytest.mark.parametrize(
    "settings",
    [
        {"statistics_domain": "variance"},
        {"statistics_domain": "log_variance"},
        {"statistics_aggregator": Median()},
        {"on_divergence": "record"},
    ],
)
def test_what_the_message_of_a_negative_variance_names_works(settings):
    train(small_cnn(), blobs(), 3, [Overwrites(2, 1, "4.running_var", -0.5)], **settings)


@EXECUTORS
def test_a_batch_of_one_value_per_channel_names_the_ways_out(executor):
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with pytest.raises(ConfigurationError, match="a BN layer gets one value per channel") as caught:
        train(model, blobs(batch_size=1), 1, executor=executor())
    assert "batch_size >= 2" in str(caught.value)


@EXECUTORS
def test_non_persistent_buffers_are_never_sent_or_averaged(executor):
    model = Counting(*small_cnn("gn"))
    state = train(model, blobs(), 2, executor=executor())
    assert "seen" not in state
    assert torch.equal(model.seen, torch.zeros(3, dtype=torch.float64))


@EXECUTORS
def test_other_persistent_buffers_are_averaged(executor):
    model = small_cnn("gn")
    model.register_buffer("offset", torch.zeros(1, dtype=torch.float64))
    values = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)

    class Sets(FederatedCallback):
        def on_before_aggregate(self, trainer, pl_module, cohort):
            cohort.buffers["offset"].copy_(values[:, None])

    assert train(model, blobs(), 1, [Sets()], executor=executor())["offset"] == pytest.approx(3.0)


def test_an_update_that_is_not_finite_names_client_and_round():
    with pytest.raises(ConfigurationError, match=r"round 2: the update of client 2 is not finite.*lr"):
        train(small_cnn(), blobs(), 3, [Overwrites(2, 2, "0.weight", math.nan)])
    with pytest.raises(ConfigurationError, match=r"round 1: the update of client 0 is not finite"):
        train(small_cnn(), blobs(), 1, [Overwrites(1, 0, "1.running_mean", math.inf)])


@EXECUTORS
@pytest.mark.parametrize("persistent", [True, False])
def test_a_model_may_hold_infinities_in_buffers_of_its_own(executor, persistent):
    model = small_cnn()
    mask = torch.tensor([0.0, -math.inf])
    model.register_buffer("mask", mask, persistent)
    train(model, blobs(), 2, executor=executor())
    assert torch.equal(model.mask, mask.double())


class Largest(Aggregator):
    """A rule that loses a NaN: what it gives is finite although a client's row is not."""

    def __call__(self, rows, weights):
        return rows.nan_to_num(-math.inf).amax(0)


def test_an_update_that_is_not_finite_is_seen_under_any_aggregation_rule():
    with pytest.raises(ConfigurationError, match=r"round 2: the update of client 2 is not finite"):
        train(small_cnn(), blobs(), 3, [Overwrites(2, 2, "0.weight", math.nan)], aggregator=Largest())


def test_finite_updates_whose_sum_overflows_are_finite():
    huge = torch.finfo(torch.float64).max
    train(small_cnn(), blobs(), 1, [Overwrites(1, row, "1.running_mean", huge) for row in (0, 1)])


def test_recorded_divergence_goes_on_and_flags_the_run():
    module = FederatedModule(small_cnn(), SGD, local_steps=1, on_divergence="record")
    fit(module, blobs(), 3, [Overwrites(2, 2, "0.weight", math.nan)])
    assert module.trainer.current_epoch == 3
    assert module.record.diverged
    sound = federated_run(local_steps=1, on_divergence="record").module
    assert not sound.record.diverged


def test_samples_whose_scores_are_not_finite_count_as_wrong():
    evaluation = ServerEvaluation()
    scores = torch.tensor([[math.nan, 0.0], [1.0, 0.0], [math.inf, 0.0], [0.0, 1.0]])
    evaluation.update(scores, torch.tensor([0, 0, 0, 0]), torch.tensor(1.0))
    assert evaluation.finish()["accuracy"] == 0.25
    assert evaluation.diverged
    evaluation.start()
    evaluation.update(scores[1:2], torch.tensor([0]), torch.tensor(1.0))
    assert evaluation.finish()["accuracy"] == 1.0
    assert not evaluation.diverged


def test_bn_momentum_is_that_of_every_layer():
    state = train(small_cnn(), blobs(), 1, bn_momentum=1.0, centralised=True)
    inputs, _ = union_batch(blobs(), 0)
    first = small_cnn()[0].double()(inputs)
    assert torch.allclose(state["1.running_mean"], first.mean((0, 2, 3)))
    with pytest.raises(ConfigurationError, match="bn_momentum: 0 must be above 0"):
        train(small_cnn(), blobs(), 1, bn_momentum=0)


@pytest.mark.parametrize("treatment", ["local", "pooled", "discarded"])
def test_two_callbacks_cannot_both_carry_out_what_happens_to_a_kind(treatment):
    class First(FederatedCallback):
        def policy(self, round_number, total_rounds):
            return {"mean": treatment}

    class Second(First):
        pass

    assert resolve_policy([First()], 1, 1)["mean"] == treatment
    with pytest.raises(ConfigurationError, match="First and Second cannot be combined"):
        resolve_policy([First(), Second()], 1, 1)


def test_a_policy_that_is_no_mapping_is_named():
    class Forgets(FederatedCallback):
        def policy(self, round_number, total_rounds):
            {"mean": "local"}  # noqa: B018  # without return

    with pytest.raises(
        ConfigurationError, match=r"Forgets.policy\(\) returns None; return a treatment by kind"
    ):
        resolve_policy([Forgets()], 1, 1)


def test_a_fit_that_failed_leaves_no_method_behind():
    class Fails(FederatedCallback):
        def on_round_end(self, trainer, pl_module, cohort):
            raise ArithmeticError

    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    with pytest.raises(ArithmeticError):
        fit(module, blobs(), 1, [FBN(), Fails()])
    fit(module, blobs(), 1, [FedTAN()])
    assert type(module.model[1]) is nn.BatchNorm2d


@pytest.mark.parametrize("method", [FBN, FedTAN])
def test_a_method_does_not_replace_a_forward_pass_that_is_not_torchs(method):
    class BNReLU(nn.BatchNorm2d):
        def forward(self, inputs):
            return super().forward(inputs).relu()

    model = small_cnn()
    model[1] = BNReLU(4)
    with pytest.raises(ConfigurationError, match="BN layer '1' is a BNReLU with a custom forward pass"):
        train(model, blobs(), 1, [method()])


class Scaled(SwappedBatchNorm):
    method, scratch = "Scaled", ("calls",)
    factor: float

    def forward(self, inputs):
        return self.factor * super().forward(inputs)


def test_settings_of_swapped_layers_are_those_of_the_last_swap_until_they_are_restored():
    model, inputs = nn.Sequential(nn.BatchNorm1d(3)).eval(), torch.randn(5, 3)
    before = model(inputs)
    for factor in (2.0, 3.0):
        swap_batch_norm(model, Scaled, factor=factor)
        assert torch.equal(model(inputs), factor * before)
        assert set(dict(model.named_buffers())) >= {"0.calls"}
    restore_batch_norm(model)
    assert type(model[0]) is nn.BatchNorm1d
    assert torch.equal(model(inputs), before)
    assert not hasattr(model[0], "factor")
    assert not hasattr(model[0], "calls")
