"""Models whose forward pass does more than compute: they train as in plain PyTorch, or are refused before round 1."""

import copy
import itertools
import random
from collections import deque
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule, FederatedModule
from fl_lightning.callbacks import FBN, MaintainedMomentum
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.experiments.run_directory.config_digest import config_hash
from fl_lightning.randomness import derive_seed, seed_everything
from fl_lightning.round import first_steps
from tests.support.helpers import ArrayClient, blobs, client_batch, distance, fit, small_cnn, train
from tests.support.outcomes import outcome, same

pytestmark = [
    pytest.mark.first_steps,
    pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training"),
]

STEPS = 5
ALL = (SequentialExecutor, VectorizedExecutor)


class Net(nn.Module):
    """Convolution, BN, and a head: the base of what follows."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.head(self.body(x))


class Checkpointed(Net):
    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class MaxNorm(Net):
    def forward(self, x):
        self.head.weight.data = torch.renorm(self.head.weight.data, 2, 0, 0.05)
        return super().forward(x)


class BufferData(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        out = super().forward(x) + self.seen
        self.seen.data = self.seen * 0.5 + out.detach().mean(0)
        return out


class BufferSet(BufferData):
    def forward(self, x):
        out = Net.forward(self, x) + self.seen
        self.seen.set_(self.seen * 0.5 + out.detach().mean(0))
        return out


class BufferReplaced(BufferData):
    def forward(self, x):
        out = Net.forward(self, x) + self.seen
        self.seen = self.seen * 0.5 + out.detach().mean(0)
        return out


class Growing(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        out = super().forward(x)
        self.seen.resize_(3).copy_(out.detach().mean(0))
        return out


class Codebook(Net):
    """A parameter that the forward pass replaces, as some VQ-VAEs do."""

    def forward(self, x):
        out = super().forward(x)
        self.head.bias = nn.Parameter(self.head.bias.detach() * 0.9)
        return out


class Momentum(Net):
    """A second head without gradients that follows the first one."""

    def __init__(self):
        super().__init__()
        self.slow = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.slow.weight.lerp_(self.head.weight, 0.5)
        features = self.body(x)
        return self.head(features) + 0.1 * self.slow(features)


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = (
            nn.Embedding(16, 8, max_norm=0.5),
            nn.BatchNorm1d(8),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        rows = (x.flatten(1).abs() * 5).long().clamp(max=15)
        return self.head(self.norm(self.table(rows).mean(1)))


class Reversed(Net):
    """Backward hooks that read a buffer, as in gradient reversal with a rate of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rate", torch.ones((), dtype=torch.float64))
        self.body[0].register_full_backward_hook(self.scale)

    def scale(self, layer, inputs, outputs):
        return tuple(None if one is None else one * self.rate for one in inputs)

    def forward(self, x):
        x = x.clone().requires_grad_() * self.body[0].weight.mean()
        out = super().forward(x)
        self.rate += 1.0
        return out


class Hooked(Net):
    def __init__(self):
        super().__init__()
        self.head.weight.register_hook(lambda gradient: 0.1 * gradient)


class HookedIfLarge(Net):
    """Clips gradients that the first steps do not have."""

    def __init__(self):
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-1e3, 1e3))


class HookedAfterwards(Net):
    def __init__(self):
        super().__init__()
        self.head.bias.register_post_accumulate_grad_hook(lambda bias: None)


class SpareHead(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4, 2)


class Branches(Net):
    def __init__(self):
        super().__init__()
        self.side = nn.Linear(4 * 36, 3)

    def forward(self, x):
        features = self.body(x)
        out = self.head(features)
        return out + self.side(features) if bool(x.mean() > 0.1) else out


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.other = nn.Conv2d(2, 4, 3, padding=1)
        self.other.weight = self.body[0].weight

    def forward(self, x):
        return super().forward(x) + self.other(x).mean((2, 3))[:, :3]


class Twice(Net):
    def forward(self, x):
        return self.head(self.body(x)) + 0.1 * self.head(self.body(x * 0.5))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.norm, self.head = nn.LSTM(12, 6, batch_first=True), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(self.cell(x.flatten(2).reshape(len(x), 6, 12))[0][:, -1]))


