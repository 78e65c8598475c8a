"""``runs``: all runs below a folder at a glance, from the files that are there."""

import csv
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.runs_frame import runs_frame, settings_of
from fl_lightning.files import write_json, write_text
from tests.support.command_line import message_of
from tests.support.written_runs import write_run


@pytest.fixture
def runs():
    """A finished, a diverged, a failed and a stopped run, one that diverged with an error, and no run."""
    write_run(Path("runs/bn/a-s0"), accuracy=0.5)
    gn = write_run(Path("runs/gn/b-s1"), name="gn", norm="gn", seed=1, accuracy=0.75, callback="my.Mine")
    result = json.loads((gn / "result.json").read_text())
    write_json(gn / "result.json", {**result, "diverged": True})
    for seed, error in ((2, "ValueError: too large"), (3, "Diverged: round 3"), (4, "")):
        place = write_run(Path(f"runs/bn/a-s{seed}"), seed=seed, accuracy=seed / 8, finished=False)
        if error:
            write_text(place / "error.txt", f"Traceback\n{error}\n")
    write_text(Path("runs/bn/a-s0/wandb/files/config.yaml"), "x: 1\n")
    write_text(Path("runs/other/config.yaml"), "x: 1\n")


def table_of(capsys, *args):
    """The rows of the printed table by column."""
    main(["runs", *args])
    head, line, *rows = capsys.readouterr().out.splitlines()
    widths = [len(part) for part in line.split("  ")]
    starts = [sum(widths[:i]) + 2 * i for i in range(len(widths))]
    cut = [
        [row[a : a + width].strip() for a, width in zip(starts, widths, strict=True)] for row in (head, *rows)
    ]
    assert cut[-1][0].startswith(f"{len(rows) - 2} run")
    return [dict(zip(cut[0], row, strict=True)) for row in cut[1:-2]]


def test_each_run_is_a_row_with_its_state_and_its_best_round(runs, capsys):
    rows = table_of(capsys)
    assert [(row["name"], row["seed"], row["state"]) for row in rows] == [
        ("bn", "0", "finished"),
        ("bn", "2", "failed"),
        ("bn", "3", "diverged"),
        ("bn", "4", "stopped"),
        ("gn", "1", "diverged"),
    ]
    assert rows[0] == {
        "name": "bn", "method": "FedAvg", "data": "Digits", "seed": "0", "rounds": "2", "planned": "2", "state": "finished",
        "metric": "val/accuracy", "value": "0.5", "best": "0.5", "best_round": "2",
        "directory": "runs/bn/a-s0",
    }  # fmt: skip
    assert rows[-1]["method"] == "FedAvg + my.Mine()"
    with Attempt(Path("runs/bn/a-s4")).lock():
        assert table_of(capsys, "runs/bn")[-1]["state"] == "running"


def test_the_best_round_is_that_of_a_trained_model_and_of_the_tasks_metric():
    place = write_run(Path("runs/a"), finished=False)
    write_json(place / "run.json", {"method": "FedAvg + FixBN()", "metrics": {"error": {"best": "min"}}})
    values = [0.1, 0.5, "NaN", 0.25, 0.25, 0.75]
    rows = [{"round": r, "val/error": x, "val/accuracy": 0.0} for r, x in enumerate(values)]
    write_text(
        place / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows) + '{"round": 6, "val/er'
    )
    (run,) = runs_frame(Path("runs")).to_dict("records")
    assert run["method"] == "FedAvg + FixBN()"
    assert [run[name] for name in ("rounds", "metric", "value", "best", "best_round")] == [
        5,
        "val/error",
        0.75,
        0.25,
        3,
    ]


def test_runs_are_sorted_and_filtered_by_columns_settings_and_metrics(runs, capsys):
    rows = table_of(capsys, "--where", "name=BN", "--where", "model.local_steps=7.0", "--sort", "best")
    assert [(row["seed"], row["best"]) for row in rows] == [
        ("2", "0.25"),
        ("3", "0.375"),
        ("0", "0.5"),
        ("4", "0.5"),
    ]
    assert {row["model.local_steps"] for row in rows} == {"7"}
    assert table_of(capsys, "--where", "seed=9") == []
    assert [row["seed"] for row in table_of(capsys, "--where", "test/accuracy=0.75")] == ["1"]
    assert [row["seed"] for row in table_of(capsys, "--where", "model.model.norm=gn")] == ["1"]
    assert [row["test/accuracy"] for row in table_of(capsys, "--sort", "test/accuracy")][:2] == [
        "0.5",
        "0.75",
    ]


