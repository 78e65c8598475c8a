"""``search-freeze``: T* on a grid, by validation, from one shared stage I."""

import json
from pathlib import Path

import pytest
import torch
from command_line import attempts, message_of, rows, run, write_config

from fl_lightning.__main__ import main
from fl_lightning.cli import search_freeze
from fl_lightning.cli.search_freeze import Branch, freeze_rounds, summary
from fl_lightning.run_directory.directory import Attempt

GRID = [0, 1, 3]


def search(*args, grid="0,1,0.75", config="tiny.yaml"):
    main(["search-freeze", "--config", config, "--freeze_rounds", grid, *args])
    (path,) = Path("runs/tiny").glob("search-*/search.json")
    return json.loads(path.read_text())


def state(attempt):
    return torch.load(attempt.checkpoints / "last.ckpt", weights_only=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished search and what it found."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        write_config()
        return Path.cwd(), search()


@pytest.fixture
def in_finished(finished, monkeypatch):
    monkeypatch.chdir(finished[0])
    return finished[1]


@pytest.mark.parametrize("index", [1, 2])
def test_every_branch_is_a_fresh_fixbn_run_bit_for_bit(in_finished, index):
    branch = in_finished["branches"][index]
    ours = Attempt(Path(branch["directory"]))
    settings = ("--trainer.callbacks.freeze_round", branch["freeze_round"], "--model.on_divergence", "record")
    fresh = run(*settings, "--name", f"fresh{index}").attempt
    assert fresh.path.name == ours.path.name
    kept = [state(attempt) for attempt in (ours, fresh)]
    origins = [checkpoint["fl_lightning"]["record"].pop("continued_from") for checkpoint in kept]
    assert [len(origin) for origin in origins] == [int(branch["freeze_round"] == 1), 0]
    for key in ("state_dict", "optimizer_states", "fl_lightning"):
        first, second = (
            torch.utils._pytree.tree_flatten_with_path(checkpoint[key])[0] for checkpoint in kept
        )
        assert [place for place, _ in first] == [place for place, _ in second]
        for (place, value), (_, other) in zip(first, second, strict=True):
            if "seconds" not in str(place) and "time/" not in str(place):
                assert torch.equal(value, other) if torch.is_tensor(value) else value == other
    first, second = rows(ours), rows(fresh)
    for row in first + second:
        row.pop("fixbn/freeze_round", None)  # the rows of stage I are those of the run with the largest T*
    assert first == second
    assert [row["round"] for row in rows(ours)] == [0, 1, 2, 3, 4]


def test_stage_one_is_trained_once(in_finished):
    assert [branch["freeze_round"] for branch in in_finished["branches"]] == GRID
    results = [json.loads(Path(b["directory"], "result.json").read_text()) for b in in_finished["branches"]]
    assert [[place["round"] for place in result["continued_from"]] for result in results] == [[], [1], []]


def test_the_choice_is_the_largest_validation_accuracy_after_the_last_round(in_finished):
    last = {
        b["freeze_round"]: rows(Attempt(Path(b["directory"])))[-1]["val/accuracy"]
        for b in in_finished["branches"]
    }
    assert [b["val/accuracy"] for b in in_finished["branches"]] == list(last.values())
    assert in_finished["chosen"] == max(last, key=last.get)
    chosen = in_finished["branches"][GRID.index(in_finished["chosen"])]
    result = json.loads(Path(chosen["directory"], "result.json").read_text())
    assert in_finished["test/accuracy"] == result["test/accuracy"]


def test_test_data_play_no_part_in_the_choice(monkeypatch):
    found = {1: (0.5, 0.9), 2: (0.6, 0.1), 3: (0.6, 0.8)}

    def result(branch):
        validation, test = found[branch.freeze_round]
        found_so = {"val/accuracy": validation, "test/accuracy": test, "rounds": 4, "directory": "here"}
        return {**found_so, "diverged": False, "continued_from": []}

    monkeypatch.setattr(Branch, "result", property(result))
    config = {"trainer": {"callbacks": [{"class_path": "FixBN", "init_args": {}}]}, "checkpoint": {}}
    table = summary([Branch(config, freeze_round, found) for freeze_round in found])
    assert (table["chosen"], table["test/accuracy"]) == (2, 0.1)


def test_the_same_command_again_trains_nothing_and_prints_the_table(in_finished, monkeypatch, capsys):
    before, called, real = attempts(), [], search_freeze.run
    monkeypatch.setattr(search_freeze, "run", lambda args: called.append(args) or real(args))
    assert search() == in_finished
    assert (len(called), attempts()) == (1, before)  # the one that reads the settings
    lines = capsys.readouterr().out.split("Search of T*\n")[1].splitlines()
    assert lines[0] == "T*      val/accuracy  test/accuracy  files"
    tested = [line.split()[0] for line in lines[1:4] if f"{in_finished['test/accuracy']:.4f}" in line]
    assert tested == [str(in_finished["chosen"])]
    assert f"T* = {in_finished['chosen']}, by validation accuracy" in lines[4]


def test_a_stopped_search_goes_on_where_it_was(monkeypatch):
    write_config()
    real = search_freeze.run

    def stopped(args):
        real(args)
        raise SystemExit(130)

    monkeypatch.setattr(search_freeze, "run", stopped)
    with pytest.raises(SystemExit):
        search(grid="1,2")
    (first,) = Path("runs/tiny").glob("*/result.json")
    first.unlink()  # as if it had been stopped before its end
    trained = []
    monkeypatch.setattr(search_freeze, "run", lambda args: trained.append(args[1:]) or real(args))
    found = search(grid="1,2")
    last, kept = (first.parent / "checkpoints" / name for name in ("last.ckpt", "round_1.ckpt"))
    assert [args[1] for args in trained if args[-1] != "--print_config"] == [
        f"--ckpt_path={last}",
        f"--ckpt_path={kept}",
    ]
    assert found["chosen"] in (1, 2)
    assert len(attempts()) == 3


@pytest.mark.parametrize(
    ("changes", "args", "named"),
    [
        ({"data.init_args.val_fraction": 0}, [], ["data.val_fraction", "validation data"]),
        ({"trainer.callbacks": []}, [], ["trainer.callbacks", "one FixBN", "found 0"]),
        ({}, ["--freeze_rounds", "1,5"], ["freeze_rounds: '5'", "0, 1, ..., 4"]),
        ({}, ["--freeze_rounds", "1,half"], ["freeze_rounds: 'half'"]),
        ({}, ["--freeze_rounds", "1.5"], ["freeze_rounds: '1.5'", "[0.0, 1.0]"]),
        ({}, ["--ckpt_path", "last"], ["ckpt_path: last", "leave it out"]),
        ({}, ["--trainer.fast_dev_run", "true"], ["trainer.fast_dev_run"]),
        ({}, ["--trainer.max_epoch", "3"], ["max_epoch"]),
        ({"trainer.max_epochs": None, "model.budget_epochs": 1.0}, ["--freeze_rounds", "0.5"], ["trainer.max_epochs"]),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_one_line(changes, args, named, capsys):
    write_config(changes)
    with pytest.raises(SystemExit) as stop:
        main(["search-freeze", "--config", "tiny.yaml", "--freeze_rounds", "1", *args])
    error = capsys.readouterr().err.strip()
    assert (stop.value.code, error.count("\n"), Path("runs").exists()) == (2, 0, False)
    assert error.startswith("error: ")
    assert all(name in error for name in named)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--config", "tiny.yaml"], "the following arguments are required: --freeze_rounds"),
        (["--freeze_rounds", "1"], "the following arguments are required: --config"),
        (["--config", "tiny.yaml", "--freeze_round", "1"], "the following arguments are required: --freeze_rounds"),
        (["--config", "tiny.yaml", "--freeze_rounds"], "argument --freeze_rounds: expected one argument"),
    ],
)  # fmt: skip
def test_its_own_mistakes_are_one_line(args, line, capsys):
    assert message_of(capsys, lambda: main(["search-freeze", *args])) == f"error: {line}\n"


def test_fractions_are_of_all_rounds():
    assert freeze_rounds("100, 0.5,0.29,1.0,0", 100) == {0, 29, 50, 100}


def test_help_names_the_command(capsys):
    main(["--help"])
    assert "search-freeze" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["search-freeze", "--help"])
    assert stop.value.code == 0
    assert "--freeze_rounds" in capsys.readouterr().out


def test_a_t_star_that_diverges_is_an_answer_and_not_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_config()
    found = search("--model.client_optimizer.init_args.lr", "1e9", grid="0,1")
    assert [branch["diverged"] for branch in found["branches"]] == [True, True]
    assert capsys.readouterr().out.count("(diverged)") >= 2