def spectral():
    net = Net()
    nn.utils.parametrizations.spectral_norm(net.head)
    return net


def spectral_of_the_old_api():
    net = Net()
    nn.utils.spectral_norm(net.body[0])
    nn.utils.spectral_norm(net.head)
    return net


def weight_normed():
    net = Net()
    nn.utils.parametrizations.weight_norm(net.head)
    return net


def weight_normed_by_the_old_api():
    net = Net()
    nn.utils.weight_norm(net.head)
    return net


def orthogonal():
    net = Net()
    nn.utils.parametrizations.orthogonal(net.head)
    return net


class Observed(Net):
    """Scales by the range of the features, which an observer of quantisation follows."""

    def __init__(self):
        super().__init__()
        self.range = torch.ao.quantization.MovingAverageMinMaxObserver()

    def forward(self, x):
        features = self.range(self.body(x))
        return self.head(features / (self.range.max_val - self.range.min_val))


class Quantile(Net):
    """Subtracts the running quantile 0.9 of the features."""

    def __init__(self):
        super().__init__()
        self.register_buffer("quantile", torch.ones(4 * 36))

    def forward(self, x):
        features = self.body(x)
        if self.training:
            self.quantile += 0.05 * (0.9 - (features.detach() < self.quantile).double().mean(0))
        return self.head(features - self.quantile)


class Padded(Net):
    """Under vmap torch masks the padding row of the first client alone."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4, padding_idx=0)
        self.scores = nn.Linear(4, 3)

    def forward(self, x):
        words = self.words(x.detach().flatten(1).mul(2).long().clamp(0, 4)).mean(1)
        return super().forward(x) + self.scores(words)


class Warming(Net):
    """Counts its forward passes in an attribute, of which all clients have one."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Waiting(Net):
    """A part of the model begins after four forward passes."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls = min(self.calls + 1, 4)
        out = super().forward(x)
        return out * 2 if self.calls == 4 else out


class Annealed(Net):
    def __init__(self):
        super().__init__()
        self.head.temperature = 1.0

    def forward(self, x):
        self.head.temperature *= 0.9999
        return super().forward(x) / self.head.temperature


class Queue(Net):
    """Keeps the last five batches' features."""

    def __init__(self):
        super().__init__()
        self.kept = deque(maxlen=5)

    def forward(self, x):
        features = self.body(x)
        self.kept.append(features.detach().mean(0))
        return self.head(features - 1e-4 * torch.stack([*self.kept]).mean(0))


class Average(Net):
    """A moving average in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.average = torch.zeros(4 * 36, dtype=torch.float64)

    def forward(self, x):
        features = self.body(x)
        self.average = 0.999 * self.average + 0.001 * features.detach().mean(0)
        return self.head(features - self.average)


class AverageInPlace(Average):
    def forward(self, x):
        features = self.body(x)
        self.average.lerp_(features.detach().mean(0), 0.001)
        return self.head(features - self.average)


class Largest(Net):
    """Scales by the largest value of all batches."""

    largest = 0.0

    def forward(self, x):
        self.largest = max(self.largest, float(x.max()))
        return super().forward(x) * (1 + 1e-4 * self.largest)


class Smallest(Net):
    smallest = float("inf")

    def forward(self, x):
        self.smallest = min(self.smallest, float(x.std()))
        return super().forward(x) * (1 + 1e-4 * self.smallest)


class Previous(Net):
    """Adds a trifle of the previous batch's output."""

    def __init__(self):
        super().__init__()
        self.previous = torch.zeros(3, dtype=torch.float64)

    def forward(self, x):
        out = super().forward(x)
        previous, self.previous = self.previous, out.detach().mean(0)
        return out + 1e-3 * previous


class Initialised(Net):
    """Takes its shift from the first batch."""

    shift = None

    def forward(self, x):
        if self.shift is None:
            self.shift = x.mean((0, 2, 3), keepdim=True)
        return super().forward(x - 1e-3 * self.shift)


