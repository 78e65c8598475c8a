"""Settings outside of a run's name change no weight, no byte and no metric of a round.

``accelerator: gpu`` and ``num_nodes: 2`` need machines of their own: they cannot be varied here. That
batches do not depend on ``threads`` of a data module is tested with the data modules that have them.
"""

from functools import cache

import pytest
import torch

from fl_lightning import FederatedModule, Run
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.config_digest import OUTSIDE_THE_HASH
from tests.support.command_line import rows, run
from tests.support.contract import SHIPPED, TABLE, model_for
from tests.support.helpers import SGD, blobs

ROUNDS = 3
CSV = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}"
WAYS = {
    "accelerator": [["--trainer.accelerator=auto"]],
    "check_val_every_n_epoch": [["--trainer.check_val_every_n_epoch=2"], ["--trainer.check_val_every_n_epoch=3"]],
    "default_root_dir": [["--trainer.default_root_dir=null"]],
    "devices": [["--trainer.devices=2"]],
    "enable_checkpointing": [["--trainer.enable_checkpointing=true"]],
    "enable_model_summary": [["--trainer.enable_model_summary=true"]],
    "enable_progress_bar": [["--trainer.enable_progress_bar=true"], ["--trainer.enable_progress_bar=false"]],
    "limit_predict_batches": [["--trainer.limit_predict_batches=1"]],
    "log_every_n_steps": [["--trainer.log_every_n_steps=2"]],
    "logger": [[f"--trainer.logger={CSV}"]],
    "max_epochs": [["--trainer.max_epochs=4"]],
    "max_time": [["--trainer.max_time=00:01:00:00"]],
    "num_nodes": [["--trainer.num_nodes=1"]],
    "profiler": [["--trainer.profiler=simple"]],
    "strategy": [["--trainer.strategy=auto"]],
    "bars": [
        ["--trainer.callbacks+=RoundProgress"],
        ["--trainer.callbacks+=lightning.pytorch.callbacks.TQDMProgressBar"],
    ],
    "checkpoints": [
        ["--checkpoint.every_n_rounds=1", "--checkpoint.monitor=val/loss", "--checkpoint.mode=min"],
        ["--checkpoint.every_n_seconds=null"],
    ],
}  # fmt: skip
SLOW = ("devices",)


def weights(cli):
    """The server's model after the last round that all runs have in common."""
    path = cli.attempt.checkpoints / f"round_{ROUNDS}.ckpt"
    return AtomicCheckpointIO().load_checkpoint(path)["state_dict"]


def numbers(cli):
    """What the rounds found, by round, without what a clock says."""
    return {row["round"]: row for row in rows(cli.attempt) if row["round"] <= ROUNDS}


def federation(*settings):
    keep = ("--checkpoint.keep_rounds", f"[{ROUNDS}]", "--trainer.check_val_every_n_epoch=1")
    return run("--trainer.max_epochs", ROUNDS, *keep, *settings)


@cache
def usual():
    """Name, weights and numbers of the run that no setting has changed."""
    cli = federation()
    return cli.attempt.path.name.partition(".")[0], weights(cli), numbers(cli)


def assert_usual(other):
    stem, wanted, found = usual()
    assert other.attempt.path.name.partition(".")[0] == stem
    for (name, tensor), copy in zip(wanted.items(), weights(other).values(), strict=True):
        assert torch.equal(tensor, copy), name
    again = numbers(other)
    assert found.keys() == again.keys() == {0, *range(1, ROUNDS + 1)} & found.keys()
    for number in found:
        for name in found[number].keys() & again[number].keys():
            assert found[number][name] == again[number][name], (number, name)
        assert {x for x in found[number] if x.startswith("comm/")} <= again[number].keys()


def test_every_setting_outside_is_varied():
    assert WAYS.keys() >= OUTSIDE_THE_HASH


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize(
    "setting", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in WAYS]
)
def test_a_setting_outside_changes_no_number(setting):
    for way in WAYS[setting]:
        assert_usual(federation(*way))


METHODS = {row.callback: row for row in TABLE if row.callback in SHIPPED}
"""The last row of each shipped callback."""


@pytest.mark.parametrize("name", METHODS)
def test_how_often_the_server_evaluates_changes_nothing_but_the_bytes_of_who_sends_for_it(name):
    """Metrics that only an evaluation has are compared where both runs evaluate."""
    row, found = METHODS[name], []
    for every in (1, 2):
        steps = {} if "local_epochs" in row.module else {"local_steps": 2}
        method, data = SHIPPED[name](**row.settings), blobs()
        model = model_for(method, data).double()
        module = FederatedModule(model, **{"client_optimizer": SGD, **steps, **row.module})
        trainer = {"accelerator": "cpu", "precision": "64-true", "enable_progress_bar": False}
        often = {"max_epochs": 4, "check_val_every_n_epoch": every}
        one = Run(module, data, callbacks=[method], **trainer, **often)
        one.fit()
        logged = {x["round"]: x for x in rows(one.attempt)}
        found.append((module.model.state_dict(), logged))
    (weights_1, often), (weights_2, seldom) = found
    assert all(torch.equal(x, weights_2[name]) for name, x in weights_1.items())
    pairs = [(often[n][key], seldom[n][key], key) for n in seldom for key in seldom[n] if key in often[n]]
    other = {key for one, two, key in pairs if one != two}
    assert all(key.startswith("comm/") for key in other)
    assert bool(other) == SHIPPED[name].sends_for_evaluations
    assert often.keys() == {0, 1, 2, 3, 4}
