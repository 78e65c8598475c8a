"""Modules that keep things outside of parameters and buffers train as in Lightning, or are refused by name."""

import random
import warnings
from collections import deque
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from tests.support.lightning_sites import CLASSES, FEATURES, federated, sites
from tests.support.plain_lightning import (
    Small,
    check_equals_lightning,
    check_tensors,
    equal_or_refused,
    lightning_rounds,
    new,
    squares,
    tensors,
)

pytestmark = pytest.mark.first_steps


# optimizers


class Keywords(torch.optim.SGD):
    def __init__(self, params, lr, **kw):
        super().__init__(params, lr=lr, **kw)


class OptimizerWithKeywords(Small):
    def configure_optimizers(self):
        return Keywords(self.net.parameters(), lr=0.3, momentum=0.9, weight_decay=0.05)


class Scaled(torch.optim.SGD):
    def __init__(self, params, lr, scale=1.0):
        super().__init__(params, lr=lr)
        self.scale = scale

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.scale * group.get("boost", 1.0))
        super().step()
        return loss


class OptimizerWithAttribute(Small):
    def configure_optimizers(self):
        return Scaled(self.net.parameters(), lr=0.3, scale=2.0)


class OptimizerWithAttributeSetLater(Small):
    def configure_optimizers(self):
        optimizer = Scaled(self.net.parameters(), lr=0.3)
        optimizer.scale = 2.0
        return optimizer


class OptimizerWithOwnKey(Small):
    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters(), "boost": 3.0}, {"params": self.net[2].parameters()}]
        return Scaled(groups, lr=0.3)


class OptimizerWithPostHook(Small):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *given: self.clip_weights())
        return optimizer

    @torch.no_grad()
    def clip_weights(self):
        for parameter in self.net.parameters():
            parameter.clamp_(-0.2, 0.2)


class OptimizerWithPreHook(OptimizerWithPostHook):
    """Lightning calls this hook before ``training_step``, which is the optimizer's closure."""

    def configure_optimizers(self):
        optimizer = Small.configure_optimizers(self)
        optimizer.register_step_pre_hook(lambda *given: self.clip_weights())
        return optimizer


def optimized_by(kind, **settings):
    def configure_optimizers(self):
        return kind(self.parameters(), **settings)

    return type(kind.__name__, (Small,), {"configure_optimizers": configure_optimizers})


class UnusedLayer(Small):
    """A layer without gradient has no weight decay."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


class Orthogonal(Small):
    """An optimizer of matrices, which cannot train stacked clients."""

    def configure_optimizers(self):
        return torch.optim.Muon([p for p in self.net.parameters() if p.ndim == 2], lr=0.1)


OPTIMIZERS = [
    Orthogonal,
    optimized_by(torch.optim.Adafactor, lr=0.1),
    optimized_by(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    optimized_by(torch.optim.RMSprop, lr=0.1, momentum=0.9),
    optimized_by(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    UnusedLayer,
    OptimizerWithKeywords,
    OptimizerWithAttribute,
    OptimizerWithAttributeSetLater,
    OptimizerWithOwnKey,
    OptimizerWithPostHook,
]


# parameters that are read from another place than the module that owns them


class ParametersInList(Small):
    strength = 3e-4

    def __init__(self):
        super().__init__()
        self.decayed = [parameter for parameter in self.net.parameters() if parameter.ndim > 1]

    def penalty(self, batch):
        return self.strength * squares(self.decayed)


class StrongPenaltyOfList(ParametersInList):
    strength = 0.1


class ParametersInDict(Small):
    def __init__(self):
        super().__init__()
        self.decayed = dict(self.net.named_parameters())

    def penalty(self, batch):
        return 3e-4 * squares(self.decayed.values())


class Importance:
    """The penalty of EWC, with equal importances."""

    def __init__(self, net):
        self.parameters = list(net.parameters())
        self.start = [parameter.detach().clone() - 0.3 for parameter in self.parameters]

    def __call__(self):
        return squares([p - start for p, start in zip(self.parameters, self.start, strict=True)])


class ParametersInHelper(Small):
    def __init__(self):
        super().__init__()
        self.importance = Importance(self.net)

    def penalty(self, batch):
        return 3e-4 * self.importance()


class Proximal(Small):
    """The proximal term of FedProx, written by hand."""

    def __init__(self):
        super().__init__()
        self.pulled = list(self.net.parameters())

    def on_train_epoch_start(self):
        self.center = [parameter.detach().clone() - 0.5 for parameter in self.pulled]

    def penalty(self, batch):
        return 3e-4 * squares([p - c for p, c in zip(self.pulled, self.center, strict=True)])


class ParametersInPartial(Small):
    def __init__(self):
        super().__init__()
        self.decay = partial(squares, [*self.net.parameters()])

    def penalty(self, batch):
        return 3e-4 * self.decay()


class BoundMethod(Small):
    def __init__(self):
        super().__init__()
        self.features = self.net[0].forward

    def penalty(self, batch):
        return 0.1 * self.features(batch[0]).square().mean()


class ParametersInTuple(ParametersInList):
    def __init__(self):
        super().__init__()
        self.decayed = tuple(self.decayed)


class ParametersInSet(ParametersInList):
    def __init__(self):
        super().__init__()
        self.known = frozenset(self.decayed)
        self.starts = {parameter: torch.zeros(()) for parameter in self.net.parameters()}

    def penalty(self, batch):
        decayed = [p for p in self.net.parameters() if p in self.known and p in self.starts]
        return self.strength * squares(decayed)


@dataclass(slots=True)
class Slots:
    parameters: list
    scale: torch.Tensor


class ParametersInSlots(ParametersInList):
    def __init__(self):
        super().__init__()
        self.kept = Slots(self.decayed, torch.ones(3))
        self.recent = deque([torch.zeros(3), torch.ones(3)], maxlen=4)

    def penalty(self, batch):
        return self.strength * squares(self.kept.parameters)


class PassesOn:
    """An object that passes attributes on, which it cannot while it is empty."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class ParametersBehindObject(ParametersInList):
    def __init__(self):
        super().__init__()
        self.behind = PassesOn(self.net)

    def penalty(self, batch):
        return self.strength * squares(self.behind.parameters())


