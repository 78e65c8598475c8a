"""SCAFFOLD: equal to separate models in plain PyTorch, to FedAvg and centralised training where it must be, and its limits."""

from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import (
    ClientDataModule,
    ClientFailures,
    ConfigurationError,
    FederatedDataModule,
    FederatedModule,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.callbacks import SCAFFOLD, FedBN, FedProx, FedRep, FixBN, MaintainedMomentum
from fl_lightning.cohort.rows import parameter_groups
from fl_lightning.optimizers.client_lr import MultiStep
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import (
    ClientStates,
    States,
    blobs,
    centralised,
    client_batch,
    distance,
    fit,
    small_cnn,
    train,
    uneven_clients,
)

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
SIZES = (16, 24, 40, 32)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.02)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)
TWO_OF_FOUR = partial(sample_cohort, 4, 2, 0)


def scaffold(model, data, rounds, *, steps, cohort=range, rate, weights=(1, 1, 1, 1)):
    """Algorithm 1 of the paper, option II, with separate models, stepped by hand.

    Args:
        steps: Local steps of each client.
        cohort: The clients of a round.
        rate: Learning rate of a parameter in a round, from (round, name).
        weights: What each client weighs.

    Returns:
        The server's state, c, and each c_i, by name.
    """
    model = deepcopy(model).double().train()
    names = [name for name, _ in model.named_parameters()]
    c = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    own = [dict(c) for _ in weights]
    for number in range(1, rounds + 1):
        states, changes, members = [], [], cohort(number)
        for client in members:
            local = deepcopy(model)
            for step in range(steps[client]):
                inputs, targets = client_batch(data, client, (number - 1) * steps[client] + step)
                loss = cross_entropy(local(inputs), targets)
                gradients = torch.autograd.grad(loss, list(local.parameters()))
                with torch.no_grad():
                    for (name, theta), g in zip(local.named_parameters(), gradients, strict=True):
                        theta -= rate(number, name) * (g - own[client][name] + c[name])
            theirs = dict(local.named_parameters())
            new = {
                name: own[client][name]
                - c[name]
                + (theta - theirs[name]).detach() / (steps[client] * rate(number, name))
                for name, theta in model.named_parameters()
            }
            changes.append({name: new[name] - own[client][name] for name in names})
            own[client] = new
            states.append(local.state_dict())
        total = sum(weights[client] for client in members)
        shares = [weights[client] / total for client in members]
        for name in names:
            mean = sum(share * change[name] for share, change in zip(shares, changes, strict=True))
            c[name] = c[name] + total / sum(weights) * mean
        for name, old in model.state_dict().items():
            held = [state[name] for state in states]
            if old.is_floating_point():
                old.copy_(sum(share * value for share, value in zip(shares, held, strict=True)))
            else:
                old.copy_(torch.stack(held).amax(0))
    return model.state_dict(), c, own


def flat(variates, groups=("weights", "batch_norm")):
    """Control variates by name as the rows of the blocks."""
    blocks = parameter_groups(small_cnn(), {})
    return {
        group: torch.cat([value.flatten() for name, value in variates.items() if blocks[name] == group])
        for group in groups
    }


def apart(callback, reference):
    """Distance of the control variates of a callback from those of :func:`scaffold`."""
    _, c, own = reference
    kept = [(callback.memory[-1], c), *((callback.memory[i], own[i]) for i in callback.memory if i >= 0)]
    return max(distance(rows, flat(variates)) for rows, variates in kept)


class WithoutServerVariate(SCAFFOLD):
    def on_round_start(self, trainer, pl_module, cohort):
        super().on_round_start(trainer, pl_module, cohort)
        self._correction = {block: -own for block, own in self._own.items()}


class WithTheOtherSign(SCAFFOLD):
    def on_round_start(self, trainer, pl_module, cohort):
        super().on_round_start(trainer, pl_module, cohort)
        self._correction = {block: -correction for block, correction in self._correction.items()}


