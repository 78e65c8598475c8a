"""Models whose forward pass does more than compute: they train as in plain PyTorch, or are refused before round 1."""

import copy
from functools import partial

import pytest
import torch
import torchvision
from helpers import ArrayClient, blobs, client_batch, fit, small_cnn
from outcomes import outcome, same
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule, FederatedModule
from fl_lightning.callbacks import FBN, MaintainedMomentum
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.experiments.run_directory.description import config_hash

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
    steps = optimizer([x for x in model.parameters() if x.requires_grad])
    for step in range(STEPS):
        inputs, targets = client_batch(clients, client, step)
        steps.zero_grad()
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
            value,
            wanted.to(value.dtype),
            rtol=1e-10,
            atol=1e-12,
            msg=lambda text, n=name: f"{n}: {text}",
        )


REFUSED = {
    "a parameter replaced": (Codebook, SequentialExecutor, "'head.bias' differs from plain PyTorch"),
    "a buffer that grows": (Growing, SequentialExecutor, r"the forward pass changes the shape of 'seen' from \[1\] to \[3\]"),
    "parameters without gradient": (Momentum, SequentialExecutor, "changes 'slow.weight' of the server's model"),
    "a hook on a gradient": (Hooked, SequentialExecutor, "'head.weight' has a gradient hook"),
    "a count in an attribute": (Warming, SequentialExecutor, "differs from plain PyTorch"),
    "a padding row at once": (Padded, VectorizedExecutor, "'words.weight' differs from plain PyTorch"),
    "checkpointing at once": (Checkpointed, VectorizedExecutor, None),
    "max norm at once": (MaxNorm, VectorizedExecutor, None),
    "buffer.data at once": (BufferData, VectorizedExecutor, None),
    "set_ at once": (BufferSet, VectorizedExecutor, None),
    "hooks at once": (Reversed, VectorizedExecutor, None),
}  # fmt: skip


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
    line = rf"client_optimizer {kind}: parameter 'side\..*' had no gradient in an earlier local step of this round .*; use SGD"
    with pytest.raises(ConfigurationError, match=line):
        fit(module, data(), rounds=1)


def test_step_counts_that_are_kept_refuse_a_step_without_gradient():
    module = FederatedModule(made(Branches), client_optimizer=adam, local_steps=1)
    line = r"AdamW: parameter 'side\..*' has no gradient in a local step, and step counts are kept between rounds"
    with pytest.raises(ConfigurationError, match=line):
        fit(module, data(), rounds=8, callbacks=[MaintainedMomentum()])


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


class Counts(Net):
    """Counts in an attribute, keeps a tensor in another, and draws random numbers."""

    calls, last = 0, None

    def forward(self, x):
        self.calls += 1
        self.last = super().forward(x + torch.rand(()))
        return self.last


def test_the_check_leaves_attributes_and_generators_as_they_were():
    found = [outcome(made(Counts), blobs(), SequentialExecutor(), check_first_steps=x) for x in (True, False)]
    assert same(*found)
    calls = []
    for check in (True, False):
        module = module_of(made(Counts), SequentialExecutor, check_first_steps=check)
        fit(module, data(), rounds=1, precision="64-true")
        calls.append(module.model.calls)
    assert calls[0] == calls[1] > 0


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
    | {
        "quantisation-aware": quantised,
        "timm with gradient checkpointing": gradient_checkpointing,
    }
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