class CachedMethod(ParametersInList):
    def __init__(self):
        super().__init__()
        self.scale = lru_cache(self.compute_scale)

    def compute_scale(self, factor):
        return factor * self.strength

    @cached_property
    def factor(self):
        return 2

    def penalty(self, batch):
        return self.scale(self.factor) * squares(self.decayed)


class LeavesOutOfFiles(ParametersInList):
    """Its files lack what the module holds besides its tensors."""

    strength = 0.1

    def __getstate__(self):
        return {**super().__getstate__(), "decayed": None}


class WithSlots(Small):
    __slots__ = ("strength",)

    def __init__(self):
        super().__init__()
        self.strength = 0.1

    def penalty(self, batch):
        return self.strength * squares(self.net.parameters())


class TrainersModel(Small):
    """The optimizer of a well-known template of projects."""

    def penalty(self, batch):
        return 0.1 * squares(self.trainer.lightning_module.parameters())

    def configure_optimizers(self):
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.3)


class AttributeOfParameter(Small):
    def __init__(self):
        super().__init__()
        for parameter in self.net.parameters():
            parameter.decay = 0.5 * (parameter.ndim > 1)

    def configure_optimizers(self):
        groups = [{"params": [p], "weight_decay": p.decay} for p in self.net.parameters()]
        return torch.optim.AdamW(groups, lr=0.1)


class HookOfParameter(Small):
    def __init__(self):
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: 0.1 * gradient)

        def halve(parameter):
            parameter.grad.mul_(0.5)

        self.net[2].weight.register_post_accumulate_grad_hook(halve)


