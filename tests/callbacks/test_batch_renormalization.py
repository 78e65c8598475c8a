"""Batch Renormalization: Algorithm 1 of Ioffe, arXiv 1702.03275, by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning import ConfigurationError, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import BatchRenormalization
from fl_lightning.callbacks.batch_renormalization import RenormalizedBatchNorm
from tests.support.helpers import blobs, distance, small_cnn, train

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
SETTINGS = {"r_max": 1.3, "d_max": 0.4, "r_growth": (1, 5), "d_growth": (0, 4), "momentum": 0.2, "eps": 1e-2}


class ByHand(nn.Module):
    """The algorithm with a running standard deviation, for images ``[b, channels, h, w]``."""

    mutant = None

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.mean, self.deviation, self.time = 0.0, (1 + layer.eps) ** 0.5, 0

    def forward(self, x):
        r_max, d_max = (
            first + (SETTINGS[last] - first) * min(max((self.time - start) / (end - start), 0), 1)
            for first, last, (start, end) in (
                (1, "r_max", SETTINGS["r_growth"]),
                (0, "d_max", SETTINGS["d_growth"]),
            )
        )
        mean = x.mean((0, 2, 3))
        deviation = (x.var((0, 2, 3), correction=0) + SETTINGS["eps"]).sqrt()
        if self.mutant == "std + eps":
            deviation = x.std((0, 2, 3), correction=0) + SETTINGS["eps"]
        stopped = (mean, deviation) if self.mutant == "gradient" else (mean.detach(), deviation.detach())
        r = (stopped[1] / self.deviation).clamp(1 / r_max, r_max)
        d = ((stopped[0] - self.mean) / self.deviation).clamp(-d_max, d_max)
        rate = SETTINGS["momentum"]
        self.mean = self.mean + rate * (mean.detach() - self.mean)
        self.deviation = self.deviation + rate * (deviation.detach() - self.deviation)
        self.time += 1
        scaled = (x - mean.view(-1, 1, 1)) / deviation.view(-1, 1, 1) * r.view(-1, 1, 1) + d.view(-1, 1, 1)
        return scaled * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()


def by_hand(mutant=None, steps=6):
    """A client's plain training: the trained parameters, the running mean and the running deviation."""
    network = model()
    layer = network[1] = ByHand(network[1])
    layer.mutant = mutant
    data = blobs(1)
    data.setup("fit")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = data.cohort_batch([0], [step]).batches()[0]
        optimizer.zero_grad()
        F.cross_entropy(network(inputs.double()), targets).backward()
        optimizer.step()
    return {n: x.detach() for n, x in network.named_parameters()}, layer.mean, layer.deviation


@EXECUTORS
def test_it_equals_the_algorithm_by_hand_over_rounds_of_several_steps(executor):
    callbacks = [BatchRenormalization(**SETTINGS)]
    state = train(model(), blobs(1), rounds=2, callbacks=callbacks, local_steps=3, executor=executor())
    parameters, mean, deviation = by_hand()
    assert distance({name: state[name] for name in parameters}, parameters) < 1e-12
    assert torch.allclose(state["1.running_mean"], mean, atol=1e-12)
    assert torch.allclose((state["1.running_var"] + 1e-5).sqrt(), deviation, atol=1e-12)
    for mutant in ("gradient", "std + eps"):
        assert distance({name: state[name] for name in parameters}, by_hand(mutant)[0]) > 1e-4


@EXECUTORS
def test_with_closed_limits_the_weights_are_those_of_bn(executor):
    settings = {"rounds": 3, "local_steps": 2, "executor": executor()}
    closed = BatchRenormalization(r_max=1, d_max=0, eps=1e-5)
    state, bn = (
        train(small_cnn(), blobs(), callbacks=[closed], **settings),
        train(small_cnn(), blobs(), **settings),
    )
    weights = [name for name, _ in small_cnn().named_parameters()]
    assert distance({n: state[n] for n in weights}, {n: bn[n] for n in weights}) < 1e-10
    eps = train(small_cnn(), blobs(), callbacks=[BatchRenormalization(r_max=1, d_max=0)], **settings)
    assert distance({n: eps[n] for n in weights}, {n: bn[n] for n in weights}) > 1e-5


@pytest.mark.parametrize("affine", [True, False])
def test_without_limits_the_forward_pass_normalises_with_running_statistics(affine):
    torch.manual_seed(0)
    layer, inputs = nn.BatchNorm2d(3, affine=affine).double(), 4 + 2 * torch.randn(8, 3, 5, 5).double()
    layer(inputs + 1)
    expected = layer.eval()(inputs)
    layer.__class__ = type("Unlimited", (RenormalizedBatchNorm, nn.BatchNorm2d), {})
    layer.prepare()
    open_limits = BatchRenormalization(r_max=1e9, d_max=1e9, r_growth=(0, 1), d_growth=(0, 1), eps=1e-5)
    layer.train().settings = open_limits
    assert torch.allclose(layer(inputs), expected, atol=1e-10)


def test_limits_stay_at_their_last_values():
    limits = BatchRenormalization(r_max=3.0, d_max=8.0, r_growth=(2, 4), d_growth=(0, 4)).limits
    found = [limits(torch.tensor(time)) for time in (0, 2, 3, 4, 9)]
    assert [(float(r), float(d)) for r, d in found] == [(1, 0), (1, 4), (2, 6), (3, 8), (3, 8)]


def test_an_eps_below_that_of_the_layers_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"BatchRenormalization.eps: 1e-06 must be at least 1e-05, the eps of the"
    ):
        train(small_cnn(), blobs(), callbacks=[BatchRenormalization(eps=1e-6)], rounds=1)


def test_times_count_rounds_if_asked():
    growth = {**SETTINGS, "r_growth": (0, 2), "d_growth": (0, 2)}
    one_step = {"rounds": 4, "local_steps": 1}
    steps, rounds = (
        train(small_cnn(), blobs(), callbacks=[BatchRenormalization(**growth, unit=unit)], **one_step)
        for unit in ("steps", "rounds")
    )
    assert distance(steps, rounds) < 1e-14  # a round is a step
    steps, rounds = (
        train(
            small_cnn(),
            blobs(),
            callbacks=[BatchRenormalization(**growth, unit=unit)],
            rounds=2,
            local_steps=3,
        )
        for unit in ("steps", "rounds")
    )
    assert distance(steps, rounds) > 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r_max": 0.5}, "BatchRenormalization.r_max: 0.5 must be at least 1"),
        ({"d_max": float("inf")}, "BatchRenormalization.d_max: inf must be at least 0 and finite"),
        (
            {"d_growth": (3, 3)},
            r"BatchRenormalization.d_growth: \(3, 3\) must be two times, the earlier first",
        ),
        ({"unit": "epochs"}, "BatchRenormalization.unit: 'epochs' must be one of steps, rounds"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        BatchRenormalization(**settings)