class Listed(Net):
    """Takes its shift from the first batch, and keeps the shift in a list."""

    def __init__(self):
        super().__init__()
        self.shift = []

    def forward(self, x):
        if not self.shift:
            self.shift.append(float(x.mean()))
        return super().forward(x - 1e-3 * self.shift[0])


class Seen(Net):
    """Counts the classes that it has given, in a dict."""

    def __init__(self):
        super().__init__()
        self.given = {"classes": [0, 0, 0]}

    def forward(self, x):
        out = super().forward(x)
        for label in out.argmax(1).tolist():
            self.given["classes"][label] += 1
        return out


class Smoothing(nn.Module):
    """A loss that counts its calls."""

    calls = 0

    def forward(self, outputs, targets):
        self.calls += 1
        return cross_entropy(outputs, targets, label_smoothing=0.1 if self.calls > 6 else 0)


class Schedule:
    def __init__(self):
        self.calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return cross_entropy(outputs, targets) * (1 + 1e-6 * self.calls)


class Caching(Net):
    """Keeps what it has computed, to be looked at: shapes, features, positions, and the accuracy."""

    def __init__(self):
        super().__init__()
        self.shape, self.features, self.each, self.positions, self.tables = None, None, [], None, {}
        self.metric = MeanMetric()

    def forward(self, x):
        self.shape = tuple(x.shape[-2:])
        if self.positions is None:
            self.positions = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)
        if self.shape not in self.tables:
            self.tables[self.shape] = self.positions * 0.1
        self.each.clear()
        for layer in self.body:
            x = layer(x + self.tables[self.shape] if layer is self.body[0] else x)
            self.each.append(x)
        self.features = x
        self.metric.update(x.detach().mean())
        return self.head(self.features.view(len(x), -1))


class Whitened(Net):
    """Changes its input in place."""

    def forward(self, x):
        x -= 0.4
        with torch.no_grad():
            x.div_(1.7).clamp_(-3, 3)
        return super().forward(x)


class Rectified(Net):
    def __init__(self):
        super().__init__()
        self.body.insert(0, nn.ReLU(inplace=True))


class WhitenedAndHooked(Whitened, Padded):
    """Changes its input, and does what the executor for all clients cannot."""


class NoiseOfTorch(Net):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class NoiseOfNumPy(Net):
    def forward(self, x):
        return super().forward(x + 1e-4 * float(np.random.randn()))


class SkippedLayer(Net):
    """Stochastic depth with Python's random numbers."""

    def forward(self, x):
        features = self.body(x)
        return self.head(features if random.random() < 0.5 else features.square())


class OwnGenerator(Net):
    """Draws from a generator of its own."""

    def __init__(self, make):
        super().__init__()
        self.body[2].draws = make()

    def forward(self, x):
        draws = self.body[2].draws
        if isinstance(draws, torch.Generator):
            noise = float(torch.randn((), generator=draws))
        else:
            noise = draws.gauss(0, 1) if isinstance(draws, random.Random) else draws.normal()
        return super().forward(x + 1e-5 * noise)


class Unused(OwnGenerator):
    """Has a generator, for its first weights."""

    def __init__(self):
        super().__init__(torch.Generator)
        nn.init.normal_(self.head.weight, generator=self.body[2].draws)

    def forward(self, x):
        return Net.forward(self, x)


class NormEval(Net):
    """BN layers in eval mode, by the model's own ``train()``."""

    def train(self, mode=True):
        super().train(mode)
        self.body[1].eval()
        return self


class Merging(Net):
    """A head with an addition that is merged in eval mode."""

    def __init__(self):
        super().__init__()
        self.added, self.merged = nn.Parameter(torch.full((3, 4 * 36), 0.01)), False

    def train(self, mode=True):
        if self.merged == mode:
            self.head.weight.data += -self.added.data if mode else self.added.data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        features = self.body(x)
        return self.head(features) if self.merged else self.head(features) + features @ self.added.T