class ViewsOfTensors(Small):
    """Tensors that show the values of a parameter and of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(4))
        self.first, self.weight = self.counts[:2], self.net[0].weight.detach()

    def penalty(self, batch):
        self.counts += 0.1
        return self.first.sum() * (self.weight * self.net[0].weight).sum()


class Parametrized(Small):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[0])


class Compiled(Small):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class Traced(Small):
    """Frozen features that torch.jit has traced."""

    def __init__(self):
        super().__init__()
        frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.features = torch.jit.trace(frozen, torch.zeros(1, FEATURES))

    def penalty(self, batch):
        return self.net(self.features(batch[0])).square().mean()


ELSEWHERE = [
    LeavesOutOfFiles,
    WithSlots,
    ParametersInTuple,
    ParametersInSet,
    ParametersInSlots,
    ParametersBehindObject,
    CachedMethod,
    TrainersModel,
    AttributeOfParameter,
    HookOfParameter,
    ViewsOfTensors,
    Parametrized,
    Compiled,
    Traced,
    ParametersInList,
    StrongPenaltyOfList,
    ParametersInDict,
    ParametersInHelper,
    Proximal,
    ParametersInPartial,
    BoundMethod,
]


# lambdas, closures and forward hooks


class LambdaOfModule(Small):
    def __init__(self):
        super().__init__()
        self.decay = lambda: 3e-4 * squares(self.net.parameters())

    def penalty(self, batch):
        return self.decay()


class LambdaOfParameter(LambdaOfModule):
    def __init__(self):
        super().__init__()
        weight = self.net[0].weight
        self.decay = lambda: 3e-4 * weight.square().sum()


class LambdaWithDefault(LambdaOfModule):
    def __init__(self):
        super().__init__()
        self.decay = lambda net=self.net: 3e-4 * squares(net.parameters())


class NestedFunction(LambdaOfModule):
    def __init__(self):
        super().__init__()
        parameters = [*self.net.parameters()]

        def decay():
            return 3e-4 * squares(parameters)

        self.decay = decay


class LambdaInList(LambdaOfModule):
    def __init__(self):
        super().__init__()
        self.decay = [lambda: 3e-4 * squares(self.net.parameters())]

    def penalty(self, batch):
        return self.decay[0]()


class LambdaWithoutGradient(Small):
    """Consistency with the module's own outputs, through which no gradient flows."""

    def __init__(self):
        super().__init__()
        net = self.net
        self.target = torch.no_grad()(lambda inputs: net(inputs))

    def penalty(self, batch):
        return mse_loss(self.net(batch[0] + 0.1), self.target(batch[0]))


class LambdaThroughNorm(Small):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        first, norm = self.net[0], self.norm
        self.target = lambda inputs: norm(first(inputs)).detach()

    def penalty(self, batch):
        return mse_loss(self.net[0](batch[0]), self.target(batch[0]))


class ForwardHook(Small):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.net[0].register_forward_hook(lambda layer, inputs, outputs: outputs * self.scale)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


class ForwardHookOfParameter(ForwardHook):
    def __init__(self):
        Small.__init__(self)
        self.scale = scale = nn.Parameter(torch.ones(5))
        self.net[0].register_forward_hook(lambda layer, inputs, outputs: outputs * scale)


class ForwardHookKeepsFeatures(Small):
    def __init__(self):
        super().__init__()
        self.kept = {}
        self.net[0].register_forward_hook(
            lambda layer, inputs, outputs: self.kept.update(features=outputs) if self.training else None
        )

    def penalty(self, batch):
        return 0.1 * self.kept["features"].square().mean()


FUNCTIONS = [
    (LambdaOfModule, "decay"),
    (LambdaOfParameter, "decay"),
    (LambdaWithDefault, "decay"),
    (NestedFunction, "decay"),
    (LambdaInList, "decay"),
    (LambdaWithoutGradient, "target"),
    (LambdaThroughNorm, "target"),
    (ForwardHook, "hook"),
    (ForwardHookOfParameter, "hook"),
    (ForwardHookKeepsFeatures, "hook"),
]


# steps and data


