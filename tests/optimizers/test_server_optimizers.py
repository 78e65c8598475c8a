"""FedAvgM, FedAdam and FedYogi are the recursions of their papers; statistics never pass through them."""

from functools import partial

import pytest
import torch

from fl_lightning import ConfigurationError, FederatedModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FedBN
from fl_lightning.optimizers.server import FedAdam, FedYogi
from tests.support.command_line import run as command
from tests.support.command_line import write_config
from tests.support.contract import contents
from tests.support.helpers import SGD, SaveRounds, States, blobs, by_hand, distance, fit, small_cnn, train

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
ADAPTIVE = pytest.mark.parametrize("kind", [FedAdam, FedYogi])
SIZES = (16, 32, 24)
LR, BETAS, TAU = 0.03, (0.8, 0.95), 0.02


def run(server, executor=SequentialExecutor, rounds=5, callbacks=()):
    settings = {"server_optimizer": server, "local_steps": 2, "executor": executor()}
    return train(small_cnn(), blobs(sizes=SIZES), rounds, callbacks, **settings)


def reference(server, rounds=5):
    """The server's state by hand; ``server`` makes (u or (m, v), Delta) -> (the new ones, the step) of a parameter."""
    memory = {}

    def step(name, old, mean):
        memory[name], change = server(memory.get(name), mean - old)
        return old + change

    return by_hand(small_cnn(), blobs(sizes=SIZES), rounds, steps=[2] * 3, weights=SIZES, server=step)[0]


def momentum(velocity, delta, rho=0.9, eta=0.5):
    velocity = rho * (0 if velocity is None else velocity) + delta
    return velocity, eta * velocity


def adaptive(moments, delta, kind, start=TAU**2, correct=False, swapped=False):
    """Reddi et al., Algorithm 2; what it is not: v from 0, Adam's bias correction, and Yogi's sign the other way."""
    m, v, count = moments or (0, torch.full_like(delta, start), 0)
    m = BETAS[0] * m + (1 - BETAS[0]) * delta
    if kind is FedAdam:
        v = BETAS[1] * v + (1 - BETAS[1]) * delta**2
    else:
        v = v - (1 - BETAS[1]) * delta**2 * torch.sign(delta**2 - v if swapped else v - delta**2)
    count += 1
    first, second = (m / (1 - BETAS[0] ** count), v / (1 - BETAS[1] ** count)) if correct else (m, v)
    return (m, v, count), LR * first / (second.sqrt() + TAU)


@EXECUTORS
def test_sgd_with_momentum_is_fedavgm(executor):
    federated = run(partial(torch.optim.SGD, lr=0.5, momentum=0.9), executor)
    assert distance(federated, reference(momentum)) < 1e-10
    for mutant in (partial(momentum, rho=0.8), partial(momentum, eta=0.6)):
        assert distance(federated, reference(mutant)) > 1e-3


@EXECUTORS
def test_fedavgm_without_momentum_and_rate_one_is_fedavg(executor):
    assert distance(run(partial(torch.optim.SGD, lr=1.0, momentum=0.0), executor), run(None, executor)) == 0
    assert distance(run(None, executor), reference(partial(momentum, rho=0.0, eta=1.0))) < 1e-10


@EXECUTORS
@ADAPTIVE
def test_adaptive_servers_are_the_papers_recursions(kind, executor):
    federated = run(partial(kind, lr=LR, betas=BETAS, tau=TAU), executor)
    assert distance(federated, reference(partial(adaptive, kind=kind))) < 1e-10
    other = FedYogi if kind is FedAdam else FedAdam
    wrong = [{"kind": other}, {"kind": kind, "start": 0.0}, {"kind": kind, "correct": True}]
    if kind is FedYogi:
        wrong.append({"kind": kind, "swapped": True, "start": 1.0})
    for settings in wrong:
        assert distance(federated, reference(partial(adaptive, **settings))) > 1e-4


@ADAPTIVE
def test_statistics_never_pass_through_them(kind):
    still = States()
    run(partial(kind, lr=0.0), rounds=3, callbacks=[still])
    expected = by_hand(
        small_cnn(), blobs(sizes=SIZES), 3, steps=[2] * 3, weights=SIZES, server=lambda name, old, mean: old
    )[0]
    weights = {name for name, _ in small_cnn().named_parameters()}
    assert all(torch.equal(still.states[3][name], still.states[0][name]) for name in weights)
    statistics = {name: value for name, value in expected.items() if name not in weights}
    assert distance(statistics, still.states[3]) < 1e-10
    assert not torch.equal(still.states[3]["1.running_var"], still.states[0]["1.running_var"])


@ADAPTIVE
def test_what_clients_keep_for_themselves_does_not_pass_through_them(kind):
    module = FederatedModule(
        small_cnn(), partial(torch.optim.SGD, lr=0.1), partial(kind, lr=0.1), local_steps=2
    )
    trainer = fit(module, blobs(), 2, [FedBN()])
    stepped = {id(parameter) for parameter in trainer.optimizers[0].state}
    names = {name for name, parameter in module.model.named_parameters() if id(parameter) in stepped}
    assert names == {f"{layer}.{part}" for layer in (0, 3, 8) for part in ("weight", "bias")}


@EXECUTORS
@ADAPTIVE
def test_a_resumed_run_ends_in_the_same_checkpoint_bit_for_bit(kind, executor, tmp_path):
    def checkpoint(path=None):
        module = FederatedModule(
            small_cnn(),
            partial(torch.optim.SGD, lr=0.1),
            partial(kind, lr=0.1),
            local_steps=2,
            executor=executor(),
        )
        fit(module, blobs(sizes=SIZES), 4, [SaveRounds(tmp_path)], path)
        return contents(tmp_path / "4.ckpt")

    whole, resumed = checkpoint(), checkpoint(tmp_path / "2.ckpt")
    assert whole.keys() == resumed.keys()
    assert any("'v'" in place for place in whole)
    for place, leaf in whole.items():
        assert torch.equal(leaf, resumed[place]) if torch.is_tensor(leaf) else leaf == resumed[place]


@ADAPTIVE
def test_it_is_known_by_its_bare_name_in_yaml(kind):
    write_config(
        {
            "model.server_optimizer": {
                "class_path": kind.__name__,
                "init_args": {"lr": 0.05, "betas": [0.5, 0.75], "tau": 0.01},
            }
        }
    )
    cli = command("--trainer.fast_dev_run", "true")
    optimizer = cli.trainer.optimizers[0]
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["tau"]) == (0.05, (0.5, 0.75), 0.01)


@ADAPTIVE
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": -1.0}, r"lr: -1\.0 must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas: 1\.0 must be at least 0 and below 1"),
        ({"tau": 0.0}, r"tau: 0\.0 must be above 0"),
    ],
)
def test_a_setting_out_of_range_is_named(kind, settings, told):
    with pytest.raises(ConfigurationError, match=rf"server_optimizer: {kind.__name__}\.{told}"):
        run(partial(kind, **settings))


def test_lightnings_monitor_calls_the_rate_the_servers():
    """Groups of a server optimizer with several groups keep their names, which must differ."""
    one = FederatedModule(small_cnn(), SGD, local_steps=1).configure_optimizers()
    assert [group["name"] for group in one.param_groups] == ["server"]

    def halves(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=1.0)

    two = FederatedModule(small_cnn(), SGD, local_steps=1, server_optimizer=halves).configure_optimizers()
    assert ["name" in group for group in two.param_groups] == [False, False]