EQUAL = {
    "an embedding with padding": (Padded, (SequentialExecutor,)),
    "plain": (Net, ALL),
    "checkpointing": (Checkpointed, (SequentialExecutor,)),
    "max norm by .data": (MaxNorm, (SequentialExecutor,)),
    "buffer by .data": (BufferData, (SequentialExecutor,)),
    "buffer by set_": (BufferSet, (SequentialExecutor,)),
    "buffer replaced": (BufferReplaced, ALL),
    "embedding with max_norm": (Renormed, ALL),
    "backward hooks that read a buffer": (Reversed, (SequentialExecutor,)),
    "an unused head": (SpareHead, ALL),
    "a branch for some batches": (Branches, (SequentialExecutor,)),
    "tied weights": (Tied, ALL),
    "BN used twice": (Twice, ALL),
    "LSTM": (Recurrent, (SequentialExecutor,)),
    "spectral norm": (spectral, (SequentialExecutor,)),
    "spectral norm of the old API": (spectral_of_the_old_api, (SequentialExecutor,)),
    "weight norm": (weight_normed, ALL),
    "weight norm of the old API": (weight_normed_by_the_old_api, (SequentialExecutor,)),
    "an orthogonal weight": (orthogonal, (SequentialExecutor,)),
    "an observer of the range": (Observed, (SequentialExecutor,)),
    "a running quantile": (Quantile, ALL),
    "an input changed in place": (Whitened, ALL),
    "a rectifier in place first": (Rectified, ALL),
    "noise of torch": (NoiseOfTorch, (SequentialExecutor,)),
    "noise of NumPy": (NoiseOfNumPy, (SequentialExecutor,)),
    "a layer skipped by Python's random numbers": (SkippedLayer, (SequentialExecutor,)),
    "a generator for the first weights": (Unused, ALL),
    "caches in attributes": (Caching, (SequentialExecutor,)),
    "BN in eval mode by its own train()": (NormEval, ALL),
    "weights that are merged in eval mode": (Merging, ALL),
}  # fmt: skip


def data():
    return blobs(num_clients=2, sizes=(80, 80), batch_size=8)


def made(make):
    torch.manual_seed(0)
    return make().double()


def optimizer(parameters, lr=0.2, momentum=0.9, weight_decay=0.1):
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)


def module_of(model, executor, **settings):
    return FederatedModule(
        model, client_optimizer=optimizer, local_steps=STEPS, executor=executor(), **settings
    )


def by_hand(model, clients, client, optimizer=optimizer):
    model.train()
    steps = optimizer([x for x in model.parameters() if x.requires_grad])
    for step in range(STEPS):
        inputs, targets = client_batch(clients, client, step)
        steps.zero_grad()
        seed_everything(derive_seed(0, "model", 1, client, step))
        cross_entropy(model(inputs), targets).backward()
        steps.step()
    return model


