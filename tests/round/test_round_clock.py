"""Where the time of a round goes: the parts are those that took it, and together they are the round."""

import time

import pytest
from lightning.pytorch.loggers import CSVLogger

from fl_lightning import FederatedCallback, FederatedModule, NetworkTask
from fl_lightning.aggregation import WeightedMean
from fl_lightning.round.clock import RoundClock
from tests.support.command_line import run
from tests.support.helpers import SGD, blobs, fit, small_cnn

PARTS = [f"time/{part}_s" for part in RoundClock.PARTS]
NAP = 0.05


class Naps(NetworkTask):
    def client_loss(self, batch):
        time.sleep(NAP / 3 * (self.run.slow == "forward_backward"))
        return super().client_loss(batch)

    def evaluate_batch(self, *args):
        time.sleep(NAP * (self.run.slow == "evaluation"))
        super().evaluate_batch(*args)


class Module(FederatedModule):
    """Sleeps in one part of a round."""

    slow = ""

    def __init__(self, model, *settings, **named):
        super().__init__(Naps(model), *settings, **named)

    def client_batches(self, *args):
        time.sleep(NAP * (self.slow == "data"))
        return super().client_batches(*args)


class SlowMean(WeightedMean):
    def blocks(self, *args):
        time.sleep(NAP)
        return super().blocks(*args)


class SlowCallback(FederatedCallback):
    def on_local_step_end(self, trainer, pl_module, cohort, step):
        time.sleep(NAP)


class SlowLogger(CSVLogger):
    def log_metrics(self, *args, **kwargs):
        time.sleep(NAP)


class Rows(FederatedCallback):
    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.rows.append(dict(pl_module.metrics))


@pytest.mark.parametrize(
    "slow", ["data", "forward_backward", "callbacks", "aggregation", "evaluation", "logging"]
)
def test_time_is_where_it_was_spent(slow, tmp_path):
    module = Module(small_cnn(), SGD, local_steps=1, aggregator=SlowMean() if slow == "aggregation" else None)
    module.slow = slow
    seen = Rows()
    methods = [SlowCallback(), seen] if slow == "callbacks" else [seen]
    logger = SlowLogger(tmp_path) if slow == "logging" else False
    started = time.perf_counter()
    fit(module, blobs(), 3, methods, limit_val_batches=1, logger=logger)
    row = seen.rows[-1]
    assert 0.9 * NAP <= row[f"time/{slow}_s"] < time.perf_counter() - started
    if slow not in ("evaluation", "logging"):
        assert row["time/round_s"] >= row[f"time/{slow}_s"]
        assert max(PARTS, key=row.get) == f"time/{slow}_s"


def test_parts_add_up_to_the_round():
    seen = Rows()
    fit(FederatedModule(small_cnn(), SGD, local_steps=2), blobs(), 3, [seen])
    for row in seen.rows[1:]:  # a round's row is complete in the next one
        assert sum(row[part] for part in PARTS) == pytest.approx(row["time/round_s"])
        assert min(row[part] for part in PARTS) >= 0
        assert "time/evaluation_s" not in row


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_what_a_profiler_has_seen_is_in_the_run_directory(profiler):
    attempt = run("--trainer.profiler", profiler).attempt
    assert "run_training_epoch" in (attempt.path / "fit-profile.txt").read_text()


def test_without_a_profiler_there_is_no_report():
    assert not list(run().attempt.path.glob("*profile*"))
