"""Which model is the best one: the metric decides, and a metric that does not is an error."""

from pathlib import Path

import pytest
import torch

from fl_lightning import Classification, ConfigurationError, FederatedModule
from fl_lightning.clients.tasks import best_is
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from tests.support.command_line import message_of, rows, run
from tests.support.helpers import SGD, Rows, blobs, federated_run, fit, small_cnn
from tests.support.lightning_sites import Lit

EVERY_ROUND = ("--trainer.check_val_every_n_epoch", 1)


@pytest.mark.parametrize(("metric", "best"), [("val/loss", min), ("val/accuracy", max)])
def test_the_best_loss_is_the_smallest_and_the_best_accuracy_the_largest(metric, best):
    attempt = run("--checkpoint.monitor", metric, *EVERY_ROUND).attempt
    curve = {row["round"]: row[metric] for row in rows(attempt) if row["round"]}
    kept = torch.load(attempt.checkpoints / "best.ckpt")["global_step"]
    assert len(set(curve.values())) > 1
    assert curve[kept] == best(curve.values())


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        ("val/loss", "min"),
        ("test/loss_calibrated", "min"),
        ("val/my_loss", "min"),
        ("val/accuracy", "max"),
        ("test/accuracy_silobn", "max"),
        ("test/mean_iou", "max"),
        ("val/pixel_accuracy", "max"),
        ("val/personal_accuracy", "max"),
        ("test/client_accuracy_worst", "max"),
        ("val/client_loss_worst", "min"),
        ("bn/drift", None),
        ("val/client_accuracy_variance", None),
        ("val/accuracyless", None),
    ],
)
def test_a_metric_knows_which_of_its_values_are_best(metric, best):
    assert best_is(metric) == best


def test_a_name_that_begins_like_another_metric_has_its_own_best():
    known = {"error": "min", "error_free": "max", "f1": "max", "f1_gap": "min"}
    for name, best in known.items():
        for metric in (f"val/{name}", f"test/{name}_silobn", f"val/client_{name}_worst"):
            assert best_is(metric, known) == best


def test_a_metric_of_ones_own_needs_a_mode(capsys):
    line = (
        "checkpoint.monitor: 'train/norm' does not say whether large or small values are best; set checkpoint.mode to max or min; "
        "known metrics are accuracy, loss"
    )
    assert message_of(capsys, lambda: run("--checkpoint.monitor", "train/norm")) == f"error: {line}\n"
    assert not Path("runs").exists()
    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    with pytest.raises(ConfigurationError) as refused:
        fit(module, blobs(), 1, [RoundCheckpoint(monitor="train/norm")])
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("model", "monitor", "end"),
    [
        (small_cnn, "val/acuracy", "known metrics are accuracy, loss; did you mean accuracy?"),
        (small_cnn, "val/norm", "known metrics are accuracy, loss"),
        (Lit, "val/aurocs", "a name such as val/acc says this; did you mean auroc or auc?"),
        (Lit, "val_losss", "a name such as val/acc says this; did you mean loss?"),
        (Lit, "train/norm", "a name such as val/acc says this"),
    ],
)
def test_a_misspelt_metric_has_a_suggestion(model, monitor, end):
    settings = {"client_optimizer": SGD} if model is small_cnn else {}
    with pytest.raises(ConfigurationError) as refused:
        fit(
            FederatedModule(model(), local_steps=1, **settings),
            blobs(),
            1,
            [RoundCheckpoint(monitor=monitor)],
        )
    assert str(refused.value).endswith(f"max or min; {end}")


def test_the_quality_of_a_task_of_ones_own_is_known():
    class Retrieval(Classification):
        quality = "recall"

        def metrics(self, counts):
            return {"recall": super().metrics(counts)["accuracy"]}

    keeper, seen = RoundCheckpoint(monitor="val/recall"), Rows()
    federated_run(keeper, seen, trainer={"limit_val_batches": 1.0}, local_steps=1, task=Retrieval())
    assert keeper.best_score == pytest.approx(max(row["val/recall"] for row in seen.rows.values()))


@pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`, callbacks"
)  # the old best means nothing
@pytest.mark.parametrize("monitor", [None, "val/accuracy", "val/loss"])
def test_a_checkpoint_of_the_time_when_max_was_the_default_loads(monitor):
    """One of a loss that kept the worst model is not compared with: the best one is that of the rounds to come."""
    settings = ("--checkpoint.monitor", monitor, *EVERY_ROUND) if monitor else EVERY_ROUND
    source = run("--trainer.max_epochs", 1, *settings).attempt
    last = source.checkpoints / "last.ckpt"
    checkpoint = torch.load(last)
    (key,) = [key for key in checkpoint["callbacks"] if "RoundCheckpoint" in key] or [None]
    if key is not None:
        old = f"RoundCheckpoint{{'monitor': {monitor!r}, 'mode': 'max'}}"
        assert (key == old) == (monitor != "val/loss")
        checkpoint["callbacks"][old] = checkpoint["callbacks"].pop(key)
        torch.save(checkpoint, last)
    cli = run("--ckpt_path", "last", *settings)
    assert cli.trainer.global_step == 4
    if monitor == "val/loss":
        curve = {row["round"]: row["val/loss"] for row in rows(cli.attempt) if row["round"] > 1}
        assert torch.load(source.checkpoints / "best.ckpt")["global_step"] == min(curve, key=curve.get)
