"""``study`` from its file to its table, each cell computed in this process: nothing twice, nothing mixed, T* as if alone."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fl_lightning.cli.study
from fl_lightning.__main__ import main
from fl_lightning.cli.federated_cli import FederatedCLI
from tests.support.command_line import message_of, run
from tests.support.study_in_process import STUDY, finished_study, found, study, write

SMALL = {"quick": {"base": "tiny.yaml"}}


def own(line):
    """A line of metrics without times."""
    return {name: value for name, value in line.items() if "time/" not in name}


@pytest.mark.slow
@pytest.mark.pictures
def test_the_table_is_printed_and_the_same_command_again_trains_nothing(ran, capsys):
    study()
    out = capsys.readouterr().out
    assert len(ran) == 6
    assert "When to freeze (A paper, Figure 1). Scale: quick, seeds 0, 1." in out
    groups = {tuple(group.labels.values()): group for group in found().rows}
    assert [*groups] == [("2", "BN"), ("2", "GN"), ("4", "BN")]
    assert [*groups["2", "BN"].cells["published"]] == [0.5, 0.5]
    for group in groups.values():
        for seed, one in enumerate(group.runs):
            result = json.loads(Path(one["directory"], "result.json").read_text())
            assert group.of("test/accuracy")[seed] == result["test/accuracy"]
            assert one["exchanges"] == 6
    written = [path.name for path in Path("runs/studies/s-quick").iterdir()]
    assert {name for name in written if "table." in name} == {"table.md", "table.tex", "table.csv"}
    assert {"by_T_.png", "by_T_.pdf"} <= {*written}
    study()
    assert len(ran) == 6
    assert capsys.readouterr().out.partition("When to freeze")[2] == out.partition("When to freeze")[2]


@pytest.mark.slow
def test_a_study_replaces_no_tables_of_another_file_of_its_name(ran, capsys):
    finished_study()
    table = Path("runs/studies/s-quick/table.md").read_text()
    Path("other").mkdir()
    content = Path("s.yaml").read_text().replace("tiny.yaml", "../tiny.yaml")
    Path("other/s.yaml").write_text(content)
    told = message_of(capsys, lambda: main(["study", "other/s.yaml"]))
    words = (
        "runs/studies/s-quick has the results of s.yaml; choose another folder by --name, such as --name mine"
    )
    assert told == f"error: study: {words}\n"
    assert Path("runs/studies/s-quick/table.md").read_text() == table
    main(["study", "other/s.yaml", "--name", "mine"])
    assert Path("runs/studies/mine/table.md").is_file()
    main(["study", "./s.yaml"])


def test_one_first_stage_is_trained_once_and_each_freeze_round_is_as_if_alone(ran):
    study(
        "--trainer.check_val_every_n_epoch=1", "--checkpoint.monitor=val/loss", "--checkpoint.mode=max"
    )  # the best of this is early
    shared = Path(found().rows[0].runs[0]["directory"])
    result = json.loads((shared / "result.json").read_text())
    (origin,) = result["continued_from"]
    assert origin["round"] == 2
    config = shared / "config.yaml"
    run("--name", "alone", config=str(config))
    (alone,) = Path("runs/alone").glob("*")
    for name in ("last", "best"):
        kept = [torch.load(folder / f"checkpoints/{name}.ckpt") for folder in (shared, alone)]
        states = [one["state_dict"] for one in kept]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert kept[0]["global_step"] == kept[1]["global_step"] <= 2
    lines = [
        [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (shared, alone)
    ]
    for one, other in zip(*lines, strict=True):
        assert own(one) == own(other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--checkpoint.every_n_rounds=5", "--checkpoint.every_n_seconds=null"],
        ["--checkpoint.monitor=val/loss", "--run_root=linked/elsewhere"],
    ],
)
def test_cells_that_share_a_first_stage_finish_wherever_and_whenever_checkpoints_are_written(ran, options):
    Path("place").mkdir()
    Path("linked").symlink_to("place")
    write(axes={"T*": STUDY["axes"]["T*"]}, without=[], published=[], claims=[], scales=SMALL)
    study(*options)
    paths = [path for root in ("runs", "place") for path in Path(root).rglob("cells/6/*/result.json")]
    results = [json.loads(path.read_text()) for path in paths]
    assert sorted(len(result["continued_from"]) for result in results) == [0, 1]
    assert [result["rounds"] for result in results] == [6, 6]


@pytest.mark.slow
def test_a_damaged_first_stage_is_named_and_trained_anew(ran, capsys):
    finished_study()
    child, _, parent = (Path(group.runs[0]["directory"]) for group in found().rows)
    before = [own(json.loads(x)) for x in (child / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(child)
    shared = parent / "checkpoints/round_2.ckpt"
    shared.write_bytes(shared.read_bytes()[:-100])
    ran.clear()
    capsys.readouterr()
    study()
    assert (
        f"damaged: {shared.relative_to(Path.cwd())}; T*=2 method=BN seed=0 trains the first 2 rounds itself"
        in capsys.readouterr().out
    )
    assert len(ran) == 1
    assert [own(json.loads(x)) for x in (child / "metrics.jsonl").read_text().splitlines()] == before
    assert json.loads((child / "result.json").read_text())["continued_from"] == []


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_settings_that_do_not_work_are_all_named_before_the_first_cell(options, ran, capsys):
    freeze = {
        "2": {"trainer.callbacks": [{"class_path": "FixBN", "init_args": {"freeze_round": 3.0}}]},
        "4": {"model.lacal_steps": 3},
    }
    # T* is chosen by trials: its second label is trained after the others
    write(axes={**STUDY["axes"], "T*": freeze}, choose=[{"axis": "T*", "at": {"method": "BN"}}], claims=[])
    said = message_of(capsys, lambda: study(*options))
    assert not ran
    assert all(x in said for x in ("2 mistakes", "T*=2", "freeze_round", "T*=4", "'model.lacal_steps'"))


@pytest.mark.slow
def test_rounds_that_are_to_be_kept_are_kept_beside_those_of_first_stages(ran):
    finished_study("--checkpoint.keep_rounds=[4]")
    kept = [
        {path.name for path in Path(group.runs[0]["directory"], "checkpoints").glob("round_?.ckpt")}
        for group in found().rows
    ]
    assert kept == [{"round_4.ckpt"}, {"round_4.ckpt"}, {"round_2.ckpt", "round_4.ckpt"}]


@pytest.mark.slow
def test_a_dry_run_names_the_cells_and_trains_none(ran, capsys):
    study("--dry-run")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "missing  T*=2 method=BN seed=0, after round 2 of T*=4 method=BN seed=0"
    assert out[-1] == "0 of 6 cells are done; no cell has been timed yet"
    assert ran == []
    assert not Path("runs").exists()
    finished_study()
    capsys.readouterr()
    study("--dry-run")
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("done     T*=2 method=BN seed=0  runs/cells/6/")
    assert out[-1].startswith("6 of 6 cells are done; about 0 s left")


@pytest.mark.slow
def test_a_cell_that_fails_is_named_and_the_others_go_on(ran, capsys):
    write(
        axes={"method": {"BN": {}, "broken": {"data.min_examples": 4000}}},
        without=[],
        published=[],
        claims=[],
    )
    message = message_of(capsys, study)
    assert message == "error: study: 2 cells failed; fix the errors above and run the same command again\n"
    assert len(ran) == 4
    broken = found().rows[1]
    assert [one["phase"] for one in broken.runs] == ["failed"] * 2
    assert broken.of("test/accuracy").empty
    assert broken.runs[0]["why"].startswith("min_examples=4000 leaves no client; use at most 288")
    assert len(found().rows[0].of("test/accuracy")) == 2


@pytest.mark.slow
def test_what_was_chosen_on_validation_data_is_recorded_and_trained_once(ran, capsys):
    write(
        axes={"method": {"BN": {}, "GN": {"model.model.norm": "gn"}}, "model.client_optimizer.lr": [0.05, 0.2]},
        choose=[{"axis": "model.client_optimizer.lr", "by": ["method"], "extend": 1}], without=[], published=[], claims=[],
    )  # fmt: skip
    study("--dry-run")
    assert (
        "later    4 cells, when model.client_optimizer.lr is chosen by the trials above"
        in capsys.readouterr().out
    )
    study()
    assert len(ran) == 10  # four trials, a further one for each method at its edge, two seeds of each method
    assert [len(choice.extended) for choice in found().choices] == [1, 1]
    for choice, group in zip(found().choices, found().rows, strict=True):
        assert choice.chosen == max(choice.values, key=choice.values.get) == group.labels[choice.axis]
        assert len(group.of("test/accuracy")) == 2
    assert "by val/accuracy of seed 1000" in capsys.readouterr().out


@pytest.mark.slow
def test_a_trial_that_diverges_is_no_failure_of_the_study(ran, capsys):
    lr = "model.client_optimizer.lr"
    choose = [{"axis": lr, "extend": 0}]
    write(axes={lr: [1e30, 0.1]}, choose=choose, without=[], published=[], claims=[])
    study()
    out = capsys.readouterr().out
    assert "failed, and counted as the worst trial: lr=1e+30 seed=1000: round " in out
    assert [group.labels[lr] for group in found().rows] == ["0.1"]
    write(axes={lr: [1e30, 1e29]}, choose=choose, without=[], published=[], claims=[])
    assert message_of(capsys, study).startswith("error: study: 2 cells failed")
    assert [run["phase"] for run in found().rows[0].runs] == ["failed"] * 2


@pytest.mark.slow
def test_runs_that_diverged_are_rows(ran, capsys):
    lr, record = {"model.client_optimizer.lr": 1e30}, {"model.on_divergence": "record"}
    write(
        axes={"method": {"good": {}, "ended": lr, "recorded": {**lr, **record}}}, without=[], published=[], metrics={"test/loss": "loss"},
        claims=["recorded > good"],
    )  # fmt: skip
    for _ in range(2):
        assert message_of(capsys, study).startswith("error: study: 2 cells failed")
    table = Path("runs/studies/s-quick/table.md").read_text()
    (recorded,) = (x for x in table.splitlines() if x.startswith("| recorded"))
    assert "not finite in 2 of 2 runs" in recorded
    for name in ("ended", "recorded"):
        (line,) = (x for x in table.splitlines() if x.startswith(f"- {name}: "))
        assert "diverged in 2 of 2 runs, round 2" in line
    assert found().claims[0].verdict == "undecided"
    main(["report", "runs/studies/s-quick"])
    assert Path("runs/studies/s-quick/report.html").read_text().count("not finite in 2 of 2 runs") == 1


@pytest.mark.slow
def test_a_trial_that_fails_otherwise_leaves_its_choice_open_and_the_rest_goes_on(ran, capsys):
    """What ends it may say nothing of the value: the machine's memory, a full disk."""
    fewest = {"data.min_examples": [20, 4000]}
    methods = {"BN": {}, "GN": {"model.model.norm": "gn"}}
    choice = [{"axis": "data.min_examples", "by": ["method"]}]
    write(axes={"method": methods, **fewest}, choose=choice, without=[{"method": "GN", "data.min_examples": 4000}], published=[], claims=[])  # fmt: skip
    assert message_of(capsys, study).startswith("error: study: 1 cell failed")
    assert [group.labels for group in found().rows] == [{"method": "GN", "data.min_examples": "20"}]
    assert [one.chosen for one in found().choices] == [None, "20"]
    write(axes=fewest, choose=[{"axis": "data.min_examples"}], without=[], published=[], claims=[])
    assert message_of(capsys, study).startswith("error: study: 1 cell failed")


