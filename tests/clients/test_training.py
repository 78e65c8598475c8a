"""Clients train by a LightningModule's own ``training_step`` and ``configure_optimizers``, as Lightning's trainer does."""

from copy import deepcopy

import lightning as L
import pytest
import torch
from lightning.pytorch.demos import Transformer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import ClientFailures, ConfigurationError, FederatedCallback, FederatedDataModule, callbacks
from fl_lightning.execution.vectorized import VectorizedExecutor
from tests.support.helpers import distance
from tests.support.lightning_sites import TRAINER, Lit, Site, federated, sites

pytestmark = pytest.mark.first_steps


class SentRows(FederatedCallback):
    """The clients' states and logged values before the aggregation of each round."""

    role = "observer"

    def __init__(self):
        self.rows, self.logged = [], []

    def on_before_aggregate(self, trainer, pl_module, cohort):
        rows = range(len(cohort))
        self.rows.append([copies({**cohort.params.row(i), **cohort.buffers.row(i)}) for i in rows])
        self.logged.append(dict(pl_module.client.by_client))


def copies(tensors):
    return {name: value.detach().clone() for name, value in tensors.items()}


def lightnings(module, site, **settings):
    """Train a copy of a module in Lightning alone; return its state, and the trainer's metrics."""
    module = deepcopy(module)
    trainer = L.Trainer(max_epochs=1, limit_val_batches=0, **TRAINER, **settings)
    trainer.fit(module, datamodule=site)
    return copies(dict([*module.named_parameters(), *module.named_buffers()])), trainer.callback_metrics


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "plain"])
@pytest.mark.parametrize("metrics", [False, True])
def test_a_client_before_aggregation_equals_lightning_bit_for_bit(optimizer, metrics):
    module = Lit(optimizer=optimizer, metrics=metrics)
    start, sent = deepcopy(module), SentRows()
    federated(module, sent, rounds=1, trainer={"precision": "32-true"})
    for client, row in enumerate(sent.rows[0]):
        expected, logged = lightnings(start, Site(client))
        assert expected.keys() == row.keys()
        assert all(torch.equal(row[name], value) for name, value in expected.items())
        assert sent.logged[0][client]["train_loss"].value({}) == float(logged["train_loss_epoch"])
        assert any(
            not torch.equal(value, dict(start.named_parameters()).get(n, value)) for n, value in row.items()
        )


def test_one_step_of_one_client_equals_lightning_bit_for_bit_after_the_round():
    module = Lit(lr=0.01, optimizer="plain")
    start = deepcopy(module)
    run = federated(module, data=sites(1), rounds=1, local_steps=1, trainer={"precision": "32-true"})
    expected, _ = lightnings(start, Site(0), limit_train_batches=1)
    assert all(torch.equal(value, expected[name]) for name, value in run.state_dict().items())


@pytest.mark.parametrize("executor", [None, VectorizedExecutor()])
def test_rounds_equal_a_loop_that_makes_a_new_optimizer_in_each(executor):
    """The schedule continues over rounds, momentum does not."""
    module = Lit()
    loop = deepcopy(module).double()
    run = federated(module, rounds=3, executor=executor)
    site_batches = []
    for seed in range(2):
        site = Site(seed)
        site.setup("fit")
        site_batches.append([(inputs.double(), targets) for inputs, targets in site.train_dataloader()])
    driver = torch.optim.SGD(loop.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(driver, max_lr=0.2, total_steps=6)
    settings = []
    for _ in range(6):
        settings.append({key: driver.param_groups[0][key] for key in ("lr", "momentum")})
        driver.step()
        schedule.step()
    for number in range(3):
        trained = []
        for batches in site_batches:
            client = deepcopy(loop)
            biases = [p for n, p in client.named_parameters() if n.endswith("bias")]
            weights = [p for n, p in client.named_parameters() if n.endswith("weight")]
            groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights}]
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
            for step in range(2):
                for group in optimizer.param_groups:
                    group.update(settings[2 * number + step])
                optimizer.zero_grad()
                inputs, targets = batches[step]
                cross_entropy(client(inputs), targets, label_smoothing=0.1).backward()
                optimizer.step()
            trained.append(client.state_dict())
        mean = {
            n: sum(state[n] for state in trained) / 2 for n in trained[0] if trained[0][n].is_floating_point()
        }
        loop.load_state_dict(mean, strict=False)
    found = {name: value for name, value in run.state_dict().items() if value.is_floating_point()}
    assert distance(found, {name: loop.state_dict()[name] for name in found}) < 1e-12
    assert run.metrics["client/lr"] == settings[-1]["lr"]


