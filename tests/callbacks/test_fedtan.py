"""FedTAN: Wang et al., arXiv 2301.02982, and its forward-only baseline, against centralised BN and lockstep by hand."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fl_lightning.callbacks.fedtan
from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedDataModule,
    FederatedModule,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.batch_norm.joint import cohort_mean
from fl_lightning.callbacks import FBN, BatchNormDiagnostics, FedBN, FedTAN, FixBN, MaintainedMomentum
from fl_lightning.callbacks.fedtan import JointStep, TANBatchNorm
from fl_lightning.models import ResNet8, ResNet20
from tests.support.helpers import (
    SGD,
    ArrayClient,
    SaveRounds,
    States,
    blobs,
    by_hand,
    centralised,
    client_batch,
    distance,
    federated_run,
    fit,
    plain_step,
    small_cnn,
    train,
    union_batch,
)

DECAYED = partial(torch.optim.SGD, lr=0.1, weight_decay=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
EXECUTORS = pytest.mark.parametrize(
    "executor",
    [SequentialExecutor, VectorizedExecutor, partial(VectorizedExecutor, 1)],
    ids=["sequential", "vectorised", "blocks of one"],
)
LAST_BN = ["4.weight", "4.bias", "8.weight", "8.bias"]
"""Parameters of ``small_cnn`` whose gradient the last BN layer's backward pass does not touch."""


