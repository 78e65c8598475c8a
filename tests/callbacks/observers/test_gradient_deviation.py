"""How far the clients' first gradients are from that of their method's centralised twin (BatchNormDiagnostics)."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedDataModule,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.batch_norm.joint import averaging_by, cohort_mean, mean_of_all
from fl_lightning.callbacks import (
    FBN,
    SCAFFOLD,
    BatchNormDiagnostics,
    ClientGradientClipping,
    FedBN,
    FedTAN,
    FixBN,
)
from fl_lightning.callbacks.observers.measurements import relative_deviation
from fl_lightning.client_data.batches import BatchStack
from tests.support.helpers import (
    ArrayClient,
    blobs,
    client_batch,
    federated_run,
    small_cnn,
    uneven_clients,
    union_batch,
)

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
TWINS = {
    "GN": (list, "gn"),
    "FixBN, stage II": (lambda: [FixBN(freeze_round=0)], "bn"),
    "FBN": (lambda: [FBN()], "bn"),
    "FedTAN": (lambda: [FedTAN()], "bn"),
}
METRIC = "bn/gradient_deviation"


def run(callbacks=(), norm="bn", data=None, first=True, dropout=0.0, **settings):
    """The metrics of each round; the diagnostics stand first or last among the callbacks."""
    watched = BatchNormDiagnostics(every_n_rounds=1, measure=["gradients"])
    callbacks = [watched, *callbacks] if first else [*callbacks, watched]
    settings = {"model": small_cnn(norm, dropout), "local_steps": 1, **settings}
    return federated_run(*callbacks, data=data or uneven_clients(), **settings).rows


def gradients(model, batch):
    model = deepcopy(model).double().train()
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(cross_entropy(model(batch[0]), batch[1]), [*model.parameters()])
    return dict(zip(names, found, strict=True))


@EXECUTORS
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("method", TWINS)
def test_methods_that_equal_their_twin_have_no_deviation(method, first, executor):
    callbacks, norm = TWINS[method]
    for row in run(callbacks(), norm, first=first, executor=executor()).values():
        assert max(value for name, value in row.items() if name.startswith(METRIC)) < 1e-10


@pytest.mark.parametrize("method", ["GN", "FixBN, stage II", "FBN"])
def test_nor_do_they_with_unequal_batches(method):
    callbacks, norm = TWINS[method]
    rows = run(callbacks(), norm, uneven_clients((8, 3, 5)))
    assert max(row[METRIC] for row in rows.values()) < 1e-10


@EXECUTORS
def test_batch_statistics_and_a_forward_only_exchange_deviate_on_skewed_clients(executor):
    for callbacks in ([], [FedTAN(backward="own")]):
        assert min(row[METRIC] for row in run(callbacks, executor=executor()).values()) > 0.3


@EXECUTORS
def test_fixbn_deviates_until_it_freezes(executor):
    rows = run([FixBN(freeze_round=2)], rounds=4, executor=executor())
    assert [row[METRIC] < 1e-10 for row in rows.values()] == [False, False, True, True]


@EXECUTORS
def test_the_deviation_is_that_of_plain_pytorch(executor):
    data = uneven_clients() if executor is VectorizedExecutor else uneven_clients((8, 3, 5))
    row = run(data=data, rounds=1, executor=executor())[1]
    batches = [client_batch(data, client, 0) for client in range(3)]
    sizes = torch.tensor([len(targets) for _, targets in batches], dtype=torch.float64)
    own = [gradients(small_cnn(), batch) for batch in batches]
    central = gradients(small_cnn(), union_batch(data, 0))
    affine = [name for name in central if name[0] in "14"]
    groups = {"": [*central], "_affine": affine, "_weights": [n for n in central if n not in affine]}

    def by_hand(names, weights):
        mean = {n: sum(w * g[n] for w, g in zip(weights, own, strict=True)) for n in names}
        apart = sum((mean[n] - central[n]).square().sum() for n in names).sqrt()
        return float(apart / sum(central[n].square().sum() for n in names).sqrt())

    for group, names in groups.items():
        assert row[METRIC + group] == pytest.approx(by_hand(names, sizes / sizes.sum()), rel=1e-10)
    if len(set(sizes.tolist())) > 1:
        equal = torch.full((3,), 1 / 3, dtype=torch.float64)
        assert abs(by_hand(groups[""], equal) - row[METRIC]) > 1e-3


def test_another_union_would_be_noticed(monkeypatch):
    monkeypatch.setattr(BatchStack, "union", lambda self: BatchStack(batches=[self.batches()[0]]))
    assert run(norm="gn")[1][METRIC] > 0.05


class Louder(FederatedCallback):
    """Adds something to every gradient."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for gradient in cohort.grads.values():
            gradient.add_(1.0)