# torch says that vmap is slow for some operations
@pytest.mark.filterwarnings("ignore:.*There is a performance drop because:UserWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("what", "executor"), [(what, one) for what, (_, each) in EQUAL.items() for one in each]
)
def test_a_client_trains_as_plain_pytorch(what, executor):
    make, clients = EQUAL[what][0], data()
    module = module_of(made(make), executor)
    fit(module, clients, rounds=1, precision="64-true")
    each = [by_hand(made(make), clients, client).state_dict() for client in (0, 1)]
    for name, value in module.model.state_dict().items():
        if name.endswith(("_u", "_v")):
            continue  # the singular vectors of the mean weight, not the mean vectors
        wanted = sum(state[name] for state in each) / 2
        torch.testing.assert_close(
            value, wanted.to(value.dtype), rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


REFUSED = {
    "a parameter replaced": (Codebook, SequentialExecutor, "'head.bias' differs from plain PyTorch"),
    "a buffer that grows": (Growing, SequentialExecutor, r"the forward pass changes the shape of 'seen' from \[1\] to \[3\]"),
    "parameters without gradient": (Momentum, SequentialExecutor, "changes 'slow.weight' of the server's model"),
    "a hook on a gradient": (Hooked, SequentialExecutor, "'head.weight' has a gradient hook, which clients' copies"),
    "a hook on large gradients": (HookedIfLarge, SequentialExecutor, "'head.weight' has a gradient hook"),
    "a hook after a gradient": (HookedAfterwards, SequentialExecutor, "'head.bias' has a gradient hook"),
    "a hook of clients at once": (HookedIfLarge, VectorizedExecutor, "'head.weight' has a gradient hook"),
    "a count in an attribute": (Warming, SequentialExecutor, "attribute 'model.calls'"),
    "a count that waits": (Waiting, SequentialExecutor, "attribute 'model.calls'"),
    "a count at once": (Waiting, VectorizedExecutor, "attribute 'model.calls'"),
    "a temperature": (Annealed, SequentialExecutor, "attribute 'model.head.temperature'"),
    "a queue": (Queue, SequentialExecutor, "attribute 'model.kept'"),
    "a moving average": (Average, SequentialExecutor, "attribute 'model.average'"),
    "a moving average in place": (AverageInPlace, SequentialExecutor, "attribute 'model.average'"),
    "a maximum": (Largest, SequentialExecutor, "attribute 'model.largest'"),
    "a minimum": (Smallest, SequentialExecutor, "attribute 'model.smallest'"),
    "a previous output": (Previous, SequentialExecutor, "attribute 'model.previous'"),
    "a shift by the first batch": (Initialised, SequentialExecutor, "attribute 'model.shift'"),
    "a shift in a list": (Listed, SequentialExecutor, "attribute 'model.shift'"),
    "counts in a dict": (Seen, SequentialExecutor, "attribute 'model.given'"),
    "a generator of torch": (partial(OwnGenerator, torch.Generator), SequentialExecutor, "attribute 'model.body.2.draws'"),
    "a generator of NumPy": (partial(OwnGenerator, np.random.default_rng), SequentialExecutor, "attribute 'model.body.2.draws'"),
    "an old generator of NumPy": (partial(OwnGenerator, np.random.RandomState), SequentialExecutor, "attribute 'model.body.2.draws'"),
    "a generator of Python": (partial(OwnGenerator, random.Random), VectorizedExecutor, "attribute 'model.body.2.draws'"),
    "noise of NumPy at once": (NoiseOfNumPy, VectorizedExecutor, "NoiseOfNumPy draws random numbers of NumPy or Python"),
    "skipped layers at once": (SkippedLayer, VectorizedExecutor, "SkippedLayer draws random numbers of NumPy or Python"),
    "noise of torch at once": (NoiseOfTorch, VectorizedExecutor, "draws random numbers"),
    "a padding row and an input in place": (WhitenedAndHooked, VectorizedExecutor, "'words.weight' differs from plain PyTorch"),
    "a padding row at once": (Padded, VectorizedExecutor, "'words.weight' differs from plain PyTorch"),
    "checkpointing at once": (Checkpointed, VectorizedExecutor, None),
    "max norm at once": (MaxNorm, VectorizedExecutor, None),
    "buffer.data at once": (BufferData, VectorizedExecutor, None),
    "set_ at once": (BufferSet, VectorizedExecutor, None),
    "hooks at once": (Reversed, VectorizedExecutor, None),
}  # fmt: skip


@pytest.mark.parametrize("loss", [Smoothing, Schedule])
def test_a_loss_that_counts_its_calls_is_refused(loss):
    with pytest.raises(ConfigurationError, match=r"attribute 'loss\.calls'"):
        fit(module_of(made(Net), SequentialExecutor, loss=loss()), data(), rounds=1)


def test_a_run_of_one_client_and_one_step_finds_a_count():
    module = FederatedModule(
        made(Waiting), optimizer, local_steps=1, participation=1, executor=SequentialExecutor()
    )
    with pytest.raises(ConfigurationError, match=r"attribute 'model\.calls'"):
        fit(module, data(), rounds=1)


@pytest.mark.filterwarnings("ignore:.*There is a performance drop because:UserWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_differ_is_refused_before_round_1(what):
    make, executor, words = REFUSED[what]
    module = module_of(made(make), executor)
    before = {name: value.clone() for name, value in module.model.state_dict().items()}
    with pytest.raises(ConfigurationError, match=words) as refused:
        fit(module, data(), rounds=1, precision="64-true")
    assert "\n" not in str(refused.value)
    print(refused.value)
    if what != "a buffer that grows":
        torch.testing.assert_close(dict(module.model.state_dict()), before, rtol=0, atol=0)


def adam(parameters, **settings):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, **settings)


def test_an_unused_head_is_left_alone_by_an_optimizer_that_counts_steps_too():
    model = made(SpareHead)
    before = model.spare.weight.clone()
    module = FederatedModule(model, client_optimizer=adam, local_steps=STEPS)
    fit(module, data(), rounds=2)
    assert torch.equal(module.model.spare.weight, before)


DAMPENED = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.9)


