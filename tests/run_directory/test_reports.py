"""What a callback reports becomes files of the run, lines of its result and parts of the run at W&B."""

import csv
import json

import pytest

from fl_lightning import FederatedCallback
from fl_lightning.experiments.weights_and_biases.contents import media
from fl_lightning.methods.run_report import Report, Table
from fl_lightning.pictures.style import new_figure, paper_style
from tests.support.command_line import run, write_config


class Counts(Report, FederatedCallback):
    """Counts rounds, and shows it in every way there is."""

    fails = False

    def __init__(self):
        self.rounds = []

    def on_round_end(self, trainer, pl_module, cohort):
        self.rounds.append(cohort.round)

    def figures(self, rows):
        @paper_style()
        def draw(title):
            if self.fails:
                raise RuntimeError("no ink")
            figure = new_figure(1.0, title)
            figure.subplots().plot([row["round"] for row in rows])
            return figure

        return {"counted": draw}

    def tables(self):
        return {"counted": Table(["round", "name"], [[number, f"the, {number}"] for number in self.rounds])}

    def result(self):
        return {"counted_rounds": float(len(self.rounds))}

    def result_lines(self):
        return {"counted": f"{len(self.rounds)} rounds"}


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config({"trainer.max_epochs": 3, "trainer.callbacks": [{"class_path": "test_reports.Counts"}]})


@pytest.mark.slow
@pytest.mark.pictures
def test_report_is_in_the_run_directory_and_in_the_result(in_folder, capsys):
    cli = run()
    attempt = cli.attempt
    assert (attempt.path / "counted.png").read_bytes()[:4] == b"\x89PNG"
    with (attempt.path / "counted.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["round", "name"],
            ["1", "the, 1"],
            ["2", "the, 2"],
            ["3", "the, 3"],
        ]
    result = json.loads(attempt.result.read_text())
    assert result["counted_rounds"] == 3
    assert result["reports"] == {"counted": "3 rounds"}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("counted")]
    assert line.split() == ["counted", "3", "rounds"]
    found = media(attempt, cli.model)
    assert found["counted_table"].data == [[1, "the, 1"], [2, "the, 2"], [3, "the, 3"]]
    assert "counted" in found


@pytest.mark.pictures
def test_report_that_fails_costs_nothing_but_itself(in_folder, monkeypatch, capsys):
    monkeypatch.setattr(Counts, "fails", True)
    attempt = run().attempt
    assert "a picture of Counts was not written: RuntimeError: no ink\n" in capsys.readouterr().err
    assert (attempt.path / "counted.csv").is_file()
    assert (attempt.path / "learning_curve.png").is_file()
    assert json.loads(attempt.result.read_text())["rounds"] == 3
