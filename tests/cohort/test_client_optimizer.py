"""One torch optimizer over the rows of a cohort is one optimizer per client; its settings by group and by round."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.optimizers.checks import check_elementwise
from fl_lightning.optimizers.client import ClientOptimizer
from fl_lightning.optimizers.client_lr import MultiStep
from tests.support.helpers import SGD, blobs, by_hand, distance, small_cnn, train

WEIGHTS = [name for name, _ in small_cnn().named_parameters()]
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_optimizer_over_a_cohort_equals_one_per_client_bitwise(name, dtype):
    generator = torch.Generator().manual_seed(0)
    widths = {"weights": 37, "batch_norm": 8}
    start = {
        block: torch.randn(3, width, generator=generator, dtype=dtype) for block, width in widths.items()
    }
    blocks = {block: value.clone() for block, value in start.items()}
    gradients = {block: torch.zeros_like(value) for block, value in start.items()}
    overrides = {"batch_norm": {"weight_decay": 0.0, "lr_scale": 0.5}}
    cohort = ClientOptimizer(OPTIMIZERS[name], blocks, gradients, overrides, lr_factor=0.25)
    separate = [{block: value[i].clone() for block, value in start.items()} for i in range(3)]
    steppers = [
        OPTIMIZERS[name]([{"params": [own["weights"]]}, {"params": [own["batch_norm"]], "weight_decay": 0.0}])
        for own in separate
    ]
    for stepper in steppers:
        stepper.param_groups[0]["lr"] = 0.1 * 0.25
        stepper.param_groups[1]["lr"] = 0.1 * (0.5 * 0.25)
    for _ in range(4):
        for gradient in gradients.values():
            gradient.copy_(torch.randn(gradient.shape, generator=generator, dtype=dtype))
        cohort.step()
        for i, (own, stepper) in enumerate(zip(separate, steppers, strict=True)):
            for block, value in own.items():
                value.grad = gradients[block][i].clone()
            stepper.step()
    for block, rows in blocks.items():
        assert torch.equal(rows, torch.stack([own[block] for own in separate]))


class Warmup(torch.optim.SGD):
    """Counts its steps outside of its state, as optimizers of one's own may."""

    taken = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.taken += 1
        for group in self.param_groups:
            for value in group["params"]:
                value.sub_(value.grad, alpha=group["lr"] * min(1.0, self.taken / 10))


MORE_OPTIMIZERS = {
    **OPTIMIZERS,
    "plain momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "tensor rate": partial(torch.optim.SGD, lr=torch.tensor(0.1), momentum=0.9),
    "own": partial(Warmup, lr=0.1),
}


@pytest.mark.parametrize("history", ["steps", "changed settings", "rows with counts of their own"])
@pytest.mark.parametrize("name", MORE_OPTIMIZERS)
def test_a_restarted_optimizer_steps_as_a_new_one_bit_for_bit(name, history):
    generator = torch.Generator().manual_seed(0)
    start = {
        "weights": torch.randn(3, 37, generator=generator),
        "batch_norm": torch.randn(3, 8, generator=generator),
    }
    overrides = {"batch_norm": {"weight_decay": 0.01, "lr_scale": 0.3}}
    gradients = [
        {block: torch.randn(value.shape, generator=generator) for block, value in start.items()}
        for _ in range(3)
    ]

    def steps(optimizer, blocks):
        for block, value in blocks.items():
            value.copy_(start[block])
        for gradient in gradients:
            for block, value in gradient.items():
                optimizer._gradients[block].copy_(value)
            optimizer.step()
        return {block: value.clone() for block, value in blocks.items()}

    def fresh(lr_factor):
        blocks = {block: value.clone() for block, value in start.items()}
        zeros = {block: torch.zeros_like(value) for block, value in start.items()}
        return ClientOptimizer(MORE_OPTIMIZERS[name], blocks, zeros, overrides, lr_factor), blocks

    optimizer, blocks = fresh(0.7)
    if history.startswith("rows"):
        cannot = name in ("nadam", "adadelta")
        with pytest.raises(ConfigurationError, match="cannot be kept") if cannot else nullcontext():
            optimizer.restore_steps(
                {"weights": torch.tensor([1, 2, 3]), "batch_norm": torch.tensor([2, 2, 2])}
            )
    steps(optimizer, blocks)
    if history == "changed settings":
        for group in optimizer.torch.param_groups:
            group["lr"], group["weight_decay"] = 7.0, 3.0
    for _ in range(2):
        optimizer.restart()
        expected = steps(*fresh(0.7))
        for block, value in steps(optimizer, blocks).items():
            assert torch.equal(value, expected[block])


