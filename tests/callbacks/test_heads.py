"""Methods that treat a part of the model for itself (FedPer, FedRep, FedBABU, MTFL), beside separate models in PyTorch."""

from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    PersonalEvaluation,
    SequentialExecutor,
    VectorizedExecutor,
    add_loss,
)
from fl_lightning.callbacks import (
    FBN,
    MTFL,
    SCAFFOLD,
    ClientGradientClipping,
    FedBABU,
    FedExFixBN,
    FedPer,
    FedRep,
    MaintainedMomentum,
)
from fl_lightning.methods.fine_tuning import fine_tuned
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import (
    SGD,
    Received,
    SaveRounds,
    blobs,
    client_batch,
    distance,
    federated_run,
    plain_step,
    small_cnn,
)

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.02)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3, weight_decay=0.02)
HEAD = ("8.weight", "8.bias")
AFFINE = ("1.weight", "1.bias", "4.weight", "4.bias")
STATISTICS = [
    f"{layer}.{name}" for layer in (1, 4) for name in ("running_mean", "running_var", "num_batches_tracked")
]
BODY = tuple(name for name, _ in small_cnn().named_parameters() if name not in HEAD)
SIZES, STEPS, ROUNDS = (24, 40, 32, 16), 3, 4
TWO_OF_FOUR = partial(sample_cohort, 4, 2, 0)
EVALUATED = {"limit_val_batches": None}

run = partial(
    federated_run,
    data=partial(blobs, 4, SIZES),
    rounds=ROUNDS,
    participation=2,
    local_steps=STEPS,
    client_optimizer=MOMENTUM,
)


def separate_models(kept, phases, optimizer, cohort=TWO_OF_FOUR, make=small_cnn):
    """Train a model for each client, and average all state but what is kept, weighed by the clients' samples.

    Args:
        kept: Names of the state that a client keeps.
        phases: The trained parameters and the steps of each phase of a round, which has an optimizer of its own.
        optimizer: Makes the optimizer of a phase.
        cohort: The clients of a round.
        make: Makes the initial model.

    Returns:
        The server's state, and each client's.
    """
    server, data = make().double().train(), blobs(4, SIZES)
    own = [{name: server.state_dict()[name].clone() for name in kept} for _ in SIZES]
    for round_number in range(1, ROUNDS + 1):
        clients, states = cohort(round_number), []
        for client in clients:
            local, step = deepcopy(server), (round_number - 1) * STEPS
            local.load_state_dict({**server.state_dict(), **own[client]})
            for names, count in phases:
                stepper = optimizer([local.get_parameter(name) for name in names])
                for _ in range(count):
                    plain_step(local, stepper, client_batch(data, client, step))
                    step += 1
            states.append(local.state_dict())
            own[client] = {name: local.state_dict()[name].clone() for name in kept}
        total = sum(SIZES[client] for client in clients)
        for name, value in server.state_dict().items():
            held = [state[name] for state in states]
            if value.is_floating_point():
                value.copy_(sum(SIZES[c] / total * x for c, x in zip(clients, held, strict=True)))
            else:
                value.copy_(torch.stack(held).amax(0))
    return server.state_dict(), [{**server.state_dict(), **state} for state in own]


ALL = (*BODY, *HEAD)
REFERENCES = {
    "FedPer": (FedPer, HEAD, [(ALL, STEPS)]),
    "FedPer with BN": (partial(FedPer, ["8", "4"]), (*HEAD, *AFFINE[2:], *STATISTICS[3:]), [(ALL, STEPS)]),
    "MTFL": (MTFL, AFFINE, [(ALL, STEPS)]),
    "FedRep": (FedRep, HEAD, [(HEAD, 1), (BODY, STEPS - 1)]),
    "FedRep of two": (partial(FedRep, 2, "8"), HEAD, [(HEAD, 2), (BODY, STEPS - 2)]),
    "FedBABU": (FedBABU, (), [(BODY, STEPS)]),
}


