"""Clients shared between ranks: the numbers of one process, bit for bit."""

from itertools import product

import pytest
import torch
from torch import nn

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedDataModule,
    FederatedModule,
    NetworkTask,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.callbacks import BatchNormDiagnostics, FedTAN
from fl_lightning.cohort.client_memory import contents
from tests.support.command_line import rows, run
from tests.support.contract import ROW_OF_METHOD, TABLE
from tests.support.contract import run as run_method
from tests.support.helpers import ArrayClient, States, blobs, distance, small_cnn, with_task
from tests.support.outcomes import assert_same, same, states

UNEVEN = {"participation": 3, "local_steps": None, "local_epochs": 1}
EVERYBODY = {"local_steps": 2}


def left_behind(row, ranks, settings, rounds=4):
    """The server's state after each round, what the method remembers and what the record holds, of a run on some ranks."""
    seen, record = States(), {}

    class Keeps(FederatedCallback):
        def on_train_end(self, trainer, pl_module):
            record.update(pl_module.record.state_dict())
            record["callbacks"] = [method.state_dict() for method in pl_module.federated_callbacks]

    trainer = {"devices": ranks, "strategy": "cohort"}
    run_method(row, rounds, [seen, Keeps()], trainer=trainer, executor=SequentialExecutor(), **settings)
    kept = {name: record[name] for name in ("clients", "samples", "holders", "diverged", "upload_bytes")}
    metrics = {name: value for name, value in record["metrics"].items() if not name.startswith("time/")}
    return seen.states, flat(contents([record["callbacks"], kept, metrics]))


def flat(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


BOTH = ("FBN", "FedTAN", "FixBN", "MaintainedMomentum", "SCAFFOLD")
"""Methods that stay in CI with all clients, too."""


def cells():
    """Each method in its last settings with uneven clients, some also with all of them; other cells are nightly."""
    for (kind, settings), row in product({"everybody": EVERYBODY, "uneven": UNEVEN}.items(), TABLE):
        in_ci = row in ROW_OF_METHOD and (kind == "uneven" or row.callback in BOTH)
        yield pytest.param(row, settings, id=f"{kind}-{row.name}", marks=() if in_ci else pytest.mark.nightly)


@pytest.mark.parametrize(("row", "settings"), [*cells()])
def test_every_method_gives_the_same_bits_on_any_number_of_ranks(row, settings):
    module = {**row.module, **settings}
    if "local_steps" in settings:
        module.pop("local_epochs", None)
    row = row._replace(module=module)
    one, remembered = left_behind(row, 1, settings)
    # on two ranks every method is certified in test_contract.py; three have unequal numbers of clients
    several, memory = left_behind(row, 3, settings)
    assert_same(one, several)
    assert repr(remembered) == repr(memory)  # NaN equals NaN


def test_batches_of_different_shape_and_dropout_change_no_bit():
    generator = torch.Generator().manual_seed(0)

    def data():
        clients = [
            ArrayClient(
                torch.randn(24, 2, 6, 6, dtype=torch.float64, generator=generator.manual_seed(i)),
                torch.arange(24) % 3,
                size,
            )
            for i, size in enumerate((4, 8, 6, 12))
        ]
        return FederatedDataModule(clients, clients[0])

    def model():
        return small_cnn(dropout=0.3)

    assert_same(states(1, data(), model()), states(2, data(), model()))


class Weighted(NetworkTask):
    """A loss of its own."""

    def client_loss(self, batch):
        return getattr(self.run, "scale", 1.0) * super().client_loss(batch) + sum(
            p.square().sum() for p in self.model.parameters()
        )


def test_a_loss_of_ones_own_is_that_of_every_rank():
    reference = states(module=with_task(Weighted))
    assert_same(reference, states(2, module=with_task(Weighted)))
    assert not same(reference[-1], states()[-1])


class WeightedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("by_class", torch.ones(3, dtype=torch.float64))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, self.by_class)


class Changes(FederatedCallback):
    """Changes what is no part of a cohort while the run goes on."""

    def on_round_start(self, trainer, pl_module, cohort):
        pl_module.scale = 1.0 / cohort.round
        for layer in pl_module.model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 0.5 / cohort.round
        pl_module.loss.by_class[0] = cohort.round


class RoundInTheLoss(Weighted):
    def client_loss(self, batch):
        return self.run.round * super().client_loss(batch)


def test_numbers_that_callbacks_change_are_those_of_every_rank():
    def run(ranks):
        settings = {"module": with_task(RoundInTheLoss), "callbacks": [Changes()], "loss": WeightedLoss()}
        return states(ranks, **settings)

    assert_same(run(1), run(2))


class Noisy(nn.Module):
    """Draws from torch's global generator, as stochastic depth does."""

    def forward(self, x):
        return x * (1 + 0.1 * torch.rand(len(x), 1, 1, 1, dtype=x.dtype))


def test_random_numbers_of_a_model_are_those_of_its_client():
    def model():
        return nn.Sequential(Noisy(), small_cnn())

    assert_same(states(model=model()), states(3, model=model()))


@pytest.mark.parametrize(
    "methods", [list, lambda: [FedTAN()], lambda: [BatchNormDiagnostics(every_n_rounds=1)]]
)
def test_vectorised_ranks_are_equal_to_rounding(methods):
    def run(ranks):
        return states(ranks, callbacks=methods(), executor=VectorizedExecutor(), data=blobs(4))

    reference = run(1)
    for ranks in (2, 3):
        found = run(ranks)
        assert max(distance(*pair) for pair in zip(reference, found, strict=True)) < 1e-10


