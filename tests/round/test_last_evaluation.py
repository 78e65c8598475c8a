"""What a run ends with is one number, in its result and as the last point of its curve."""

import json

import pytest
from command_line import rows, run, write_config
from helpers import SGD, blobs, fit, small_cnn

from fl_lightning import FederatedModule


@pytest.mark.parametrize(("fraction", "split"), [(0.2, "val"), (0.0, "test")])
def test_last_round_is_evaluated_however_rarely_others_are(fraction, split):
    write_config({"data.init_args.val_fraction": fraction, "trainer.check_val_every_n_epoch": 3})
    attempt = run("--trainer.max_epochs", 5).attempt
    *earlier, last = rows(attempt)
    result = json.loads(attempt.result.read_text())
    assert [row["round"] for row in earlier if f"{split}/accuracy" in row] == [0, 3]
    assert {metric: last[f"{split}/{metric}"] for metric in ("loss", "accuracy")} == {
        metric: result[f"{split}/{metric}"] for metric in ("loss", "accuracy")
    }


def test_the_trainer_keeps_how_often_it_evaluates():
    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    settings = {"limit_val_batches": None, "check_val_every_n_epoch": 2}
    assert fit(module, blobs(), 3, **settings).check_val_every_n_epoch == 2
    assert "val/accuracy" in module.metrics