@pytest.mark.slow
def test_a_metric_that_no_run_has_is_told_by_the_first_cell_and_costs_no_cell(ran, capsys):
    write(metrics={"test/accuracy": "test", "test/accuracyy": "test too"})
    with pytest.raises(SystemExit):
        study()
    told = capsys.readouterr()
    first, *others = [line for line in told.out.splitlines() if "test/accuracyy" in line]
    words = "has no test/accuracyy; did you mean test/accuracy or val/accuracy?; there are "
    assert first.startswith(f"metrics: T*=2 method=GN seed=0 {words}")
    assert others == []
    assert told.err.startswith("error: metrics: no evaluation has test/accuracyy; there are ")
    assert not Path("runs/studies/s-quick/study.json").exists()
    assert len(ran) == 6
    write(metrics={"test/accuracy": "test"})
    study()
    assert len(ran) == 6


@pytest.mark.slow
def test_a_column_that_only_some_rows_have_is_no_mistake(ran):
    observed = {"trainer.callbacks": ["ClassifierBias"]}
    metrics = {"test/accuracy": "test", "test/accuracy_calibrated": "seen"}
    write(metrics=metrics, axes={"method": {"BN": {}, "seen": observed}}, without=[], published=[], claims=[])
    study()
    values = [row.of("test/accuracy_calibrated") for row in found().rows]
    assert [len(of_seeds) for of_seeds in values] == [0, 2]