class MLP(nn.Module):
    """BN over ``[b, channels]``, one of the layers without gamma and beta."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(72, 10), nn.BatchNorm1d(10)
        self.second, self.plain = nn.Linear(10, 8), nn.BatchNorm1d(8, affine=False, momentum=None)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.first(x.flatten(1))).tanh()
        return self.head(self.plain(self.second(x)).tanh())


class TransformerBlock(nn.Module):
    """Attention and a feed-forward net, each with a residual connection and BN over ``[b, channels, tokens]``."""

    def __init__(self, width=6, heads=2):
        super().__init__()
        self.heads = heads
        self.embed, self.qkv = nn.Linear(12, width), nn.Linear(width, 3 * width)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embed(x.transpose(1, 2).flatten(2))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.norms[0]((x + seen).mT).mT
        x = self.norms[1]((x + self.mlp(x)).mT).mT
        return self.head(x.mean(1))


class Gradients(FederatedCallback):
    """Keeps the mean gradient of each local step of the last round."""

    def __init__(self):
        self.steps = {}

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.steps[step] = {name: gradient.mean(0) for name, gradient in cohort.grads.items()}


class MeanModels(FederatedCallback):
    """Keeps the mean model after each local step of the last round."""

    def __init__(self):
        self.steps = {}

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        floats = {n: v for n, v in {**cohort.params, **cohort.buffers}.items() if v.is_floating_point()}
        self.steps[step] = {name: value.mean(0) for name, value in floats.items()}


class ClientZero(FederatedCallback):
    """Keeps the parameters of client 0 after each local step, and the gradients."""

    def __init__(self):
        self.steps = []

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.steps.append(
            [{n: value[0].clone() for n, value in of.items()} for of in (cohort.params, cohort.grads)]
        )


def test_a_client_that_stops_first_leaves_dampened_sgd_of_the_others_as_in_plain_pytorch():
    dampened, seen = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.9), ClientZero()
    settings = {"local_steps": None, "local_epochs": 1, "client_optimizer": dampened}
    train(small_cnn(), blobs(2, (32, 8)), 1, [FedTAN(), seen], **settings)
    (start, _), *later = seen.steps
    stepper = dampened([*start.values()])
    for found, gradients in later:
        for name, value in start.items():
            value.grad = gradients[name]
        stepper.step()
        assert distance(found, start) < 1e-12
    assert len(later) == 3


def first_gradient(method, model=None, data=None, **settings):
    """The mean gradient of the first local step with a method, and that of the union batch with BN."""
    model, data = model or small_cnn(), data or blobs()
    seen, twin = Gradients(), deepcopy(model).double()
    train(model, data, 1, [method, seen], **settings)
    inputs, targets = union_batch(data, 0)
    loss = F.cross_entropy(twin(inputs), targets)
    names = [name for name, _ in twin.named_parameters()]
    central = torch.autograd.grad(loss, list(twin.parameters()))
    return seen.steps[0], dict(zip(names, central, strict=True))


def parted(first, second, bound=1e-10):
    """Names of the tensors that differ by more than ``bound``."""
    return [name for name in second if float((first[name] - second[name]).abs().max()) > bound]


def fedtan_by_hand(model, data, rounds, steps, optimizer, restart=True):
    """FedTAN as its pseudo-code has it, on separate copies of an ``nn.Sequential``: clients in lockstep, layer by layer.

    BN sees the concatenated activations of all clients, then each client's own gamma and beta apply.
    """
    model, count = deepcopy(model).double().train(), data.num_clients
    for round_number in range(rounds):
        copies = [deepcopy(model) for _ in range(count)]
        steppers = [optimizer(copy.parameters()) for copy in copies]
        batches = [client_batch(data, client, round_number * steps) for client in range(count)]
        values = [inputs for inputs, _ in batches]
        for layers in zip(*copies, strict=True):
            if isinstance(layers[0], nn.BatchNorm2d):
                mean, var, momentum = layers[0].running_mean, layers[0].running_var, layers[0].momentum
                joined = F.batch_norm(torch.cat(values), mean, var, training=True, momentum=momentum)
                values = [
                    x * layer.weight.view(-1, 1, 1) + layer.bias.view(-1, 1, 1)
                    for x, layer in zip(joined.chunk(count), layers, strict=True)
                ]
                for layer in layers:
                    layer.running_mean, layer.running_var = mean.clone(), var.clone()
                    layer.num_batches_tracked += 1
            else:
                values = [layer(x) for layer, x in zip(layers, values, strict=True)]
        sum(F.cross_entropy(x, targets) for x, (_, targets) in zip(values, batches, strict=True)).backward()
        for client, (copy, stepper) in enumerate(zip(copies, steppers, strict=True)):
            stepper.step()
            stepper = optimizer(copy.parameters()) if restart else stepper
            for step in range(1, steps):
                plain_step(copy, stepper, client_batch(data, client, round_number * steps + step))
        held = [copy.state_dict() for copy in copies]
        for name, value in model.state_dict().items():
            value.copy_(torch.stack([state[name] for state in held]).double().mean(0))
    return model.state_dict()


@EXECUTORS
def test_with_one_local_step_a_run_is_centralised_training_with_bn(executor):
    settings = {"client_optimizer": DECAYED, "executor": executor()}
    joint = train(small_cnn(), blobs(), 12, [FedTAN()], **settings)
    assert distance(joint, centralised(small_cnn(), blobs(), 12, DECAYED)) < 1e-10
    assert distance(train(small_cnn(), blobs(), 12, **settings), joint) > 1e-2


@pytest.mark.parametrize("model", [partial(ResNet8, 3, 2, width=4), MLP, TransformerBlock])
def test_any_model_with_bn_trains_as_its_centralised_twin(model):
    settings = {"client_optimizer": partial(torch.optim.SGD, lr=0.02)}
    states = []
    for central in (False, True):
        torch.manual_seed(0)
        states.append(train(model(), blobs(), 10, [FedTAN()], centralised=central, **settings))
    torch.manual_seed(0)
    assert distance(*states) < 1e-10
    plain = centralised(model(), blobs(), 10, partial(torch.optim.SGD, lr=0.02))
    assert distance(states[0], plain) < 1e-10


@EXECUTORS
def test_the_mean_gradient_of_the_first_step_is_that_of_the_union_batch(executor):
    gradient, central = first_gradient(FedTAN(), executor=executor(), local_steps=3)
    assert parted(gradient, central) == []


def test_clients_of_unequal_size_need_uniform_weights():
    data = blobs(sizes=(24, 40, 32))
    central = centralised(small_cnn(), data, 5)
    joint = train(small_cnn(), data, 5, [FedTAN()], weighting="uniform")
    assert distance(joint, central) < 1e-10
    assert distance(train(small_cnn(), data, 5, [FedTAN()]), central) > 1e-3


def test_with_partial_participation_the_union_is_that_of_the_rounds_clients():
    settings = {"participation": 2, "seed": 3}
    joint = train(small_cnn(), blobs(4), 6, [FedTAN()], **settings)
    assert distance(joint, train(small_cnn(), blobs(4), 6, centralised=True, **settings)) < 1e-10


@pytest.mark.parametrize("steps", [1, 3])
def test_one_client_trains_as_with_plain_bn(steps):
    settings = {"client_optimizer": DECAYED, "local_steps": steps}
    alone, _ = by_hand(small_cnn(), blobs(1), 4, optimizer=DECAYED, steps=[steps])
    assert distance(train(small_cnn(), blobs(1), 4, [FedTAN()], **settings), alone) < 1e-10


@EXECUTORS
def test_several_local_steps_equal_lockstep_by_hand_with_a_fresh_optimizer_after_the_first(executor):
    settings = {"client_optimizer": MOMENTUM, "local_steps": 3, "executor": executor()}
    joint = train(small_cnn(), blobs(), 4, [FedTAN()], **settings)
    assert distance(joint, fedtan_by_hand(small_cnn(), blobs(), 4, 3, MOMENTUM)) < 1e-10


def test_momentum_goes_on_after_the_first_step_where_that_is_asked_for():
    settings = {"client_optimizer": MOMENTUM, "local_steps": 3}
    joint = train(small_cnn(), blobs(), 2, [FedTAN(restart_momentum=False)], **settings)
    assert distance(joint, fedtan_by_hand(small_cnn(), blobs(), 2, 3, MOMENTUM, restart=False)) < 1e-10
    assert distance(joint, fedtan_by_hand(small_cnn(), blobs(), 2, 3, MOMENTUM)) > 1e-3


def test_models_equal_the_centralised_one_after_the_first_local_step_only():
    seen = MeanModels()
    train(small_cnn(), blobs(), 1, [FedTAN(), seen], local_steps=2)
    first, second = (centralised(small_cnn(), blobs(), steps) for steps in (1, 2))
    assert parted(first, seen.steps[0]) == []
    weights = {name for name in first if name.endswith("weight")}
    assert weights <= set(parted(second, seen.steps[1], 1e-4))


def test_kept_momentum_makes_one_step_rounds_centralised_momentum_sgd():
    methods = [FedTAN(restart_momentum=False), MaintainedMomentum()]
    joint = train(small_cnn(), blobs(), 8, methods, client_optimizer=MOMENTUM)
    assert distance(joint, centralised(small_cnn(), blobs(), 8, MOMENTUM)) < 1e-10


@pytest.mark.parametrize("backward", ["own", "none"])
def test_without_exchange_of_gradients_only_the_last_bn_and_what_follows_agree(backward):
    gradient, central = first_gradient(FedTAN(backward))
    assert parted(gradient, central, 1e-4) == [name for name in central if name not in LAST_BN]
    assert not set(parted(gradient, central)) & set(LAST_BN)


@pytest.mark.parametrize("backward", ["own", "none"])
def test_the_forward_only_variants_have_the_statistics_of_the_union_and_are_no_centralised_training(backward):
    central = [centralised(small_cnn(), blobs(), rounds) for rounds in (1, 5)]
    seen = States()
    train(small_cnn(), blobs(), 5, [FedTAN(backward), seen])
    statistics = [name for name in central[0] if "running" in name]
    assert not set(parted(seen.states[1], central[0])) & set(statistics)
    assert distance(seen.states[5], central[1]) > 1e-3


def test_a_clients_own_gradient_is_its_own_part_of_the_statistics():
    torch.manual_seed(0)
    inputs, direction = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    inputs = torch.stack([inputs, 2 * inputs + 1]).requires_grad_()
    direction = torch.stack([direction, direction.flip(0)])
    union = inputs.detach().flatten(0, 1)
    mean, var = union.mean((0, 2), keepdim=True), union.var((0, 2), correction=0, keepdim=True)
    (found,) = torch.autograd.grad((joint_forward(inputs, "own") * direction).sum(), inputs)
    for client in range(2):
        x, leaves = inputs.detach()[client], (mean.clone().requires_grad_(), var.clone().requires_grad_())
        y = (x - leaves[0]) / (leaves[1] + 1e-5).sqrt()
        d_mean, d_var = torch.autograd.grad((y * direction[client]).sum(), leaves)
        count = x[:, 0].numel()
        expected = direction[client] / (var + 1e-5).sqrt() + d_mean / count + 2 * d_var * (x - mean) / count
        assert (found[client] - expected).abs().max() < 1e-10


def joint_forward(inputs, backward="aggregated"):
    """A BN layer of FedTAN on the clients' inputs ``[C, b, channels, ...]``, with gamma 1 and beta 0."""
    layer = nn.BatchNorm1d(inputs.shape[2], affine=False, track_running_stats=True).double()
    layer.__class__ = type("Layer", (TANBatchNorm, nn.BatchNorm1d), {})
    layer.joint = JointStep(len(inputs), backward, "union")
    slots = dict(layer.named_buffers())
    stacked = {name: torch.stack([value] * len(inputs)) for name, value in slots.items()}
    return torch.func.vmap(partial(torch.func.functional_call, layer))(stacked, inputs)


