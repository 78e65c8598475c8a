"""The learning rates of clients and server are metrics of each round."""

from functools import partial

import pytest
import torch
from torch.optim import Adam, lr_scheduler

from fl_lightning import FederatedModule
from fl_lightning.callbacks import FixBN, MaintainedMomentum
from fl_lightning.experiments.run_directory.result import read_result
from fl_lightning.files import write_json
from fl_lightning.optimizers.client_lr import InverseSteps, MultiStep
from fl_lightning.optimizers.server import FedAdam
from fl_lightning.round.failures import ClientFailures
from fl_lightning.testing import Rows
from tests.support.helpers import SGD, blobs, fit, small_cnn


def rates(rounds, callbacks=(), module=FederatedModule, **settings):
    """The rates of each round by metric."""
    rows = Rows()
    fit(
        module(small_cnn(), **{"client_optimizer": SGD, "local_steps": 1, **settings}),
        blobs(),
        rounds,
        [*callbacks, rows],
    )
    return [
        {name: row[name] for name in sorted(row) if name.startswith(("client/lr", "server/lr"))}
        for row in rows.rows.values()
    ]


@pytest.mark.parametrize("optimizer", [SGD, partial(Adam, lr=0.1)])
def test_rates_are_those_of_the_schedule_and_the_server_exactly(optimizer):
    schedule = MultiStep([0.5, 3], gamma=0.3)
    found = rates(
        4, client_optimizer=optimizer, client_lr_schedule=schedule, server_optimizer=partial(FedAdam, lr=0.02)
    )
    expected = [0.1, 0.1, 0.1 * 0.3, 0.1 * 0.3**2]
    assert found == [{"client/lr": lr, "server/lr": 0.02} for lr in expected]


@pytest.mark.parametrize("callbacks", [[FixBN(freeze_round=1, freeze="affine")], [MaintainedMomentum()]])
def test_methods_that_freeze_a_group_or_restore_an_optimizer_have_the_rate_of_the_schedule(callbacks):
    found = rates(3, callbacks, client_optimizer=partial(Adam, lr=0.1), client_lr_schedule=InverseSteps(1))
    assert [row["client/lr"] for row in found] == [0.1, 0.1 / 2, 0.1 * (1 / 3)]


def test_groups_have_a_metric_each_only_if_the_user_gives_them_a_rate():
    groups = {"bias": {"lr": 0.2}, "scalars": {"lr_scale": 0.5}, "batch_norm": {"weight_decay": 0.1}}
    found = rates(1, parameter_groups=groups)
    assert found == [{"client/lr": 0.1, "client/lr_bias": 0.2, "server/lr": 1.0}]  # no parameter is a scalar
    found = rates(2, parameter_groups={"batch_norm": {"lr_scale": 0.5}}, client_lr_schedule=MultiStep([1]))
    assert [row["client/lr_batch_norm"] for row in found] == [0.05, 0.05 * 0.1]
    assert [row["client/lr"] for row in found] == [0.1, 0.1 * 0.1]


class OwnServer(FederatedModule):
    """A server optimizer of two groups whose rates a user's scheduler halves after each round."""

    def configure_optimizers(self):
        first, *others = self.model.parameters()
        optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": others, "lr": 0.5}])
        self.scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.scheduler.step()


def test_groups_of_the_server_and_a_scheduler_of_the_users_own():
    assert rates(2, module=OwnServer) == [
        {"client/lr": 0.1, "server/lr": 1.0, "server/lr_1": 0.5},
        {"client/lr": 0.1, "server/lr": 0.5, "server/lr_1": 0.25},
    ]


def test_a_skipped_round_has_no_rates():
    found = rates(6, failures=ClientFailures(dropout=0.6), min_clients=2)
    assert {len(row) for row in found} == {0, 2}


def test_a_result_without_rates_is_read(tmp_path):
    result = {
        "method": "FedAvg", "model": "LeNet", "partition": "IID", "rounds": 2, "planned_rounds": 2, "samples": 9,
        "diverged": False, "upload_bytes": 1, "download_bytes": 1, "train_seconds": 1.0, "environment": {},
    }  # fmt: skip
    write_json(tmp_path / "old.json", result)
    write_json(tmp_path / "new.json", {**result, "learning_rates": {"client/lr": 0.1}})
    assert "learning_rates" not in read_result(tmp_path / "old.json")
    assert read_result(tmp_path / "new.json")["learning_rates"] == {"client/lr": 0.1}