def test_a_rate_that_is_a_tensor_is_scaled_in_each_round_and_group_by_itself():
    rate = torch.tensor(0.1)
    blocks = {"weights": torch.ones(2, 5), "bias": torch.ones(2, 5)}
    zeros = {name: torch.zeros(2, 5) for name in blocks}
    optimizer = ClientOptimizer(
        partial(torch.optim.SGD, lr=rate), blocks, zeros, {"bias": {"lr_scale": 0.5}}, 0.5
    )
    for _ in range(3):
        assert [float(group["lr"]) for group in optimizer.torch.param_groups] == pytest.approx([0.05, 0.025])
        optimizer.restart()
    assert float(rate) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS", "SparseAdam"])
def test_an_optimizer_that_would_mix_the_clients_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"client_optimizer: {name}"):
        FederatedModule(small_cnn(), getattr(torch.optim, name), local_steps=1)


@pytest.mark.parametrize("largest", [1.0, 100.0, 1e4])
def test_a_step_that_depends_on_the_norm_over_all_clients_is_refused(largest):
    class Clipped(torch.optim.SGD):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], largest)
            return super().step(closure)

    with pytest.raises(ConfigurationError, match="Clipped is not elementwise"):
        check_elementwise(partial(Clipped, lr=0.1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_elementwise_optimizer_passes(name):
    check_elementwise(OPTIMIZERS[name])


def test_settings_that_torch_refuses_name_the_client_optimizer():
    with pytest.raises(ConfigurationError, match="client_optimizer: Nesterov momentum requires"):
        FederatedModule(small_cnn(), partial(torch.optim.SGD, lr=0.1, nesterov=True), local_steps=1)


@EXECUTORS
def test_a_parameter_group_has_its_own_weight_decay_and_learning_rate(executor):
    norm = [2, 3, 6, 7]

    def grouped(parameters):
        parameters = list(parameters)
        rest = [p for i, p in enumerate(parameters) if i not in norm]
        own = {"params": [parameters[i] for i in norm], "weight_decay": 0.0, "lr": 0.025}
        return torch.optim.SGD([{"params": rest}, own], lr=0.1, weight_decay=0.1)

    decayed = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    settings = {"client_optimizer": decayed, "local_steps": 2, "executor": executor()}
    overrides = {"batch_norm": {"weight_decay": 0.0, "lr_scale": 0.25}}
    federated = train(small_cnn(), blobs(), 3, parameter_groups=overrides, **settings)
    reference, _ = by_hand(small_cnn(), blobs(), 3, optimizer=grouped, steps=[2] * 3)
    assert distance(federated, reference) < 1e-10
    assert distance(federated, train(small_cnn(), blobs(), 3, **settings)) > 1e-3


@EXECUTORS
@pytest.mark.parametrize(("norm", "decays"), [("bn", "038"), ("gn", "01348")])
def test_two_groups_without_decay_leave_the_decay_of_weights_only(norm, decays, executor):
    # the scale of GN is a weight, as in FedBE's code; its shift is a bias
    names = [name for name, _ in small_cnn(norm).named_parameters()]

    def grouped(parameters):
        decayed, rest = [], []
        for name, parameter in zip(names, parameters, strict=True):
            layer, kind = name.split(".")
            (decayed if kind == "weight" and layer in decays else rest).append(parameter)
        return torch.optim.SGD(
            [{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=0.1, momentum=0.9
        )

    everywhere = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    settings = {"client_optimizer": everywhere, "local_steps": 2, "executor": executor()}
    overrides = {"batch_norm": {"weight_decay": 0.0}, "bias": {"weight_decay": 0.0}}
    federated = train(small_cnn(norm), blobs(), 3, parameter_groups=overrides, **settings)
    reference, _ = by_hand(small_cnn(norm), blobs(), 3, optimizer=grouped, steps=[2] * 3)
    assert distance(federated, reference) < 1e-10
    assert distance(federated, train(small_cnn(norm), blobs(), 3, **settings)) > 1e-3


def test_the_bias_group_holds_every_bias_but_those_of_bn():
    frozen = train(small_cnn(), blobs(), 2, parameter_groups={"bias": {"lr": 0.0}})
    start = small_cnn().double().state_dict()
    still = {name for name in WEIGHTS if float((frozen[name] - start[name]).abs().max()) < 1e-14}
    assert still == {"0.bias", "3.bias", "8.bias"}


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ({"bn": {"lr": 0.1}}, "parameter_groups: 'bn' must be one of batch_norm, scalars, bias"),
        ({"bias": {"lr_scale": -1}}, "parameter_groups.bias.lr_scale: -1 must be at least 0 and finite"),
        ({"bias": {"lr": -1}}, r"parameter_groups.bias \(lr: -1\): Invalid learning rate"),
        ({"scalars": {"momentum": -0.5}}, r"parameter_groups.scalars \(momentum: -0.5\): Invalid momentum"),
        (
            {"batch_norm": {"wd": 0.1}},
            "parameter_groups.batch_norm: 'wd' must be one of dampening, .*, weight_decay",
        ),
    ],
)
def test_a_parameter_group_setting_that_is_unknown_or_out_of_range_is_named(groups, named):
    with pytest.raises(ConfigurationError, match=named):
        FederatedModule(small_cnn(), SGD, local_steps=1, parameter_groups=groups)


@pytest.mark.parametrize("name", ["Muon", "LBFGS", "SparseAdam"])
def test_an_optimizer_that_cannot_step_a_pseudo_gradient_is_refused_at_the_server(name):
    with pytest.raises(ConfigurationError, match=f"server_optimizer: {name}"):
        FederatedModule(small_cnn(), SGD, getattr(torch.optim, name), local_steps=1)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_the_trial_step_of_a_server_optimizer_leaves_the_model_as_it_is(name):
    model = small_cnn()
    before = [p.detach().clone() for p in model.parameters()]
    FederatedModule(model, SGD, partial(getattr(torch.optim, name), weight_decay=0.1), local_steps=1)
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(model.parameters(), before, strict=True))


def test_a_milestone_round_still_has_the_old_rate():
    assert [MultiStep([2, 4], 0.1)(r, 6) for r in range(1, 7)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert [MultiStep([0.5], 0.5)(r, 5) for r in range(1, 6)] == [1, 1, 0.5, 0.5, 0.5]
    assert MultiStep([0.29], 0.5)(29, 100) == 1
    assert MultiStep([0.29], 0.5)(30, 100) == 0.5


def test_the_first_round_has_a_rate_of_its_own():
    schedule = MultiStep([1, 3], 0.1, first_round=0.5)
    assert [schedule(r, 4) for r in range(1, 5)] == pytest.approx([0.5, 0.1, 0.1, 0.01])
    whole = partial(train, small_cnn(), blobs(), 1, client_lr_schedule=MultiStep([], first_round=0.5))
    halved = train(small_cnn(), blobs(), 1, client_optimizer=partial(torch.optim.SGD, lr=0.05))
    assert distance(whole(client_optimizer=SGD), halved) == 0
    for factor in (0, -1, float("inf")):
        with pytest.raises(
            ConfigurationError, match=rf"MultiStep.first_round: {factor} must be above 0 and finite"
        ):
            MultiStep([2], first_round=factor)


@pytest.mark.parametrize("milestone", [0, -1, 1.0, 0.0, 2.5])
def test_a_milestone_out_of_range_is_named(milestone):
    with pytest.raises(ConfigurationError, match=rf"milestones: {milestone}"):
        MultiStep([milestone])