@pytest.mark.slow
def test_the_metric_of_a_label_or_a_choice_that_no_run_has_ends_the_study(ran, capsys):
    lr, nothing = "model.client_optimizer.lr", {"without": [], "published": [], "claims": []}
    write(axes={"method": {"sBN": {"metric": "test/accuracy_static"}}, lr: [0.1, 0.2]}, **nothing)
    with pytest.raises(SystemExit):
        study()
    told = capsys.readouterr()
    assert "metrics: method=sBN lr=0.1 seed=0 has no test/accuracy_static" in told.out
    words = "error: metric: the runs of method=sBN lr=0.1 seed=0 have no test/accuracy_static"
    assert told.err.startswith(words)
    write(axes={lr: [0.1, 0.2, 0.3]}, choose=[{"axis": lr, "metric": "val/acuracy"}], **nothing)
    with pytest.raises(SystemExit):
        study()
    told = capsys.readouterr()
    assert "metrics: lr=0.1 seed=1000 has no val/acuracy; did you mean val/accuracy" in told.out
    assert told.err.startswith("error: choose: the runs have no metric val/acuracy; there are")
    assert not Path("runs/studies/s-quick/study.json").exists()


@pytest.mark.slow
def test_settings_of_the_command_line_are_those_of_every_cell(ran):
    study("--name", "short", "--trainer.max_epochs=2", "--run_root=elsewhere")
    results = [json.loads(path.read_text()) for path in Path("elsewhere/cells/2").glob("*/result.json")]
    assert {result["rounds"] for result in results} == {2}
    folder = Path("elsewhere/studies/short")
    again = "python -m fl_lightning study s.yaml --scale quick --name short --trainer.max_epochs=2 --run_root=elsewhere"
    assert (folder / "table.md").read_text().endswith(f"\n\n`{again}`\n")
    assert (folder / "table.tex").read_text().endswith(f"\n% {again}\n")
    main(["report", str(folder), "--output", "page.html"])
    assert f"<code>{again}</code>" in Path("page.html").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.yaml"], "study: nowhere.yaml cannot be read"),
        (["s.yaml", "--scale", "full"], "--scale: s.yaml has no scale 'full'; use one of quick"),
        (["s.yaml", "--name", "a/b"], "--name: 'a/b' must be the name of a folder"),
        (["s.yaml", "--jobs", "0"], "--jobs: 0 must be at least 1"),
        (["s.yaml", "--jobs", "x"], "argument --jobs: invalid int value: 'x'"),
        (["s.yaml", "--engine", "cloud"], "argument --engine: invalid choice: 'cloud'"),
        (["s.yaml", "--trainer.max_epoch", "3"], "there is no setting"),
        (
            ["s.yaml", "--seed_everything", "5"],
            "seed_everything: 5 is no setting of a study's cells: the study sets seeds",
        ),
        (["s.yaml", "--ckpt_path", "last"], "ckpt_path: last is no setting of a study's cells"),
        (
            ["s.yaml", "--trainer.fast_dev_run", "true"],
            "trainer.fast_dev_run: True is no setting of a study's cells",
        ),
        (["tiny.bin"], "study: tiny.bin cannot be read: it is not UTF-8"),
    ],
)
def test_bad_input_is_one_line(ran, capsys, args, message):
    Path("tiny.bin").write_bytes(b"\xff\xfe")
    assert message in message_of(capsys, lambda: main(["study", *args]))
    assert not Path("runs").exists()