def test_the_server_is_the_mean_of_lightnings_clients():
    module = Lit(optimizer="adamw", lr=0.01)
    start = deepcopy(module)
    run = federated(module, data=sites(4), rounds=1)
    states = [lightnings(start.double(), Site(seed, dtype=torch.float64))[0] for seed in range(4)]
    for name, value in run.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, sum(state[name] for state in states) / 4, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["FBN", "FedTAN", "FixBN", "MaintainedMomentum"])
def test_executors_agree_under_methods(method):
    start = Lit()
    runs = [
        federated(deepcopy(start), getattr(callbacks, method)(), rounds=3, executor=executor)
        for executor in (None, VectorizedExecutor())
    ]
    assert distance(runs[0].state_dict(), runs[1].state_dict()) < 1e-12
    plain = federated(deepcopy(start), rounds=3)
    assert distance(runs[0].state_dict(), plain.state_dict()) > 1e-6


class Rates(FederatedCallback):
    """The learning rate of each local step."""

    role = "observer"

    def __init__(self):
        self.rates = []

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.rates.append(cohort.optimizer.param_groups[0]["lr"])


class Scheduled(Lit):
    def __init__(self, interval="step", frequency=1):
        super().__init__()
        self.interval, self.frequency, self.configured = interval, frequency, 0

    def configure_optimizers(self):
        self.configured += 1
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.001 * (count + 1))
        config = {"scheduler": schedule, "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.parametrize(
    ("interval", "frequency", "counts"),
    [
        ("step", 1, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("step", 2, [1, 1, 2, 2, 2, 3, 3, 3, 4]),  # Lightning counts steps within an epoch
        ("epoch", 1, [1, 1, 1, 2, 2, 2, 3, 3, 3]),
        ("epoch", 2, [1, 1, 1, 1, 1, 1, 2, 2, 2]),
    ],
)
def test_a_schedule_counts_as_in_lightning(interval, frequency, counts):
    """With unequal numbers of local steps, the schedule counts those of the longest client, whoever takes part."""
    data = FederatedDataModule([Site(0, train=8), Site(1, train=24)], server=Site(9))
    seen = Rates()
    module = Scheduled(interval, frequency)
    federated(module, seen, data=data, rounds=3, local_epochs=1)
    assert seen.rates == pytest.approx([0.001 * count for count in counts])
    assert module.configured == 1
    absent = Rates()
    away = ClientFailures(schedule={1: [[1, 2]]})  # the longest client reports in round 3 only
    federated(Scheduled(interval, frequency), absent, data=data, rounds=3, local_epochs=1, failures=away)
    assert absent.rates == pytest.approx([0.001 * counts[place] for place in (0, 3, 6, 7, 8)])

    class Alone(Scheduled):
        def on_train_batch_start(self, batch, batch_idx):
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    alone = Alone(interval, frequency)
    alone.rates = []
    trainer = L.Trainer(max_epochs=3, limit_val_batches=0, **TRAINER)
    trainer.fit(alone, datamodule=Site(1, train=24))
    assert alone.rates == pytest.approx(seen.rates)


def test_each_group_with_a_schedule_of_its_own_has_its_rate_in_the_metrics():
    class TwoLambdas(Lit):
        def configure_optimizers(self):
            groups = [{"params": self.net[0].parameters()}, {"params": self.net[3].parameters()}]
            optimizer = torch.optim.SGD(groups, lr=0.1)
            halved, constant = lambda epoch: 0.5**epoch, lambda epoch: 1.0
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, [halved, constant])]

    metrics = federated(TwoLambdas(), rounds=3).metrics
    assert (metrics["client/lr"], metrics["client/lr_weights_1"]) == (0.025, 0.1)


def test_parameters_in_no_group_are_frozen():
    class OnlyTheHead(Lit):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net[3].parameters(), lr=0.1)

    module = OnlyTheHead()
    start = copies(dict(module.named_parameters()))
    run = federated(module, rounds=2)
    changed = {
        name for name, value in run.model.named_parameters() if not torch.equal(value.float(), start[name])
    }
    assert changed == {"net.3.weight", "net.3.bias"}
    assert {name for name, value in run.model.named_parameters() if value.requires_grad} == changed
    head = sum(value.numel() for name, value in module.named_parameters() if name in changed)
    assert run.metrics["comm/upload_bytes"] == 2 * 8 * (
        head + 2 * 5
    )  # and mean and variance of five channels