@EXECUTORS
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["SGD", "Adam"])
@pytest.mark.parametrize("name", REFERENCES)
def test_a_method_equals_separate_models(name, optimizer, executor):
    make, kept, phases = REFERENCES[name]
    callback = make()
    module = run(callback, executor=executor(), client_optimizer=optimizer).module
    server, clients = separate_models(kept, phases, optimizer)
    assert distance(module.state_dict(), server) < 1e-10
    if kept:
        for client, state in enumerate(clients):
            found = callback.variants(None, module)[str(client)]
            assert sorted(found) == sorted(kept)
            assert distance({**module.state_dict(), **found}, state) < 1e-10


METHODS = pytest.mark.parametrize("make", [MTFL, FedPer, FedRep, FedBABU])


@METHODS
def test_two_ranks_equal_one_with_their_evaluations(make):
    alone, shared = (
        run(make(), rounds=2, trainer={**EVALUATED, **ranks}).module
        for ranks in ({}, {"devices": 2, "strategy": "cohort"})
    )
    assert distance(alone.state_dict(), shared.state_dict()) < 1e-10
    metrics = [name for name in alone.metrics if name.startswith(("val/", "comm/", "train/"))]
    assert {"val/personal_accuracy", "val/own_accuracy"} < {*metrics}
    assert [alone.metrics[name] for name in metrics] == [shared.metrics[name] for name in metrics]


@METHODS
def test_a_resumed_run_is_equal_bit_for_bit(make, tmp_path):
    whole = run(make(), SaveRounds(tmp_path), trainer=EVALUATED).module
    resumed = run(make(), ckpt_path=tmp_path / "2.ckpt", trainer=EVALUATED).module
    assert distance(whole.state_dict(), resumed.state_dict()) == 0
    names = [name for name in whole.metrics if not name.startswith("time/")]
    assert [whole.metrics[name] for name in names] == [resumed.metrics[name] for name in names]


def fedavg(**settings):
    return run(**settings).states


def test_an_empty_head_is_fedavg_bit_for_bit():
    for method in (FedPer([]), FedBABU(head=[])):
        assert [distance(*pair) for pair in zip(run(method).states, fedavg(), strict=True)] == [0] * (
            ROUNDS + 1
        )


def test_a_head_of_all_layers_is_local_training_without_traffic():
    callback = FedPer(["0", "1", "3", "4", "8"])
    result = run(callback)
    last = {}
    for number in range(1, ROUNDS + 1):
        for client, state in result.clients.start[number].items():
            held = last.get(client, result.states[0])
            assert all(torch.equal(value, held[name]) for name, value in state.items() if name != "6.key")
            last[client] = result.clients.end[number][client]
    assert result.module.record.upload_bytes == result.module.record.download_bytes == 0


@pytest.mark.parametrize("make", [FedPer, MTFL])
def test_one_client_is_plain_training(make):
    model, data = small_cnn().double().train(), blobs(1)
    settings = {"data": blobs(1), "participation": 1, "client_optimizer": partial(torch.optim.SGD, lr=0.1)}
    module = run(make(), **settings).module
    stepper = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(ROUNDS * STEPS):
        plain_step(model, stepper, client_batch(data, 0, step))
    assert distance(module.state_dict(), model.state_dict()) < 1e-10


@pytest.mark.parametrize(("make", "kept"), [(FedPer, HEAD), (FedRep, HEAD), (MTFL, AFFINE)])
def test_an_absent_client_keeps_its_part_bit_for_bit_and_a_new_one_starts_from_the_initial_part(make, kept):
    result = run(make(), rounds=8)
    initial, last, absent = result.states[0], {}, set()
    for number in range(1, 9):
        for client, state in result.clients.start[number].items():
            since, held = last.get(client, (number - 1, initial))
            absent.add(number - 1 - since)
            assert all(torch.equal(state[name], held[name]) for name in kept)
            last[client] = (number, result.clients.end[number][client])
    assert max(absent) >= 2
    assert not torch.equal(last[0][1][kept[0]], last[1][1][kept[0]])


def test_heads_are_not_sent():
    """Floats of 8 bytes: convolutions 76 and 222, gamma and beta 20, statistics 20; the head has 75, of two clients."""
    for method, floats in ((FedPer(), 338), (FedRep(), 338), (MTFL(), 393), (FedPer(["8", "4"]), 314)):
        seen = Received()
        run(method, seen)
        assert seen.received == [(2 * 8 * floats, 2 * 8 * floats)] * ROUNDS
    seen, known = Received(), set()
    run(FedBABU(), seen)
    for number, (up, down) in enumerate(seen.received, 1):
        new = {*TWO_OF_FOUR(number)} - known
        known |= new
        assert (up, down) == (
            2 * 8 * 338,
            8 * (2 * 338 + 75 * len(new)),
        )  # the initial head, once to each client