def test_the_input_gradient_is_the_corrected_equation_seven_of_the_fixbn_paper():
    torch.manual_seed(0)
    inputs = torch.randn(3, 4, 5, 2, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(inputs)
    (found,) = torch.autograd.grad((joint_forward(inputs) * direction).sum(), inputs)
    x, g = (
        t.detach().transpose(1, 2).reshape(3, 5, 8).transpose(0, 1).flatten(1) for t in (inputs, direction)
    )
    m, s = x.shape[1], (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    normed = (x - x.mean(1, keepdim=True)) / s
    formula = (m * g - g.sum(1, keepdim=True) - normed * (g * normed).sum(1, keepdim=True)) / (m * s)
    found = found.transpose(1, 2).reshape(3, 5, 8).transpose(0, 1).flatten(1)
    assert (found - formula).abs().max() < 1e-10
    leaf = x.clone().requires_grad_()
    (autograd,) = torch.autograd.grad((F.batch_norm(leaf.T, None, None, training=True).T * g).sum(), leaf)
    assert (formula - autograd).abs().max() < 1e-10


def test_the_running_variance_is_unbiased_by_all_values_of_the_union_or_by_a_clients_images():
    def variance(correction):
        return train(small_cnn(), blobs(), 1, [FedTAN(var_correction=correction)])["1.running_var"]

    biased = (variance("union") - 0.9) / (384 / 383)
    assert (centralised(small_cnn(), blobs(), 1)["1.running_var"] - variance("union")).abs().max() < 1e-10
    assert (variance("official") - (0.9 + biased * 8 / 7)).abs().max() < 1e-10
    assert (variance("official") - variance("union")).abs().max() > 1e-3


class VarianceAroundOwnMean(TANBatchNorm):
    def forward(self, inputs):
        if self.joint is None or not self.training:
            return super().forward(inputs)
        own = inputs.mean((0, 2, 3), keepdim=True)
        mean = self.joint.mean(own)
        variance = self.joint.mean((inputs - own).square().mean((0, 2, 3), keepdim=True))
        self._track(mean.flatten(), self.joint.unbiased(variance.flatten(), inputs))
        output = (inputs - mean) / (variance + self.eps).sqrt()
        return output * self.weight.view_as(mean) + self.bias.view_as(mean)


class CorrectedByOwnCount(JointStep):
    def unbiased(self, variance, inputs):
        count = inputs[:, 0].numel()
        return variance * count / (count - 1)


class GradientDropped(JointStep):
    def mean(self, own):
        return super().mean(own).detach()


@pytest.mark.parametrize(
    ("name", "wrong", "shown_by"),
    [
        ("TANBatchNorm", VarianceAroundOwnMean, "weight"),
        ("JointStep", GradientDropped, "weight"),
        ("JointStep", CorrectedByOwnCount, "running_var"),
    ],
)
def test_a_wrong_formula_is_no_centralised_training(name, wrong, shown_by, monkeypatch):
    central = centralised(small_cnn(), blobs(), 5)
    shown = {tensor: value for tensor, value in central.items() if tensor.endswith(shown_by)}
    assert distance(shown, train(small_cnn(), blobs(), 5, [FedTAN()])) < 1e-10
    monkeypatch.setattr(fl_lightning.callbacks.fedtan, name, wrong)
    assert distance(shown, train(small_cnn(), blobs(), 5, [FedTAN()])) > 1e-3


@pytest.mark.parametrize(
    ("methods", "exchanges", "megabytes"),
    [([], 1, 1.084), ([FedTAN()], 58, 1.095), ([FedTAN("own")], 39, 1.090), ([FedTAN("none")], 39, 1.090)],
)
def test_exchanges_and_bytes_of_resnet20_are_those_of_the_table(methods, exchanges, megabytes):
    module = FederatedModule(ResNet20(), SGD, local_steps=1)
    fit(module, blobs(2, batch_size=2, shape=(3, 8, 8), classes=10), 1, methods)
    upload, download = (module.metrics[f"comm/{way}_bytes"] for way in ("upload", "download"))
    assert module.metrics["comm/exchanges"] == exchanges
    assert upload == download
    assert upload / 2 / 2 / 1e6 == pytest.approx(megabytes, abs=5e-4)  # two clients, and float64 here


class TwiceAndNever(nn.Module):
    """One BN layer runs twice in a forward pass, another one is in eval mode."""

    def __init__(self):
        super().__init__()
        self.twice, self.never = nn.BatchNorm2d(2), nn.BatchNorm2d(2).eval()
        self.head = nn.Linear(72, 3)

    def forward(self, inputs):
        return self.head(self.never(self.twice(self.twice(inputs))).flatten(1))


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")  # the layer that never exchanges
@pytest.mark.parametrize("observers", [[], [BatchNormDiagnostics()]])
@pytest.mark.parametrize(("backward", "messages"), [("aggregated", 3), ("own", 2)])
def test_books_count_the_calls_of_a_layer_that_exchanges(backward, messages, observers):
    made = []

    class Counted(fl_lightning.callbacks.fedtan.JointStep):
        def mean(self, own):
            made.append(own.numel())
            return super().mean(own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fl_lightning.callbacks.fedtan, "JointStep", Counted)
        module = federated_run(FedTAN(backward), model=TwiceAndNever(), rounds=1, local_steps=3).module
    assert len(made) == 4  # mean and variance of two calls
    module = FederatedModule(TwiceAndNever(), SGD, local_steps=3)
    fit(module, blobs(), 1, [*observers, FedTAN(backward)])
    sent = {"aggregated": 2, "own": 1}[backward] * sum(made)
    assert module.metrics["comm/exchanges"] == 1 + 2 * messages
    assert {*module.communication.sent["FedTAN"].values()} == {(8 * sent, 8 * sent)}


def test_gamma_drawn_at_the_start_is_a_function_of_the_seed_and_a_resumed_run_keeps_its_own(tmp_path):
    settings = {"local_steps": 2, "seed": 5}
    method = partial(FedTAN, affine_init="uniform")
    seen = States()
    whole = train(small_cnn(), blobs(), 4, [method(), seen, SaveRounds(tmp_path)], **settings)
    start = torch.cat([seen.states[0]["1.weight"], seen.states[0]["4.weight"]])
    assert ((start >= 0) & (start < 1)).all()
    assert len(start.unique()) == 10
    assert seen.states[0]["1.bias"].eq(0).all()
    module = federated_run(method(), rounds=4, ckpt_path=tmp_path / "2.ckpt", **settings).module
    assert all(torch.equal(value, whole[name]) for name, value in module.state_dict().items())
    other = States()
    train(small_cnn(), blobs(), 1, [method(), other], seed=6)
    assert not torch.equal(other.states[0]["1.weight"], seen.states[0]["1.weight"])


def test_the_model_is_as_it_came_after_a_run_and_after_a_crash():
    class Crash(FederatedCallback):
        def on_after_local_backward(self, trainer, pl_module, cohort, step):
            raise RuntimeError("on purpose")

    model = small_cnn()
    train(model, blobs(), 1)
    before = {name: (type(m), sorted(vars(m))) for name, m in model.named_modules()}
    train(model, blobs(), 1, [FedTAN()])
    assert before == {name: (type(m), sorted(vars(m))) for name, m in model.named_modules()}
    with pytest.raises(RuntimeError, match="on purpose"):
        train(model, blobs(), 1, [FedTAN(), Crash()])
    assert before == {name: (type(m), sorted(vars(m))) for name, m in model.named_modules()}


def test_the_baseline_says_that_it_is_inferred(capsys):
    train(small_cnn(), blobs(), 1, [FedTAN("own")])
    assert "'FedAvg + Algorithm 2', inferred" in capsys.readouterr().out
    train(small_cnn(), blobs(), 1, [FedTAN()])
    assert capsys.readouterr().out == ""
    assert "inferred" in FedTAN("own").paper
    assert "inferred" not in FedTAN().paper


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (SequentialExecutor(), "a client runs by itself"),
        (VectorizedExecutor(2), "runs 2 of the cohort's 3 clients"),
    ],
)
def test_a_forward_pass_over_part_of_the_cohort_is_an_error(inner, message, monkeypatch):
    # an engine that forgets that a joint step needs the whole cohort
    monkeypatch.setattr("fl_lightning.round.context.joint_executor", lambda *_: inner)
    with pytest.raises(ConfigurationError, match=message):
        train(small_cnn(), blobs(), 1, [FedTAN()], executor=inner)
    with pytest.raises(ConfigurationError, match="one forward pass over the whole cohort"):
        cohort_mean(torch.ones(2), 1)