def test_layers_that_would_mix_the_clients_of_several_ranks_are_refused():
    def model():
        return nn.SyncBatchNorm.convert_sync_batchnorm(small_cnn())

    assert_same(states(), states(model=model()))
    with pytest.raises(ConfigurationError, match="BN layer '1' is a SyncBatchNorm"):
        states(2, model=model())


@pytest.mark.parametrize("ranks", [2, 5])
def test_more_ranks_than_clients_and_a_single_client_change_no_bit(ranks):
    assert_same(states(centralised=True), states(ranks, centralised=True))
    assert_same(states(), states(ranks))


def clients(sizes, targets=3):
    """Clients with batches of some sizes, the last of which has its labels from 0 to ``targets``."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(24, 2, 6, 6, dtype=torch.float64, generator=generator) for _ in sizes]
    last = len(sizes) - 1
    kinds = [torch.arange(24) % (targets if i == last else 3) for i in range(len(sizes))]
    own = [ArrayClient(*each) for each in zip(images, kinds, sizes, strict=True)]
    return FederatedDataModule(own, own[0])


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("backward", ["aggregated", "own"])
def test_ranks_share_a_joint_step_whose_layers_exchange_between_them(ranks, backward):
    class Counts(FederatedModule):
        def client_batches(self, cohort, indices, step):
            computed.append(len(indices))
            return super().client_batches(cohort, indices, step)

    def run(ranks):
        settings = {
            "callbacks": [FedTAN(backward)],
            "module": Counts,
            "local_steps": 1,
            "check_first_steps": False,
        }
        return states(ranks, clients([8] * 4), **settings)

    computed = []
    reference, found = run(1), run(ranks)
    assert max(distance(*pair) for pair in zip(reference, found, strict=True)) < 1e-10
    assert computed == [4] * 3 + [-(-4 // ranks)] * 3


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_an_error_in_one_ranks_part_of_a_joint_step_is_everyones(ranks):
    with pytest.raises(RuntimeError, match="index 3 is out of bounds"):
        states(ranks, clients([8] * 4, targets=4), callbacks=[FedTAN()])
    with pytest.raises(
        ConfigurationError, match=r"batches of equal shape .* the clients' batches have 2 different"
    ):
        states(ranks, clients([8, 8, 8, 6]), callbacks=[FedTAN()])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_joint_step_that_memory_does_not_hold_says_so(ranks):
    class TooLarge(NetworkTask):
        def client_loss(self, batch):
            if self.run.ranks.rank == 0:
                raise torch.OutOfMemoryError("tried to allocate 80 GiB")
            return super().client_loss(batch)

    with pytest.raises(RuntimeError, match="tried to allocate 80 GiB"):
        states(ranks, clients([8] * 4), callbacks=[FedTAN()], module=with_task(TooLarge))


class DrawsByClient(FederatedCallback):
    """Adds noise to gradients that is the client's own."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for row, generator in enumerate(cohort.generators("noise")):
            for gradient in cohort.grads.values():
                noise = torch.randn(gradient.shape[1:], generator=generator, dtype=gradient.dtype)
                gradient[row] += 0.1 * noise


def test_what_is_drawn_for_a_client_does_not_depend_on_its_rank():
    reference = states(callbacks=[DrawsByClient()])
    assert_same(reference, states(2, callbacks=[DrawsByClient()]))
    assert not same(reference[-1], states()[-1])
    first, second = (states(callbacks=[DrawsByClient()], seed=seed)[-1] for seed in (0, 1))
    assert not same(first, second)


def test_each_client_step_round_and_purpose_has_draws_of_its_own():
    drawn = []

    class Draws(FederatedCallback):
        def on_local_step_end(self, trainer, pl_module, cohort, step):
            for purpose in ("noise", "labels"):
                drawn.extend(float(torch.rand(1, generator=one)) for one in cohort.generators(purpose))

    states(callbacks=[Draws()], rounds=2)
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 2 * 3


class Threads(FederatedCallback):
    """Looks how many threads there are inside rounds."""

    def __init__(self):
        self.inside = set()

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.inside.add(torch.get_num_threads())


def test_ranks_have_one_thread_each_and_threads_come_back_after_the_run():
    torch.set_num_threads(2)  # of this test: the next one begins with one
    for ranks, inside in ((2, {1}), (1, {2})):
        threads = Threads()
        states(ranks, callbacks=[threads])
        assert threads.inside == inside
        assert torch.get_num_threads() == 2


def test_clients_know_nothing_of_each_other_in_a_local_step():
    class Averages(FederatedCallback):
        def on_local_step_end(self, trainer, pl_module, cohort, step):
            cohort.mean(cohort.grads["0.weight"])

    with pytest.raises(ConfigurationError, match=r"cohort\.mean: in a local step"):
        states(callbacks=[Averages()])


@pytest.mark.slow
def test_the_command_line_takes_the_number_of_ranks():
    one = run("--name", "one").attempt
    two = run("--name", "two", "--trainer.devices", 2)
    assert two.trainer.strategy.strategy_name == "cohort"
    assert rows(one) == rows(two.attempt)