class Boring(L.LightningDataModule):
    def train_dataloader(self):
        torch.manual_seed(0)
        return DataLoader(RandomDataset(32, 6), batch_size=2)

    val_dataloader = test_dataloader = train_dataloader


def test_the_boring_model_of_lightning_runs_unchanged():
    module = BoringModel()
    start, sent = deepcopy(module), SentRows()
    run = federated(
        module, sent, data=FederatedDataModule([Boring(), Boring()], server=Boring()), rounds=2, local_steps=3
    )
    assert run.fitted.current_epoch == 2
    expected, _ = lightnings(start.double(), FederatedToDouble())
    assert distance(sent.rows[0][0], expected) < 1e-12


class FederatedToDouble(Boring):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch.double()


def test_the_transformer_of_lightning_runs_unchanged():
    class Words(L.LightningDataModule):
        def train_dataloader(self):
            drawn = torch.Generator().manual_seed(0)
            words = torch.randint(50, (8, 7), generator=drawn)
            return DataLoader(TensorDataset(words, words), batch_size=4)

    class Small(LightningTransformer):
        def __init__(self):
            L.LightningModule.__init__(self)
            self.model = Transformer(vocab_size=50, ninp=8, nhead=2, nhid=8, nlayers=1, dropout=0.0)

        def prepare_data(self):
            """The demo downloads its text here."""

    module = Small()
    start, sent = deepcopy(module), SentRows()
    federated(
        module,
        sent,
        data=FederatedDataModule([Words(), Words()]),
        rounds=1,
        trainer={"precision": "32-true", "limit_val_batches": 0},
    )
    expected, _ = lightnings(start, Words())
    assert all(torch.equal(sent.rows[0][0][name], value) for name, value in expected.items())


def test_an_autoencoder_with_batches_of_inputs_alone():
    class Inputs(Site):
        def train_dataloader(self):
            return DataLoader(self.samples.tensors[0], self.batch_size)

        val_dataloader = train_dataloader

    class Autoencoder(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6))

        def training_step(self, batch):
            return {"loss": mse_loss(self.net(batch), batch), "extra": 1}

        def validation_step(self, batch):
            self.log("val/mse", mse_loss(self.net(batch), batch))

        def configure_optimizers(self):
            return [torch.optim.Adam(self.parameters(), lr=0.05)]

    data = FederatedDataModule([Inputs(0), Inputs(1)], server=Inputs(2))
    first, last = (
        federated(deepcopy(module), data=data, rounds=r).metrics for module, r in [(Autoencoder(), 1)] * 2
    )
    assert first["val/mse"] == last["val/mse"]
    module = Autoencoder()
    assert federated(module, data=data, rounds=8).metrics["val/mse"] < first["val/mse"]


def test_the_steps_of_clients_draw_the_same_numpy_numbers_whatever_happened_before():
    import numpy as np

    class Mixup(Lit):
        def training_step(self, batch, batch_idx):
            share = float(np.random.beta(0.4, 0.4))
            mixed = share * batch[0] + (1 - share) * batch[0].flip(0)
            self.log("share", share)
            scores = self(mixed)
            return share * cross_entropy(scores, batch[1]) + (1 - share) * cross_entropy(
                scores, batch[1].flip(0)
            )

    start = Mixup()
    runs = []
    for seed in (1, 2):
        np.random.seed(seed)
        runs.append(federated(deepcopy(start), rounds=2))
    assert distance(runs[0].state_dict(), runs[1].state_dict()) == 0
    assert runs[0].metrics["share"] == runs[1].metrics["share"]
    assert runs[0].metrics["share"] != federated(deepcopy(start), rounds=1).metrics["share"]
    with pytest.raises(ConfigurationError, match="draws random numbers of NumPy"):
        federated(deepcopy(start), rounds=1, executor=VectorizedExecutor())


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_batch_start"])
def test_a_rate_that_is_changed_by_hand_is_refused(hook):
    class ByHand(Lit):
        def configure_optimizers(self):
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return self.optimizer

    def change(self, *given):
        self.optimizer.param_groups[0]["lr"] *= 0.9

    setattr(ByHand, hook, change)
    with pytest.raises(
        ConfigurationError,
        match=r"configure_optimizers: a hook or step changed 'lr' of the optimizer|param_groups\[0\]\['lr'\]",
    ):
        federated(ByHand(), rounds=2)