class Steps(FederatedCallback):
    """Copies of all parameters after each local step of the first client."""

    def __init__(self):
        self.seen = []

    def on_round_start(self, trainer, pl_module, cohort):
        self.on_local_step_end(trainer, pl_module, cohort, -1)

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.seen.append({name: value[0].clone() for name, value in cohort.params.items()})


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["SGD", "Adam"])
def test_fedrep_trains_one_part_at_a_time(optimizer):
    steps = Steps()
    run(FedRep(head_steps=2), steps, client_optimizer=optimizer)
    for start in range(0, len(steps.seen), STEPS + 1):
        one_round = steps.seen[start : start + STEPS + 1]
        for number, (before, after) in enumerate(pairwise(one_round)):
            resting, trained = (BODY, HEAD) if number < 2 else (HEAD, BODY)
            assert all(torch.equal(before[name], after[name]) for name in resting)
            assert not any(torch.equal(before[name], after[name]) for name in trained)


class Clip(ClientGradientClipping):
    """Clipping that stores the first client's norm of the gradients in each local step."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        super().on_after_local_backward(trainer, pl_module, cohort, step)
        moving = [block[0] for name, block in cohort.grads.blocks.items() if name not in cohort.resting]
        self.norms = [*getattr(self, "norms", ()), float(torch.cat(moving).norm())]


def test_clipping_leaves_out_the_part_that_rests():
    run(FedRep(head_steps=2), SCAFFOLD(), clip := Clip(max_norm=1e-3))
    assert clip.norms == pytest.approx([1e-3] * len(clip.norms), rel=0.01)


def test_clipping_before_fedrep_is_refused_because_its_norm_includes_the_part_that_rests():
    with pytest.raises(ConfigurationError, match="put that callback, such as FedRep, before"):
        run(ClientGradientClipping(max_norm=1e-3), FedRep())


def test_fedrep_without_head_steps_never_trains_a_head():
    states = run(FedRep(head_steps=0)).states
    babu = run(FedBABU()).states
    assert max(distance(*pair) for pair in zip(states, babu, strict=True)) < 1e-12
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in HEAD)


@pytest.mark.parametrize("head_steps", [-1, 3])
def test_fedrep_without_steps_for_the_body_is_refused(head_steps):
    with pytest.raises(
        ConfigurationError, match=rf"FedRep.head_steps: {head_steps} must be at least 0 and below 3"
    ):
        run(FedRep(head_steps))


def test_fedrep_and_maintained_momentum_are_refused_together():
    with pytest.raises(ConfigurationError, match="both decide over the client optimizer's state"):
        run(FedRep(), MaintainedMomentum())


def test_fedbabu_never_changes_its_head_whatever_the_server_optimizer():
    server = partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.1)
    states = run(FedBABU(), server_optimizer=server).states
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in HEAD)
    assert distance({"0.weight": states[0]["0.weight"]}, states[-1]) > 1e-3


def accuracy(model, loader):
    model = deepcopy(model).eval()
    with torch.no_grad():
        return torch.cat([model(x).argmax(1) == y for x, y in loader]).double().mean().item()


def test_fedbabu_evaluates_models_that_are_fine_tuned_on_the_clients_data():
    module = run(FedBABU(fine_tune_epochs=2), trainer=EVALUATED).module
    data, own, personal = blobs(4, SIZES), [], []
    for client in range(4):
        model = deepcopy(module.model).train()
        stepper = MOMENTUM(model.parameters())
        for step in range(2 * data.steps_per_epoch(client)):
            plain_step(model, stepper, client_batch(data, client, step))
        found = fine_tuned(module, client, 2)
        assert distance(model.state_dict(), found) < 1e-12
        assert distance({name: found[name] for name in HEAD}, module.state_dict()) > 1e-3
        personal.append(accuracy(model, data.val_dataloader()))
        own.append(accuracy(model, data.clients[client].val_dataloader()))
    assert module.metrics["val/personal_accuracy"] == pytest.approx(sum(personal) / 4, abs=1e-6)
    assert module.metrics["val/own_accuracy"] == pytest.approx(sum(own) / 4, abs=1e-6)
    assert len({sum(personal) / 4, sum(own) / 4, accuracy(module.model, data.val_dataloader())}) == 3


class Penalised(nn.Module):
    """A layer that adds the mean square of its input to the loss."""

    def forward(self, inputs):
        add_loss(inputs.square().mean())
        return inputs


def test_fine_tuning_includes_the_terms_that_layers_add_to_the_loss():
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4), nn.Linear(4, 3), Penalised())
    module = run(FedBABU(fine_tune_epochs=0), model=model, client_optimizer=SGD).module
    expected, data = deepcopy(module.model), blobs(4, SIZES)
    for step in range(data.steps_per_epoch(0)):
        inputs, labels = client_batch(data, 0, step)
        scores = expected(inputs)
        expected.zero_grad()
        (cross_entropy(scores, labels) + scores.square().mean()).backward()
        SGD(expected.parameters()).step()
    assert distance(expected.state_dict(), fine_tuned(module, 0, 1)) < 1e-12


@pytest.mark.parametrize("method", [FBN, FedExFixBN])
def test_fine_tuning_uses_batch_norm_whatever_forward_pass_a_method_trains_with(method):
    class Kept(FedBABU):
        def client_model(self, pl_module, client):
            found[client] = super().client_model(pl_module, client)
            return found[client]

    found = {}
    module = run(method(), Kept(), trainer=EVALUATED).module
    for client in range(4):
        assert distance(fine_tuned(module, client, 1), found[client]) == 0


class Centred(nn.Module):
    """A layer that assigns its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(72, dtype=torch.float64))

    def forward(self, inputs):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * inputs.detach().mean(0)
        return inputs - self.mean


