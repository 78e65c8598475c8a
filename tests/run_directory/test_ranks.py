"""A scheduler numbers the runs that it starts at once; each of them is still a run of its own."""

import pytest
from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

from fl_lightning.experiments.run_directory.metrics_log import JSONLinesLogger, read_metrics
from tests.support.command_line import rows, run
from tests.support.helpers import federated_run

NAMES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


@pytest.fixture
def numbered(monkeypatch):
    """The third of four processes; the rank is read when Lightning is imported, which is long ago here."""
    for name in NAMES:
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(rank_zero_only, "rank", _get_rank())


def test_run_that_a_scheduler_has_numbered_writes_its_rows_and_goes_on(numbered, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    attempt = run("--trainer.max_epochs", 2).attempt
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2]
    run("--ckpt_path", "last", "--trainer.max_epochs", 3)
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2, 3]


def test_a_numbered_run_starts_ranks_of_its_own(numbered, monkeypatch):
    monkeypatch.setattr("fl_lightning.experiments.run.number_of_ranks.cores_of_a_run", lambda: 2)
    cli = run("--trainer.max_epochs", 2, "--model.local_steps", 7)
    assert cli.trainer.num_devices == 2
    assert [row["round"] for row in rows(cli.attempt)] == [0, 1, 2]


def test_trainer_in_a_script_writes_its_rows_under_any_rank(numbered, tmp_path):
    federated_run(rounds=2, trainer={"logger": JSONLinesLogger(tmp_path)}, local_steps=1)
    assert [row["round"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