@pytest.mark.parametrize(
    ("methods", "named"),
    [
        (
            [FedTAN(), MaintainedMomentum()],
            "both decide over the client optimizer's state; set FedTAN.restart_momentum: false",
        ),
        ([FedTAN(), FixBN(freeze_round=1)], "FedTAN and FixBN cannot be combined"),
        ([FBN(), FedTAN()], "FBN and FedTAN cannot be combined"),
        ([FedTAN(), FedBN()], "FedTAN and FedBN cannot be combined"),
    ],
)
def test_contradicting_methods_are_refused_with_a_reason(methods, named):
    with pytest.raises(ConfigurationError, match=named):
        train(small_cnn(), blobs(), 2, methods, client_optimizer=MOMENTUM)


@pytest.mark.parametrize("setting", ["backward", "var_correction", "affine_init"])
def test_settings_out_of_range_are_named(setting):
    with pytest.raises(ConfigurationError, match=f"FedTAN.{setting}: 'bad' must be one of"):
        FedTAN(**{setting: "bad"})


@EXECUTORS
def test_batches_of_unequal_shape_are_refused_in_fedtans_name(executor):
    sizes = (4, 8)
    generator = torch.Generator().manual_seed(0)
    clients = [
        ArrayClient(torch.randn(16, 2, 6, 6, generator=generator).double(), torch.arange(16) % 3, size)
        for size in sizes
    ]
    with pytest.raises(ConfigurationError, match=r"joint forward pass of FedTAN .* batches of equal shape"):
        train(small_cnn(), FederatedDataModule(clients, clients[0]), 1, [FedTAN()], executor=executor())


def test_a_union_of_one_value_per_channel_is_refused():
    images = torch.ones(3, 2, 5, 5).double()
    client = ArrayClient(images, torch.arange(3), 1)
    with pytest.raises(ConfigurationError, match="gets one value per channel"):
        train(small_cnn(), FederatedDataModule([client], client), 1, [FedTAN()])


def test_samples_of_the_joint_step_are_counted():
    module = federated_run(FedTAN(), data=blobs(num_clients=2, batch_size=8), rounds=2, local_steps=3).module
    assert module.record.samples == 2 * 2 * 3 * 8