def test_fine_tuning_keeps_buffers_that_a_layer_assigns():
    model = nn.Sequential(nn.Flatten(), Centred(), nn.Linear(72, 4), nn.Linear(4, 3))
    module = run(FedBABU(fine_tune_epochs=0), model=model, client_optimizer=SGD).module
    expected, data = deepcopy(module.model), blobs(4, SIZES)
    stepper = SGD(expected.parameters())
    for step in range(data.steps_per_epoch(0)):
        plain_step(expected, stepper, client_batch(data, 0, step))
    assert distance(expected.state_dict(), fine_tuned(module, 0, 1)) < 1e-12


def test_without_fine_tuning_fedbabus_clients_have_the_servers_model():
    metrics = run(FedBABU(fine_tune_epochs=0), trainer=EVALUATED).module.metrics
    assert metrics["val/personal_accuracy"] == pytest.approx(metrics["val/accuracy"], abs=1e-6)
    with pytest.raises(ConfigurationError, match=r"FedBABU.fine_tune_epochs: -1 must be at least 0"):
        FedBABU(fine_tune_epochs=-1)


def test_fine_tuning_leaves_no_trace_in_the_training():
    without = run(FedBABU()).states
    evaluated = run(FedBABU(fine_tune_epochs=3), trainer={**EVALUATED, "num_sanity_val_steps": -1}).states
    assert [distance(*pair) for pair in zip(without, evaluated, strict=True)] == [0] * (ROUNDS + 1)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_client_model_is_trained_in_every_evaluation(stage):
    class DoubledHead(PersonalEvaluation):
        def client_model(self, pl_module, client):
            weight = pl_module.model[8].weight
            return {"8.weight": torch.autograd.grad(weight.square().sum(), weight)[0]}

    class Doubled(DoubledHead):
        def client_model(self, pl_module, client):
            return {"8.weight": 2 * pl_module.model[8].weight}

    found = []
    for method in (DoubledHead(), Doubled()):
        result = federated_run(method, rounds=1, trainer=EVALUATED)
        evaluate = getattr(result.trainer, stage)
        found.append(evaluate(result.module, datamodule=result.trainer.datamodule, verbose=False)[0])
    assert found[0] == found[1]
    assert any(name.endswith("own_accuracy") for name in found[0])