@pytest.mark.filterwarnings("ignore:.*There is a performance drop because:UserWarning")
@pytest.mark.parametrize("executor", ALL)
def test_an_unused_head_leaves_the_first_step_of_dampened_sgd_as_in_plain_pytorch(executor):
    module = FederatedModule(
        made(SpareHead), client_optimizer=DAMPENED, local_steps=STEPS, executor=executor()
    )
    fit(module, data(), rounds=1, precision="64-true")
    each = [by_hand(made(SpareHead), data(), client, DAMPENED).state_dict() for client in (0, 1)]
    for name, value in module.model.state_dict().items():
        wanted = sum(state[name] for state in each) / 2
        torch.testing.assert_close(value, wanted.to(value.dtype), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("client_optimizer", [adam, DAMPENED], ids=["AdamW", "SGD"])
def test_an_optimizer_that_counts_steps_refuses_a_branch_for_some_batches(client_optimizer, request):
    module = FederatedModule(made(Branches), client_optimizer=client_optimizer, local_steps=STEPS)
    kind = request.node.callspec.id
    line = (
        rf"client_optimizer {kind}: parameter 'side\..*' has a gradient in some local steps only, .*; use SGD"
    )
    with pytest.raises(ConfigurationError, match=line):
        fit(module, data(), rounds=1)


def test_step_counts_that_are_kept_refuse_a_step_without_gradient():
    module = FederatedModule(made(Branches), client_optimizer=adam, local_steps=1)
    line = r"AdamW: parameter 'side\..*' has a gradient in some local steps only"
    with pytest.raises(ConfigurationError, match=line):
        fit(module, data(), rounds=8, callbacks=[MaintainedMomentum()])


def test_step_counts_of_a_new_round_train_a_branch_for_some_rounds():
    module = FederatedModule(made(Branches), client_optimizer=adam, local_steps=1)
    before = {name: value.clone() for name, value in module.model.side.state_dict().items()}
    fit(module, data(), rounds=8)
    assert any(not torch.equal(value, before[name]) for name, value in module.model.side.state_dict().items())


def test_dampened_momentum_that_is_kept_trains_a_branch_for_some_batches():
    """It starts from zeros, so that a parameter's first step is as every other."""
    module = FederatedModule(made(Branches), client_optimizer=DAMPENED, local_steps=STEPS)
    fit(module, data(), rounds=2, callbacks=[MaintainedMomentum()])


class Pulls(FederatedCallback):
    """Pulls every parameter towards 1, used or not."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for name, block in cohort.grads.blocks.items():
            block += cohort.params.blocks[name] - 1


def test_a_method_may_give_unused_parameters_a_gradient():
    module = FederatedModule(
        made(SpareHead), client_optimizer=partial(torch.optim.SGD, lr=0.5), local_steps=1
    )
    wanted = (module.model.spare.weight + 1).detach() / 2
    fit(module, data(), rounds=1, callbacks=[Pulls()])
    torch.testing.assert_close(module.model.spare.weight.detach(), wanted)


@pytest.mark.parametrize("executor", ALL)
def test_the_check_leaves_a_run_as_it_was_bit_for_bit(executor):
    found = [
        outcome(small_cnn("bn", dropout=0.5), blobs(), executor(), [FBN()], check_first_steps=check)
        for check in (True, False)
    ]
    assert same(*found)


CALLS = []


class Counts(Net):
    """Keeps a tensor and a number in attributes, and draws random numbers."""

    last, length = None, 0

    def forward(self, x):
        CALLS.append(self.length)
        self.last, self.length = (
            super().forward(x + torch.rand(()) + random.random() + np.random.rand()),
            len(x),
        )
        return self.last


def test_the_check_leaves_attributes_and_generators_as_they_were():
    found = [outcome(made(Counts), blobs(), SequentialExecutor(), check_first_steps=x) for x in (True, False)]
    assert same(*found)
    calls = []
    for check in (True, False):
        CALLS.clear()
        module = module_of(made(Counts), SequentialExecutor, check_first_steps=check)
        fit(module, data(), rounds=1, precision="64-true")
        calls.append(CALLS[-2 * STEPS :])
    assert calls[0] == calls[1] == [0, *[8] * (2 * STEPS - 1)]


@pytest.mark.parametrize("too_far", [3, 9])
def test_a_difference_is_compared_with_further_measurements_of_rounding(monkeypatch, too_far):
    """In a trained model, a rounding may turn a ReLU on or off, which few measurements show."""
    noises = []

    def compares(run, before, torchs, executors, noise):
        noises.append(noise["body.0.weight"])
        return {"body.0.weight": 0.01} if len(noises) < too_far else {}

    monkeypatch.setattr(first_steps, "_too_far", compares)
    refused = pytest.raises(ConfigurationError, match=r"body.0.weight' differs from plain PyTorch by 1%")
    with refused if too_far > first_steps._DRAWS else nullcontext():
        fit(module_of(made(Net), VectorizedExecutor), data(), rounds=1)
    assert noises[:3] == sorted(noises[:3])
    assert 0 < noises[0] < noises[1]


def test_without_the_check_such_a_model_is_trained():
    module = module_of(made(Codebook), SequentialExecutor, check_first_steps=False)
    fit(module, data(), rounds=1)
    assert module.record.samples


def test_the_check_does_not_name_a_run():
    hashes = [
        config_hash({"model": {"local_steps": 1, "check_first_steps": check}, "data": {}, "trainer": {}})
        for check in (True, False)
    ]
    assert hashes[0] == hashes[1]


def quantised():
    """The smallest net for quantisation-aware training: fake quantisation with observers that keep minimum and maximum."""
    fake = torch.ao.quantization.FakeQuantize.with_args(
        observer=torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    )
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), fake(), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )  # fmt: skip


def timm_model(name, **settings):
    return pytest.importorskip("timm").create_model(name, num_classes=3, **settings)


def gradient_checkpointing():
    model = timm_model("resnet10t")
    model.set_grad_checkpointing()
    return model


VISION = {
    "resnet18": {},
    "densenet121": {"memory_efficient": True},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "efficientnet_b0": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "mnasnet0_5": {},
    "regnet_y_400mf": {},
    "VisionTransformer": {
        "image_size": 32, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64
    },
}  # fmt: skip


def vision(name):
    return getattr(torchvision.models, name)(num_classes=3, **VISION[name])


SLOW = ("resnet18", "densenet121", "timm with gradient checkpointing")
"""Models that take a processor without bfloat16 half a minute each."""

CASES = [
    (SequentialExecutor, "32-true"),
    (partial(VectorizedExecutor, where_possible=True), "32-true"),
    (partial(VectorizedExecutor, where_possible=True), "bf16-mixed"),
]

TIMM = ("byobnet", "convnext", "efficientnet", "nfnet", "resnet", "vit")
"""timm's smallest model of each family."""


def tiny(name):
    return timm_model(f"test_{name}", **({"img_size": 32} if name == "vit" else {}))


REAL = (
    {name: partial(vision, name) for name in VISION}
    | {f"timm's {x}": partial(tiny, x) for x in TIMM}
    | {"quantisation-aware": quantised, "timm with gradient checkpointing": gradient_checkpointing}
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*There is a performance drop because:UserWarning")
@pytest.mark.parametrize(
    ("what", "executor", "precision"),
    [
        (what, kind, precision)
        for what in REAL
        for kind, precision in CASES
        if precision == "32-true" or what not in SLOW
    ],
)
def test_real_models_train_as_in_plain_pytorch(what, executor, precision):
    torch.manual_seed(0)
    client = ArrayClient(torch.randn(24, 3, 32, 32), torch.randint(3, (24,)), 8)
    settings = {"local_steps": 2, "executor": executor()}
    module = FederatedModule(REAL[what](), partial(torch.optim.SGD, lr=0.01), **settings)
    if what == "densenet121" and isinstance(module.executor, VectorizedExecutor):
        with pytest.raises(
            ConfigurationError, match=r"num_batches_tracked' differs .*: use SequentialExecutor"
        ):
            fit(module, FederatedDataModule([client]), rounds=1, precision=precision)
    else:
        fit(module, FederatedDataModule([client]), rounds=1, precision=precision)
        assert module.record.samples


class Slotted:
    """Counts calls, in an object without ``__dict__``."""

    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0

    def scale(self):
        self.calls += 1
        return 1 + 0.004 * self.calls


class Scheduled(Net):
    def __init__(self):
        super().__init__()
        self.schedule = Slotted()

    def forward(self, x):
        return super().forward(x) * self.schedule.scale()


class Iterated(Net):
    def __init__(self):
        super().__init__()
        self.steps = itertools.count()

    def forward(self, x):
        return super().forward(x) * (1 + 0.004 * next(self.steps))


@pytest.mark.parametrize(("model", "name"), [(Scheduled, "schedule"), (Iterated, "steps")])
def test_state_in_an_object_is_found(model, name):
    with pytest.raises(ConfigurationError, match=rf"attribute 'model\.{name}'"):
        fit(module_of(model(), SequentialExecutor), blobs(), 1)


class Held(Net):
    """Has attributes that have no form as bytes."""

    def __init__(self):
        super().__init__()
        self.choose, self.meta, self.turns = lambda x: x, torch.empty(2, device="meta"), torch.ones(2) * 1j

    def forward(self, x):
        return super().forward(self.choose(x))


class Lengths(Net):
    """Keeps a mask for each number of samples."""

    def __init__(self):
        super().__init__()
        self.masks = {}

    def forward(self, x):
        if len(x) not in self.masks:
            self.masks[len(x)] = x.new_ones(len(x), 1)
        return super().forward(x) * self.masks[len(x)]


@pytest.mark.parametrize("model", [Held, Lengths])
def test_attributes_that_change_no_number_are_accepted(model):
    data = blobs()
    data.clients[1].batch_size = 4
    fit(module_of(model(), SequentialExecutor), data, 1)


def test_a_layer_may_keep_its_last_output_under_vmap():
    """Nothing but the layer reads this attribute, which every forward pass writes again."""

    class KeepsOutput(nn.Module):
        def forward(self, inputs):
            self.last = inputs * 2
            return self.last

    network = small_cnn()
    states = [
        train(nn.Sequential(KeepsOutput(), copy.deepcopy(network)), blobs(), 2, executor=executor)
        for executor in (SequentialExecutor(), VectorizedExecutor())
    ]
    assert distance(*states) < 1e-12


class TwoViews(Net):
    """A siamese network: two forward passes of the same layers in a step."""

    def forward(self, x):
        return super().forward(x) + super().forward(x.flip(-1))


class Cumulative(TwoViews):
    """Two passes, with running statistics that are plain means."""

    def __init__(self):
        super().__init__()
        self.body[1].momentum = None


REPEATED = "BN: 'body.1' and 0 other layers update running statistics 2 times in a local step, as by"


@pytest.mark.parametrize(
    ("model", "end"),
    [
        (Checkpointed, ": a momentum of 0.1 acts as 0.19"),
        (TwoViews, ": a momentum of 0.1 acts as 0.19"),
        (Cumulative, "several forward passes"),
        (Net, None),
    ],
)
@pytest.mark.parametrize("local_steps", [1, 3])
def test_statistics_that_a_step_updates_twice_are_said_once(model, end, local_steps, capsys):
    train(model(), blobs(), 2, local_steps=local_steps, executor=SequentialExecutor())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BN: ")]
    if end is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(REPEATED)
        assert line.endswith(end)