@EXECUTORS
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("other", [Louder, partial(ClientGradientClipping, 0.01)])
def test_what_other_callbacks_do_to_gradients_does_not_enter(other, first, executor):
    assert run([other()], rounds=1, first=first, executor=executor())[1][METRIC] == pytest.approx(
        run(rounds=1, executor=executor())[1][METRIC], rel=1e-12
    )
    rows = run([other()], "gn", first=first, executor=executor())
    assert max(row[METRIC] for row in rows.values()) < 1e-10


@pytest.mark.parametrize("first", [True, False])
def test_nor_do_control_variates(first):
    rows = run([SCAFFOLD()], "gn", first=first, local_steps=2)
    assert max(row[METRIC] for row in rows.values()) < 1e-10


@EXECUTORS
def test_nor_do_the_masks_of_dropout(executor):
    rows = run(norm="gn", dropout=0.5, executor=executor())
    assert max(row[METRIC] for row in rows.values()) < 1e-10


@pytest.mark.parametrize("callbacks", [FedTAN, FBN])
def test_the_first_of_several_local_steps_is_measured(callbacks):
    rows = run([callbacks()], local_steps=3)
    assert max(row[METRIC] for row in rows.values()) < 1e-10


def test_parameters_that_are_not_averaged_are_left_out():
    for callbacks in ([FedBN()], [FixBN(freeze_round=0, freeze="both")]):
        row = run(callbacks, rounds=2)[2]
        assert METRIC in row
        assert f"{METRIC}_affine" not in row
        assert row[f"{METRIC}_weights"] == row[METRIC]


class Kept(BatchNormDiagnostics):
    """Keeps the mean gradient of the first step, and that of the run."""

    def _measure_gradients(self, pl_module, cohort, first):
        super()._measure_gradients(pl_module, cohort, first)
        self.first = first.mean_gradient

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.own = {name: cohort.grads[name].mean(0) for name in self.first}


class Shift(FederatedCallback):
    """Gives the clients other statistics than the server's."""

    def __init__(self, apart):
        self.apart = apart

    def on_round_start(self, trainer, pl_module, cohort):
        own = 5.0 + self.apart * torch.arange(len(cohort)).view(-1, 1)
        for name, kind in cohort.buffer_kinds.items():
            if kind == "mean":
                cohort.buffers[name].add_(own)


@EXECUTORS
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("position", [0, 2])
def test_the_first_step_starts_from_what_the_clients_hold_whichever_callback_has_set_it(
    position, apart, executor
):
    watched = Kept(every_n_rounds=1, measure=["gradients"])
    callbacks = [FixBN(freeze_round=0), Shift(apart)]
    callbacks.insert(position, watched)
    settings = {"data": uneven_clients, "rounds": 2, "local_steps": 1, "executor": executor()}
    rows = federated_run(*callbacks, **settings).rows
    assert max(float((watched.first[name] - watched.own[name]).abs().max()) for name in watched.own) < 1e-10
    # one model with the union of the batches has what all clients have alike
    assert (rows[2][METRIC] < 1e-10) == (not apart)


def test_the_centralised_twin_itself_has_no_deviation():
    assert {row[METRIC] for row in run(centralised=True).values()} == {0.0}


@EXECUTORS
def test_mixed_precision_has_the_rounding_of_bfloat16(executor):
    clients = [
        ArrayClient(c.dataset.tensors[0].float(), c.dataset.tensors[1], c.batch_size) for c in blobs().clients
    ]
    data, trainer = FederatedDataModule(clients, clients[0]), {"precision": "bf16-mixed"}
    rounding = max(
        row[METRIC] for row in run(norm="gn", data=data, trainer=trainer, executor=executor()).values()
    )
    assert 0 < rounding < 0.05
    assert run(data=data, trainer=trainer, executor=executor())[1][METRIC] > 5 * rounding


def test_part_of_a_cohort_is_refused_again_after_a_union():
    own = torch.tensor([[1.0, 2.0]])
    mean = torch.func.vmap(lambda row: cohort_mean(row, 3))
    with averaging_by(lambda own, _: mean_of_all(own, 1)):
        assert torch.equal(mean(own), own)
        with pytest.raises(ConfigurationError, match="runs 3"):
            mean(own.expand(3, 2))
    with pytest.raises(ConfigurationError, match="runs 1 of the cohort's 3"):
        mean(own)


def test_a_part_without_a_gradient_counts_as_rounding():
    found = {"a": torch.tensor([1e-17]), "b": torch.tensor([1.0])}
    wanted = {"a": torch.tensor([0.0]), "b": torch.tensor([1.0])}
    assert relative_deviation(found, wanted, "a", smallest=1e-7) < 1e-9
    assert relative_deviation(found, wanted, "a") > 1
    assert relative_deviation({}, {}, []) == 0