class OfCorrectedGradients(SCAFFOLD):
    def on_after_aggregate(self, trainer, pl_module, cohort):
        steps = torch.tensor(cohort.local_steps).unsqueeze(1)
        for block, correction in self._correction.items():
            cohort.extra[f"SCAFFOLD {block}"] += steps * correction
        super().on_after_aggregate(trainer, pl_module, cohort)


class CountsTheLongestClient(SCAFFOLD):
    def on_after_aggregate(self, trainer, pl_module, cohort):
        for block in self._own:
            cohort.extra[f"SCAFFOLD steps {block}"].fill_(max(cohort.local_steps))
        super().on_after_aggregate(trainer, pl_module, cohort)


class WholeShare(SCAFFOLD):
    def on_after_aggregate(self, trainer, pl_module, cohort):
        pl_module.weight_share = lambda cohort: 1.0
        super().on_after_aggregate(trainer, pl_module, cohort)


class Variates(SCAFFOLD):
    """Keeps c and every c_i after each round."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_round_end(self, trainer, pl_module, cohort):
        self.seen.append((cohort.client_ids, deepcopy(self.memory)))


def partly(callback, executor=SequentialExecutor, rounds=5):
    """Two of four clients, three local steps, learning rates that change with the round and the parameter."""
    return train(
        small_cnn(),
        blobs(4),
        rounds,
        [callback],
        participation=2,
        local_steps=3,
        client_lr_schedule=MultiStep([2, 4], 0.5),
        parameter_groups={"batch_norm": {"lr_scale": 0.3}},
        executor=executor(),
    )


def partly_by_hand(rounds=5):
    affine = [name for name, block in parameter_groups(small_cnn(), {}).items() if block == "batch_norm"]

    def rate(number, name):
        return 0.1 * (1, 1, 0.5, 0.5, 0.25)[number - 1] * (0.3 if name in affine else 1.0)

    return scaffold(small_cnn(), blobs(4), rounds, steps=[3] * 4, cohort=TWO_OF_FOUR, rate=rate)


@EXECUTORS
def test_it_equals_the_papers_algorithm_by_hand_with_partial_participation(executor):
    callback, reference = SCAFFOLD(), partly_by_hand()
    assert distance(partly(callback, executor), reference[0]) < 1e-10
    assert apart(callback, reference) < 1e-10


@pytest.mark.parametrize(
    "mutant",
    [WithoutServerVariate, WithTheOtherSign, OfCorrectedGradients, WholeShare],
    ids=lambda c: c.__name__,
)
def test_any_other_formula_is_far_from_it(mutant):
    callback, reference = mutant(), partly_by_hand()
    assert distance(partly(callback), reference[0]) > 1e-4
    assert apart(callback, reference) > 1e-3


@EXECUTORS
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_clients_with_unequal_local_steps_use_their_own_number(weighting, executor):
    def run(callback):
        settings = {"local_steps": None, "local_epochs": 1, "participation": 2, "weighting": weighting}
        data = blobs(4, SIZES)
        return train(small_cnn(), data, 5, [callback], **settings, executor=executor())

    weights = SIZES if weighting == "examples" else (1, 1, 1, 1)
    steps = [size // 8 for size in SIZES]
    reference = scaffold(
        small_cnn(), blobs(4, SIZES), 5, steps=steps, cohort=TWO_OF_FOUR, rate=lambda *_: 0.1, weights=weights
    )
    callback, mutant = SCAFFOLD(), CountsTheLongestClient()
    assert distance(run(callback), reference[0]) < 1e-10
    assert apart(callback, reference) < 1e-10
    assert distance(run(mutant), reference[0]) > 1e-4


@EXECUTORS
@pytest.mark.parametrize("sizes", [(40,), SIZES])
def test_with_one_local_step_and_all_clients_it_is_fedavg(sizes, executor):
    settings = {"server_optimizer": partial(torch.optim.SGD, lr=0.7, momentum=0.5), "executor": executor()}

    def run(*callbacks):
        return train(small_cnn(), blobs(4, sizes), 5, callbacks, **settings)

    assert distance(run(SCAFFOLD()), run()) < 1e-10
    assert distance(run(WithoutServerVariate()), run()) > 1e-3


@pytest.mark.parametrize("participation", [2, 1.0])
@pytest.mark.parametrize(("sizes", "shares"), [((40,), (0.25,) * 4), (SIZES, [size / 112 for size in SIZES])])
def test_the_servers_control_variate_is_the_mean_of_the_clients_in_every_round(participation, sizes, shares):
    def gaps(callback):
        train(small_cnn(), blobs(4, sizes), 6, [callback], participation=participation, local_steps=3)
        for _, memory in callback.seen:
            for block, c in memory[-1].items():
                kept = [shares[i] * memory[i][block] for i in range(4) if i in memory]
                yield float((sum(kept) - c).abs().max())

    assert max(gaps(Variates())) < 1e-10
    if participation == 2:
        mutant = type("Mutant", (WholeShare, Variates), {})
        assert max(gaps(mutant())) > 1e-3


@pytest.mark.parametrize("participation", [2, 1.0])
def test_weights_of_samples_leave_it_a_mean_of_the_clients_whoever_straggles(participation):
    callback = Variates()
    data = uneven_clients((8, 4, 6, 2), (24, 60, 40, 30))
    train(
        small_cnn(), data, 6, [callback], participation=participation, local_steps=5, weighting="samples",
        failures=ClientFailures(stragglers=0.7),
    )  # fmt: skip
    shares, largest = (0.4, 0.2, 0.3, 0.1), 0.0
    for _, memory in callback.seen:
        for block, c in memory[-1].items():
            kept = [shares[i] * memory[i][block] for i in range(4) if i in memory]
            torch.testing.assert_close(sum(kept), c, rtol=0, atol=1e-10)
            largest = max(largest, float(c.abs().max()))
    assert largest > 0.1


def test_absent_clients_keep_their_control_variates_bitwise():
    callback = Variates()
    train(small_cnn(), blobs(4), 6, [callback], participation=2, local_steps=2)
    waited = 0
    for (_, before), (present, after) in pairwise(callback.seen):
        for client in before.keys() - {-1}:
            equal = all(torch.equal(row, after[client][block]) for block, row in before[client].items())
            assert equal == (client not in present)
            waited += equal
    assert waited > 0


@EXECUTORS
def test_kept_momentum_with_one_local_step_is_still_centralised_momentum_sgd(executor):
    settings = {"client_optimizer": MOMENTUM, "executor": executor()}
    federated = train(small_cnn("gn"), blobs(), 5, [SCAFFOLD(), MaintainedMomentum("global")], **settings)
    assert distance(federated, centralised(small_cnn("gn"), blobs(), 5, MOMENTUM)) < 1e-10


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_any_client_optimizer_steps_with_the_corrected_gradient_and_variates_are_of_the_loss(optimizer):
    callback = SCAFFOLD()
    federated = train(
        small_cnn(), blobs(4), 4, [callback], participation=2, local_steps=3, client_optimizer=optimizer
    )
    model = small_cnn().double().train()
    c = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    own = [dict(c) for _ in range(4)]
    for number in range(1, 5):
        states, before = [], deepcopy(own)
        for client in TWO_OF_FOUR(number):
            local, total = deepcopy(model), dict.fromkeys(c, 0)
            stepper = optimizer(local.parameters())
            for step in range(3):
                inputs, targets = client_batch(blobs(4), client, (number - 1) * 3 + step)
                stepper.zero_grad()
                cross_entropy(local(inputs), targets).backward()
                for name, theta in local.named_parameters():
                    total[name] = total[name] + theta.grad
                    theta.grad = theta.grad - own[client][name] + c[name]
                stepper.step()
            own[client] = {name: value / 3 for name, value in total.items()}
            states.append(local.state_dict())
        for i in range(4):
            c = {name: value + (own[i][name] - before[i][name]) / 4 for name, value in c.items()}
        for name, old in model.state_dict().items():
            held = torch.stack([state[name] for state in states])
            old.copy_(held.mean(0) if old.is_floating_point() else held.amax(0))
    assert distance(federated, model.state_dict()) < 1e-10
    assert distance(callback.memory[-1], flat(c)) < 1e-10


class WholeData(ClientDataModule):
    """A client of linear regression whose every batch is all that it has."""

    num_examples, steps_per_epoch = 12, 1

    def __init__(self, slope):
        super().__init__()
        generator = torch.Generator().manual_seed(int(10 * slope))
        self.inputs = torch.randn(12, 3, generator=generator, dtype=torch.float64) * (1 + abs(slope) / 2)
        self.targets = (self.inputs * slope).sum(1, keepdim=True) + slope

    def train_batch(self, step):
        return self.inputs, self.targets

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.inputs, self.targets), 12)


@pytest.mark.slow
def test_it_reaches_the_optimum_of_all_clients_where_fedavg_with_local_steps_does_not():
    clients = [WholeData(slope) for slope in (-2.0, 0.5, 3.0)]
    inputs, targets = (torch.cat([getattr(one, part) for one in clients]) for part in ("inputs", "targets"))

    def gradient(*callbacks):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        module = FederatedModule(
            model, partial(torch.optim.SGD, lr=0.03), local_steps=5, loss=nn.functional.mse_loss
        )
        fit(module, FederatedDataModule(clients), 80, callbacks)
        nn.functional.mse_loss(model(inputs), targets).backward()
        return float(model.weight.grad.abs().max())

    assert gradient(SCAFFOLD()) < 1e-3
    assert gradient() > 0.1


@pytest.mark.parametrize("method", [FedBN(), FixBN(freeze_round=0, freeze="affine")], ids=["local", "frozen"])
def test_parameters_that_are_not_averaged_have_no_control_variate(method):
    callback, states = SCAFFOLD(), States()
    train(small_cnn(), blobs(), 3, [method, callback, states], local_steps=2)
    assert {block for kept in callback.memory.values() for block in kept} == {"weights"}


@EXECUTORS
@pytest.mark.parametrize("first", [True, False], ids=["SCAFFOLD first", "FedRep first"])
def test_steps_in_which_fedrep_lets_the_body_rest_do_not_count(first, executor):
    """In round 1, ``c_i = (theta - theta_i) / (K_i eta)``; clients with 2, 3 and 5 steps have no, no and 2 steps."""
    callback, ends = SCAFFOLD(), ClientStates()
    callbacks = [callback, FedRep(head_steps=3)] if first else [FedRep(head_steps=3), callback]
    data, model = blobs(3, (16, 24, 40)), small_cnn().double()
    settings = {"local_steps": None, "local_epochs": 1, "executor": executor()}
    train(model, data, 1, [*callbacks, ends], **settings)
    start, body = small_cnn().double(), [name for name, _ in small_cnn().named_parameters() if name[0] != "8"]
    for client, moved in ((0, 0), (1, 0), (2, 2)):
        end = ends.end[1][client]
        wanted = {
            name: (start.get_parameter(name) - end[name]).detach() / (max(moved, 1) * 0.1) for name in body
        }
        assert distance(callback.memory[client], flat(wanted)) < 1e-10
        assert any(value.any() for value in callback.memory[client].values()) == (moved > 0)


def test_fedprox_beside_it_is_refused():
    with pytest.raises(
        ConfigurationError,
        match="SCAFFOLD and FedProx cannot be combined: both decide over the correction of client drift",
    ):
        train(small_cnn(), blobs(), 1, [SCAFFOLD(), FedProx()])
