"""A checkpoint that was written when all of ``fl_lightning`` stood in one folder, under other class paths, still loads."""

from pathlib import Path

import pytest
import yaml
from command_line import rows, run

WRITTEN = Path(__file__).with_name("before_the_rooms.ckpt")
"""Round 2 of the configuration below, by the state ``eb1b0dd``."""
LOSSES = {3: 0.526723712682724, 4: 0.1613333293547233}
"""Training losses of the rounds after it, as that state went on to log them."""
CONFIG = {
    "seed_everything": 0,
    "threads": 1,
    "trainer": {
        "max_epochs": 4,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "callbacks": [
            {"class_path": "FixBN", "init_args": {"freeze_round": 2}},
            {"class_path": "MaintainedMomentum"},
        ],
    },
    "model": {
        "model": "BNProbe",
        "client_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.5, "momentum": 0.5}},
        "server_optimizer": {"class_path": "SGD", "init_args": {"lr": 1.0, "momentum": 0.5}},
        "client_lr_schedule": {"class_path": "MultiStep", "init_args": {"milestones": [0.5], "gamma": 0.1}},
        "local_steps": 2,
    },
    "data": {"class_path": "Gaussians", "init_args": {"gamma": 0.0, "num_clients": 3}},
}

# it was written with Lightning 2.6.6, which may be newer than the one that reads it
pytestmark = pytest.mark.filterwarnings("ignore:.*newer than your current Lightning version")


@pytest.fixture
def config():
    Path("old.yaml").write_text(yaml.safe_dump(CONFIG))
    return "old.yaml"


def test_training_goes_on_from_it_as_it_would_have_then(config):
    resumed = run("--ckpt_path", WRITTEN, config=config)
    assert {row["round"]: row["train/loss"] for row in rows(resumed.attempt)} == pytest.approx(
        LOSSES, rel=1e-5
    )
    assert resumed.model.record.samples == 720
    whole = run(config=config)
    assert {
        row["round"]: row["train/loss"] for row in rows(whole.attempt) if row["round"] > 2
    } == pytest.approx(LOSSES, rel=1e-5)


def test_its_model_is_evaluated_as_it_was(config):
    assert run("--ckpt_path", WRITTEN, config=config, command="validate").model.metrics["round"] == 2
