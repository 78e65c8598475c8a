"""FBN: Algorithm 2 of Guerraoui et al., arXiv 2405.14670."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.aggregation import Aggregator, Median
from fl_lightning.attacks import NonFinite
from fl_lightning.callbacks import FBN, Byzantine, FedPer, FedRep, FixBN
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import (
    SGD,
    States,
    blobs,
    distance,
    fit,
    small_cnn,
    train,
    uneven_clients,
    union_of,
)

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
WIRES = pytest.mark.parametrize("wire", ["run", "batch"])
EQUAL, UNEQUAL = (8, 8, 8), (3, 7, 12)
BATCHES = pytest.mark.parametrize("batches", [EQUAL, UNEQUAL], ids=["equal", "unequal"])


def norm_first(layer=None):
    """A network whose BN layer sees the data themselves, whatever the weights are."""
    torch.manual_seed(0)
    return nn.Sequential(layer or nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))


def norm_first_1d():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72), nn.Linear(72, 3))


class CalledTwice(nn.Sequential):
    """A network that calls its first layer a second time, on the same inputs."""

    def forward(self, inputs):
        self[0](inputs)
        return super().forward(inputs)


def statistics(states, layer=0):
    """Running mean and variance of a layer after each round."""
    return [(state[f"{layer}.running_mean"], state[f"{layer}.running_var"]) for state in states.states[1:]]


def deviation(method, batches=UNEQUAL, model=norm_first, layer=0, rounds=4, calls=1, **settings):
    """How far a run's statistics get from those of PyTorch's BN on the concatenated batches of each round."""
    data, states = uneven_clients(batches), States()
    start = model()
    twin = deepcopy(start[layer]).double().train()
    settings = {"client_optimizer": partial(torch.optim.SGD, lr=1e-3), **settings}
    train(start, data, rounds, [method, states], **settings)
    size, worst = settings.get("participation", 3), 0.0
    for number, found in enumerate(statistics(states, layer), 1):
        clients = sample_cohort(3, size, 0, number)
        inputs, _ = union_of(data, clients, [[number - 1]] * len(clients))
        inputs = inputs.flatten(1) if isinstance(twin, nn.BatchNorm1d) else inputs
        for _ in range(calls):
            twin(torch.cat([inputs] * calls))
        pairs = zip(found, (twin.running_mean, twin.running_var), strict=True)
        worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
    return worst


@WIRES
@BATCHES
@pytest.mark.parametrize(
    ("model", "layer"),
    [(norm_first, 0), (norm_first_1d, 1), (lambda: norm_first(nn.BatchNorm2d(2, momentum=0.5)), 0)],
    ids=["2d", "1d", "2d-momentum-0.5"],
)
def test_statistics_are_those_of_batch_norm_on_the_concatenated_batches(wire, batches, model, layer):
    assert deviation(FBN(wire), batches, model, layer) < 1e-10


@EXECUTORS
@WIRES
def test_each_call_of_a_layer_counts_as_a_step(wire, executor):
    settings = {"batches": EQUAL, "model": lambda: CalledTwice(*norm_first()), "executor": executor()}
    assert deviation(FBN(wire), calls=2, **settings) < 1e-10


@WIRES
def test_statistics_are_those_of_the_sampled_clients_batches(wire):
    assert deviation(FBN(wire), participation=2, rounds=8) < 1e-10


@EXECUTORS
@WIRES
def test_with_momentum_one_the_statistics_are_those_of_the_last_union_batch(wire, executor):
    data, states = uneven_clients(), States()
    train(norm_first(), data, 3, [FBN(wire), states], bn_momentum=1.0, executor=executor())
    for step, (mean, variance) in enumerate(statistics(states)):
        inputs, _ = union_of(data, range(3), [[step]] * 3)
        assert float((mean - inputs.mean((0, 2, 3))).abs().max()) < 1e-10
        assert float((variance - inputs.transpose(0, 1).flatten(1).var(1)).abs().max()) < 1e-10


class OwnCount(FBN):
    """K/(K-1) where the paper has N/(N-1)."""

    def _layers(self, model, cohort):
        for layer in super()._layers(model, cohort):
            own = float(layer.clients.count.mean())
            layer.unbias = own / (own - 1)
            yield layer


class WithoutCorrection(FBN):
    """Line 10 without its second term."""

    def on_round_end(self, trainer, pl_module, cohort):
        for layer in self._layers(pl_module.model, cohort):
            server, clients = layer.server, layer.clients
            shares = clients.count[:, 0] / clients.count[:, 0].sum()
            server.running_mean.copy_(shares @ clients.running_mean)
            server.running_var.copy_(shares @ clients.running_var)


class WeightsOfTheData(FBN):
    """Clients weigh by the size of their data in place of their batch."""

    def on_round_end(self, trainer, pl_module, cohort):
        for name, count in cohort.buffers.items():
            if name.endswith(".count"):
                count.copy_(count.sum(0) * cohort.weights.view(-1, 1))
        super().on_round_end(trainer, pl_module, cohort)


@pytest.mark.parametrize("wrong", [OwnCount, WithoutCorrection, WeightsOfTheData])
def test_a_wrong_formula_has_other_statistics(wrong):
    assert deviation(wrong()) > 1e-2


@EXECUTORS
@WIRES
@pytest.mark.parametrize(
    ("ema", "forgets"), [("per_step", 0.9**5), ("per_round", 0.9)], ids=["per_step", "per_round"]
)
def test_several_local_steps_pool_all_batches_of_all_clients(wire, ema, forgets, executor):
    data, states = blobs(sizes=(16, 24, 40)), States()
    work = {"local_steps": None, "local_epochs": 1, "executor": executor()}
    train(norm_first(), data, 2, [FBN(wire, ema), states], **work)
    mean, variance = torch.zeros(2).double(), torch.ones(2).double()
    for number, (found_mean, found_variance) in enumerate(statistics(states)):
        steps = [range(number * own, (number + 1) * own) for own in (2, 3, 5)]
        values = union_of(data, range(3), steps)[0].transpose(0, 1).flatten(1)
        mean = forgets * mean + (1 - forgets) * values.mean(1)
        variance = forgets * variance + (1 - forgets) * values.var(1)
        assert float((found_mean - mean).abs().max()) < 1e-10
        assert float((found_variance - variance).abs().max()) < 1e-10


@EXECUTORS
@pytest.mark.parametrize("work", [{"local_steps": 3}, {"local_steps": None, "local_epochs": 1}])
def test_both_wire_forms_are_equal(work, executor):
    data = blobs(sizes=(16, 24, 40))
    forms = [train(small_cnn(), data, 4, [FBN(w)], **work, executor=executor()) for w in ("run", "batch")]
    assert distance(*forms) < 1e-10


class UsedByOne(nn.Sequential):
    """A network whose first layer sees only inputs with a large mean, those of client 2."""

    def forward(self, inputs):
        norm, flatten, linear = self
        return linear(flatten(norm(inputs) if inputs.mean() > 6 else inputs))


@WIRES
@pytest.mark.parametrize("aggregator", [None, Median()])
def test_a_client_that_has_not_used_a_layer_does_not_change_its_statistics(wire, aggregator):
    data, states = uneven_clients(), States()
    settings = {"aggregator": aggregator, "executor": SequentialExecutor(), "check_first_steps": False}
    train(UsedByOne(*norm_first()), data, 1, [FBN(wire), states], **settings)
    ((mean, variance),) = statistics(states)
    values = union_of(data, [2], [[0]])[0].transpose(0, 1).flatten(1)
    wanted = (0.1 * values.mean(1), 0.9 + 0.1 * values.var(1)) if aggregator is None else (0.0, 1.0)
    assert float((mean - wanted[0]).abs().max()) < 1e-10
    assert float((variance - wanted[1]).abs().max()) < 1e-10


@WIRES
def test_a_client_that_is_left_out_for_what_it_sends_does_not_change_the_factors_of_the_others(wire):
    data, states = uneven_clients(examples=(16, 24, 80)), States()
    attack = Byzantine(NonFinite(), clients=[2], target="parameters")
    work = {"local_steps": None, "local_epochs": 1, "on_divergence": "drop"}
    train(norm_first(), data, 1, [FBN(wire), attack, states], **work)
    values = union_of(data, range(2), [range(2), range(3)])[0].transpose(0, 1).flatten(1)
    total, kept = (8 * steps * 36 for steps in (2 + 3 + 10, 2 + 3))  # clients know the steps of all three
    variance = values.var(1) * (kept - 1) / kept * total / (total - 1)
    (found_mean, found_variance) = statistics(states)[0]
    assert float((found_mean - (1 - 0.9**10) * values.mean(1)).abs().max()) < 1e-10
    assert float((found_variance - (0.9**10 + (1 - 0.9**10) * variance)).abs().max()) < 1e-10


class MedianOfRows(Aggregator):
    def __call__(self, rows, weights):
        return rows.median(0).values


@WIRES
def test_another_aggregator_takes_the_place_of_the_servers_means(wire):
    data, states = uneven_clients(), States()
    train(norm_first(), data, 1, [FBN(wire), states], aggregator=MedianOfRows())
    values = [union_of(data, [i], [[0]])[0].transpose(0, 1).flatten(1) for i in range(3)]
    total = sum(v.shape[1] for v in values)
    unbias, beta = total / (total - 1), 0.1 if wire == "run" else 1.0
    means = torch.stack([beta * v.mean(1) for v in values])
    variances = torch.stack([1 - beta + beta * unbias * v.var(1, correction=0) for v in values])
    mean = means.median(0).values
    variance = variances.median(0).values + unbias / beta * ((means - mean) ** 2).median(0).values
    if wire == "batch":
        mean, variance = 0.1 * mean, 0.9 + 0.1 * variance
    (found_mean, found_variance) = statistics(states)[0]
    assert float((found_mean - mean).abs().max()) < 1e-10
    assert float((found_variance - variance).abs().max()) < 1e-10


def test_the_model_is_left_as_it_came():
    model = norm_first()
    before = [type(model[0]), *dict(model.named_buffers()), *model.state_dict()]
    train(model, blobs(), 2, [FBN()])
    assert [type(model[0]), *dict(model.named_buffers()), *model.state_dict()] == before


@pytest.mark.filterwarnings("ignore:Found 1 module")
def test_a_layer_that_the_user_has_put_in_eval_mode_keeps_its_statistics():
    model = small_cnn()
    model[1].eval()
    before = deepcopy(model.double().state_dict())
    after = train(model, blobs(), 2, [FBN()])
    assert distance({"mean": after["1.running_mean"]}, {"mean": before["1.running_mean"]}) == 0
    assert distance({"mean": after["4.running_mean"]}, {"mean": before["4.running_mean"]}) > 1e-3


@pytest.mark.parametrize("momentum", [None, 0.0])
def test_a_layer_without_momentum_is_named(momentum):
    model = small_cnn()
    model[4].momentum = momentum
    with pytest.raises(
        ConfigurationError, match=f"FBN: BN layer '4' of Sequential has momentum={momentum}.*bn_mom"
    ):
        train(model, blobs(), 1, [FBN()])


def test_a_single_value_per_channel_is_refused():
    data = blobs(1, batch_size=1)
    module = FederatedModule(norm_first_1d(), client_optimizer=SGD, local_steps=1)
    with pytest.raises(ConfigurationError, match=r"BN layer '1' gets one value per channel.*batch_size >= 2"):
        fit(module, data, 1, [FBN()])


@pytest.mark.parametrize(("setting", "choices"), [("wire", "run, batch"), ("ema", "per_step, per_round")])
def test_an_unknown_setting_is_named(setting, choices):
    with pytest.raises(ConfigurationError, match=f"FBN.{setting}: 'x' must be one of {choices}"):
        FBN(**{setting: "x"})


def test_statistics_cannot_be_shared_and_frozen():
    with pytest.raises(ConfigurationError, match="callbacks FBN and FixBN cannot be combined"):
        train(small_cnn(), blobs(), 4, [FBN(), FixBN(freeze_round=2)])


@pytest.mark.parametrize("other", [FedPer, FedRep])
@pytest.mark.parametrize("fbn_first", [True, False])
def test_a_batch_norm_layer_in_a_head_is_refused(other, fbn_first):
    methods = [FBN(), other(head=["4", "8"])]
    with pytest.raises(ConfigurationError) as refused:
        train(small_cnn(), blobs(), 1, methods if fbn_first else methods[::-1], local_steps=2)
    assert str(refused.value) == "FBN: BN layer '4' is local; leave the layer out of the head"
    train(small_cnn(), blobs(), 1, [FBN(), other(head="8")], local_steps=2)