def test_runs_behind_links_are_shown_once(tmp_path):
    elsewhere = write_run(tmp_path / "disk/gn/b-s1", name="gn", seed=1)
    run = write_run(Path("runs/bn/a-s0"))
    Path("runs/bn/a-latest").symlink_to("a-s0")  # a name of a run that is there
    Path("runs/again").symlink_to(Path("runs").resolve())  # a loop
    Path("runs/0-disk").symlink_to(tmp_path / "disk")
    Path("runs/lost").symlink_to("nowhere")
    assert [*runs_frame(Path("runs"))["directory"]] == [str(run), "runs/0-disk/gn/b-s1"]
    assert elsewhere.is_dir()


def test_the_csv_has_all_columns_and_all_digits(capsys):
    write_run(Path("runs/a"), accuracy=0.1 + 0.2)
    write_run(Path("runs/b"), seed=1, finished=False)
    main(["runs", "--csv", "out/runs.csv", "--sort", "seed"])
    first, second = csv.DictReader(Path("out/runs.csv").read_text().splitlines())
    assert float(first["test/accuracy"]) == float(first["best"]) == 0.1 + 0.2
    assert (first["rounds"], first["directory"], second["test/accuracy"]) == ("2", "runs/a", "")


def test_files_that_no_run_writes_leave_a_row_without_their_values():
    place = write_run(Path("runs/a"))
    for name in ("result.json", "run.json", "metrics.jsonl"):
        (place / name).write_text("[1")
    (run,) = runs_frame(Path("runs")).to_dict("records")
    assert (run["name"], run["state"], run["metric"], run["rounds"]) == ("bn", "stopped", None, 0)


@pytest.mark.parametrize("damaged", ['{"rou', "[1]", '{"val/accuracy": 0.9}', '{"round": null}', "nonsense"])
def test_a_damaged_line_of_metrics_hides_neither_other_lines_nor_other_runs(damaged):
    place = write_run(Path("runs/a"), finished=False)
    write_run(Path("runs/b"), seed=1)
    rows = [{"round": 1, "val/accuracy": 0.5}, {"round": 2, "val/accuracy": 0.7}]
    first, second = map(json.dumps, rows)
    third = json.dumps({"round": 3, "val/accuracy": None})
    (place / "metrics.jsonl").write_text(f"{first}\n{damaged}\n{second}\n{third}\n")
    runs = runs_frame(Path("runs"))
    assert len(runs) == 2
    assert runs.set_index("seed").loc[0, ["rounds", "metric", "value", "best_round"]].tolist() == [
        3,
        "val/accuracy",
        0.7,
        2,
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["elsewhere"], "runs: elsewhere has no run (no folder with a config.yaml); give a folder such as"),
        (
            ["--sort", "bets"],
            "runs: no run has a column or setting 'bets'; did you mean best?; there are name, ",
        ),
        (["--where", "model.steps=3"], "runs: no run has a column or setting 'model.steps'"),
        (["--where", "seed"], "--where: 'seed' must be COLUMN=VALUE, such as"),
        (["--csv", "runs"], "csv: runs is a folder; give a file in it"),
        (["--columns", "x"], "unrecognized arguments: --columns"),
    ],
)
def test_a_wrong_argument_is_one_line(runs, capsys, args, message):
    line = message_of(capsys, partial(main, ["runs", *args]))
    assert line.startswith(f"error: {message}")
    assert line.count("\n") == 1


def test_settings_are_named_without_init_args():
    fixbn = {"class_path": "x.FixBN", "init_args": {"freeze_round": 3}}
    tree = {"trainer": {"callbacks": [fixbn], "max_epochs": 2}, "data": {"class_path": "x.Digits"}}
    assert dict(settings_of(tree)) == {
        "trainer.callbacks.FixBN": "FixBN",
        "trainer.callbacks.FixBN.freeze_round": 3,
        "trainer.max_epochs": 2,
        "data": "Digits",
    }


def test_the_command_imports_neither_torch_nor_lightning(runs):
    code = (
        "import sys; from fl_lightning.__main__ import main; main(['runs']); "
        "print([name for name in ('torch', 'lightning', 'pydantic', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_closed_pipe_ends_the_command_without_a_traceback(runs):
    command = f"{sys.executable} -m fl_lightning runs | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