class AverageByStep(Small):
    """A moving average whose decay grows with the number of steps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(5, FEATURES))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        decay = (1 + self.global_step) / (10 + self.global_step)
        self.average.mul_(decay).add_(self.net[0].weight.detach(), alpha=1 - decay)


class AverageByTrainersStep(AverageByStep):
    @property
    def global_step(self):
        return self.trainer.global_step


class DecayByStep(Small):
    def penalty(self, batch):
        return 0.1 / (1 + self.global_step) * squares(self.net.parameters())


class NewData(Small):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for parameter in self.net.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


class NewDataBeforeStep(Small):
    def on_train_batch_start(self, batch, batch_idx):
        self.net[2].weight.data = self.net[2].weight.data / self.net[2].weight.data.norm(dim=1, keepdim=True)


class PreviousGradient(Small):
    """Lightning clears gradients between ``training_step`` and the backward pass."""

    def penalty(self, batch):
        previous = self.net[0].weight.grad
        return 0.0 if previous is None else 0.1 * (self.net[0].weight * previous.clone()).sum()


class NumpyMixup(Small):
    """Mixup from round 2 on."""

    def share(self):
        return float(np.random.beta(0.4, 0.4))

    def training_step(self, batch, batch_idx):
        share = self.share() if self.current_epoch > 0 else 1.0
        scores = self.net(share * batch[0] + (1 - share) * batch[0].flip(0))
        return share * cross_entropy(scores, batch[1]) + (1 - share) * cross_entropy(scores, batch[1].flip(0))


class PythonMixup(NumpyMixup):
    def share(self):
        return random.random()


class NumpyMixupAfterTwoSteps(NumpyMixup):
    def training_step(self, batch, batch_idx):
        share = self.share() if batch_idx >= 2 else 1.0
        return cross_entropy(self.net(share * batch[0] + (1 - share) * batch[0].flip(0)), batch[1])


class RandomInputs(Small):
    def penalty(self, batch):
        return self.net(batch[0] + torch.randn_like(batch[0])).square().mean()


class WithDropout(Small):
    def __init__(self):
        super().__init__()
        self.net.append(nn.Dropout(0.5))


STEPS = [
    AverageByStep,
    AverageByTrainersStep,
    DecayByStep,
    NewData,
    NewDataBeforeStep,
    PreviousGradient,
    NumpyMixup,
    PythonMixup,
    NumpyMixupAfterTwoSteps,
    RandomInputs,
    WithDropout,
]


@pytest.mark.parametrize("kind", [Small, *OPTIMIZERS, *ELSEWHERE, *STEPS])
def test_clients_and_rounds_equal_lightning(kind):
    check_equals_lightning(kind, steps=3)


@pytest.mark.parametrize(("kind", "name"), FUNCTIONS)
def test_functions_that_reach_the_module_equal_lightning_or_are_refused(kind, name):
    with equal_or_refused(name):
        check_equals_lightning(kind)


class OldWeightNorm(Small):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.net[0])


def test_the_old_weight_norm_equals_lightning_or_is_refused():
    with equal_or_refused("net.0"):
        check_equals_lightning(OldWeightNorm)


@pytest.mark.parametrize(
    "kind",
    [NumpyMixup, PythonMixup, NumpyMixupAfterTwoSteps],
)
def test_draws_that_start_late_equal_lightning_or_are_refused_under_vmap(kind):
    with equal_or_refused("draws random numbers of (NumPy|Python)"):
        check_equals_lightning(kind, steps=3, tolerance=None, executor=VectorizedExecutor())


def test_a_hook_before_the_optimizers_step_equals_lightning_or_is_refused():
    with equal_or_refused("hooks of the optimizer's step"):
        check_equals_lightning(OptimizerWithPreHook)


class ChannelsLast(Small):
    """Other kernels of convolutions round in another way."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, CLASSES)).to(
            memory_format=torch.channels_last
        )

    def training_step(self, batch, batch_idx):
        images = batch[0].reshape(-1, 1, 2, 3).to(memory_format=torch.channels_last)
        return cross_entropy(self.net(images), batch[1])

    def validation_step(self, batch, batch_idx):
        pass


def test_tensors_in_channels_last_equal_lightning():
    check_equals_lightning(ChannelsLast, tolerance=1e-6)


class TwoBuffers(Small):
    """A write to one buffer is no write to another that the backward pass needs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("mean", torch.zeros(5))

    def training_step(self, batch, batch_idx):
        features = torch.tanh(self.net[0](batch[0])) * self.scale
        self.mean.mul_(0.9).add_(features.detach().mean(0), alpha=0.1)
        return cross_entropy(self.net[2](features), batch[1])


class MaxNorm(Small):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 4, max_norm=0.5)

    def penalty(self, batch):
        return self.table(batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Clamps(Small):
    """Clamps weights after a forward pass that used another weight."""

    def penalty(self, batch):
        with torch.no_grad():
            self.net[0].bias.clamp_(-0.2, 0.2)
        return 0.0


@pytest.mark.parametrize("kind", [TwoBuffers, MaxNorm, Clamps])
def test_a_step_may_write_a_tensor_that_lies_beside_others(kind):
    check_equals_lightning(kind, steps=3)


class CallsItself(Small):
    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])


def test_copies_have_one_compiled_code_and_equal_lightning(monkeypatch):
    compiled, calls, compiler = [], [], torch.compile

    def counting(graph, inputs):
        compiled.append(graph)
        return lambda *given: (calls.append(1), graph.forward(*given))[1]

    monkeypatch.setattr("fl_lightning.execution.compiling._trouble", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, **kw: compiler(function, backend=counting, **kw))
    torch._dynamo.reset()
    settings = {"data": sites(), "executor": SequentialExecutor(compile=True)}
    run = federated(new(CallsItself, torch.float64), rounds=3, **settings)
    expected = lightning_rounds(CallsItself, 3, dtype=torch.float64)[1]
    check_tensors(tensors(run.model), expected, 1e-9, "server")
    two_clients, two_steps = 2, 2
    assert len(compiled) == 1
    assert len(calls) == (3 + 1) * two_clients * two_steps  # and the check before round 1