@pytest.mark.parametrize("moment", ["parse_arguments", "collect"])
def test_ctrl_c_at_the_start_or_the_end_says_that_cells_are_kept(moment, ran, capsys, monkeypatch):
    def strike(*arguments, **settings):
        os.kill(os.getpid(), signal.SIGINT)

    owner = FederatedCLI if moment == "parse_arguments" else fl_lightning.cli.study
    monkeypatch.setattr(owner, moment, strike)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    with pytest.raises(SystemExit) as stop:
        study("--model.local_steps=1", "--trainer.max_epochs=1")
    signal.signal(signal.SIGINT, before)
    assert stop.value.code == 130
    line = "stopped by Ctrl-C; finished cells and the checkpoints of others are kept; the same command resumes the study"
    assert capsys.readouterr().err.splitlines()[-1] == line


def test_a_cell_that_ends_before_its_plan_says_so(ran, capsys, monkeypatch):
    monkeypatch.setattr("fl_lightning.experiments.studies.running._PATIENCE", 0)
    stop = {
        "class_path": "EarlyStopping",
        "init_args": {"monitor": "val/accuracy", "mode": "max", "stopping_threshold": 0.0},
    }
    axes = {"method": {"BN": {"trainer.callbacks": [stop]}}}
    write(axes=axes, without=[], published=[], claims=[], scales=SMALL)
    message_of(capsys, study)
    why = found().rows[0].runs[0]["why"]
    assert why.startswith("it ended after round 3 of 6; leave out early stopping and trainer.max_time")


@pytest.mark.parametrize(
    ("cores", "gpus", "accelerator", "threads", "cells"),
    [(4, 0, "auto", None, 4), (4, 0, "auto", 2, 2), (1, 0, "auto", 2, 1), (8, 2, "gpu", 1, 2), (8, 2, "cpu", 1, 8)],
)  # fmt: skip
def test_as_many_cells_run_at_a_time_as_there_are_gpus_or_cores(cores, gpus, accelerator, threads, cells):
    config = {"trainer": {"accelerator": accelerator}, "threads": threads}
    one_cell, engine = (
        SimpleNamespace(any=SimpleNamespace(config=config)),
        SimpleNamespace(cores=cores, gpus=gpus),
    )
    assert fl_lightning.cli.study._room(one_cell, engine) == cells
