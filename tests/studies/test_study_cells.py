"""Cells: what run directories say of them, what they share, and what computes them."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from fl_lightning import __version__
from fl_lightning.cli.command_line import main, resolve
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory import source
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.config_digest import config_hash
from fl_lightning.experiments.run_directory.describe import process_seconds
from fl_lightning.experiments.run_directory.source import provenance
from fl_lightning.experiments.studies.cells import Cell, CellState, changed_code
from fl_lightning.experiments.studies.collecting import collect
from fl_lightning.experiments.studies.progress import time_left
from fl_lightning.experiments.studies.tables import caption, remarks
from tests.support.untrained_cells import BASE, STUDY, cell, cells_of, finish, read_study, study_cells


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "options", [["--model.model.norm=gn"], ["--trainer.callbacks+=FBN", "--seed_everything=3"]]
)
def test_settings_are_resolved_as_fit_prints_them_and_refused_in_its_words(options, capsys):
    arguments = [*BASE, *options]
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert resolve(arguments) == printed
    with pytest.raises(ConfigurationError, match=r"^there is no setting 'model.norm'; did you mean "):
        resolve([*arguments, "--model.norm=gn"])
    assert capsys.readouterr() == ("", "")


def test_callbacks_that_a_study_adds_stay_if_a_label_sets_the_callbacks(tmp_path):
    """The list of a label replaces that of the base, and no callback that `trainer.callbacks+` adds."""
    added = {"trainer.max_epochs": 40, "trainer.callbacks+": ["ClientEvaluation"]}
    methods = {
        "BN": {},
        "FixBN": {"trainer.callbacks": ["FixBN"]},
        "FBN": {"trainer.callbacks+": ["FBN"]},
        "none": {"trainer.callbacks": []},
    }
    scale = {**STUDY["scales"]["quick"], "settings": added}
    study = {"title": "A study", "axes": {"method": methods}, "scales": {"quick": scale}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(study))
    cells = cells_of(read_study(tmp_path / "mine.yaml", "quick"), [])
    found = {
        label: [
            x["class_path"].rpartition(".")[2]
            for x in cells.cell({"method": label}, 0).config["trainer"]["callbacks"]
        ]
        for label in methods
    }
    assert found == {
        "BN": ["ClientEvaluation"],
        "FixBN": ["FixBN", "ClientEvaluation"],
        "FBN": ["ClientEvaluation", "FBN"],
        "none": ["ClientEvaluation"],
    }


def test_a_result_of_other_code_counts_unless_it_is_computed_anew():
    one = cell()
    assert one.state().phase == "missing"
    finish(one, provenance=[{**one.now, "fl_lightning": "0ld"}])
    state, why = one.state(), f"fl_lightning 0ld, now {one.now['fl_lightning']}"
    assert (state.phase, state.why, state.round) == ("done", why, 40)
    state = replace(one, rerun=True).state()
    assert (state.phase, state.why, state.round) == ("stale", why, 0)
    finish(one, ".2", provenance=[])
    assert one.state().why == "the result does not name its code"
    finish(one, ".3")
    finish(one, ".4", provenance=[{**one.now, "torch": "1.0"}])
    for again in (False, True):  # a later one by other versions takes nothing away
        state = replace(one, rerun=again).state()
        assert (state.phase, state.why) == ("done", "")
        assert state.attempt.path.name.endswith(".3")


@pytest.mark.parametrize("of_other_data", ["", ".2"])
def test_of_two_results_one_of_other_code_counts_before_one_of_other_data(of_other_data):
    one = cell()
    one.data = {"training": "now"}
    for attempt in ("", ".2"):
        old = attempt == of_other_data
        training, code = ("others", one.now) if old else ("now", {**one.now, "torch": "1.0"})
        finish(one, attempt, provenance=[code], data={"training": training})
    state = one.state()
    assert (state.phase, state.why) == ("done", f"torch 1.0, now {one.now['torch']}")
    state = replace(one, rerun=True).state()
    assert state.phase == "stale"


def test_one_of_two_codes_of_a_run_suffices_to_name_it():
    one = cell()
    finish(one, provenance=[{**one.now, "fl_lightning": "0ld"}, one.now])
    assert one.state().why.startswith("fl_lightning 0ld, now ")


def test_a_shorter_run_or_a_half_written_result_is_no_result():
    one = cell()
    folder = finish(one, rounds=39)
    assert one.state().phase == "missing"
    (folder / "result.json").write_text('{"rounds": 4')
    assert one.state().phase == "missing"


@pytest.mark.parametrize(
    "content",
    ["[1]", "null", "{}", "7", '"text"', '{"method": "FedAvg"'],
)
def test_a_result_that_no_run_writes_is_named_and_its_cell_runs_again(content):
    one = cell()
    place = finish(one) / "result.json"
    place.write_text(content)
    state = one.state()
    assert state.phase == "missing"
    assert state.why.startswith(f"{place} is not what a finished run writes: ")
    assert state.why.isprintable()


def test_a_study_without_axes_has_a_cell_for_each_seed():
    cells = study_cells(axes={}, choose=[])
    assert [(one.labels, one.seed) for one in cells.table([])] == [({}, 0), ({}, 1)]


def test_runs_of_other_lengths_are_other_cells():
    """A stopped run of many rounds is nothing that a shorter one goes on from, in one study or in two."""
    cells = study_cells(axes={"trainer.max_epochs": [3, 6]}, choose=[])
    short, long = (cells.cell({"trainer.max_epochs": label}, 0) for label in ("3", "6"))
    assert short.key != long.key
    assert short.job != long.job
    finish(long, rounds=6, planned_rounds=6)
    assert (short.state().phase, long.state().phase) == ("missing", "done")


def test_the_last_round_is_that_of_the_last_whole_row():
    """However long the file is: it is read again and again while a run goes on."""
    one = cell()
    folder = finish(one)
    (folder / "result.json").unlink()
    row = '{"round": %d, "x": "' + 1000 * "x" + '"}\n'
    (folder / "metrics.jsonl").write_text("".join(row % number for number in range(200)) + row[:-9] % 200)
    (folder / "error.txt").write_text("ValueError: too large\n")
    assert one.state().round == 199
    (folder / "metrics.jsonl").write_text('{"round": 1')
    assert one.state().round == 0


def test_a_cell_is_running_while_its_folder_is_locked_and_failed_where_it_left_an_error():
    one = cell()
    folder = finish(one)
    (folder / "result.json").unlink()
    (folder / "metrics.jsonl").write_text('{"round": 3}\n')
    (attempt,) = one.directory.attempts()
    with attempt.lock():
        assert (one.state().phase, one.state().round) == ("running", 3)
    (folder / "error.txt").write_text("Traceback\nValueError: too large\n")
    assert (one.state().phase, one.state().why) == ("failed", "ValueError: too large")


def test_a_stopped_cell_goes_on_from_its_checkpoint_of_the_same_code_only():
    one = cell()
    folder = finish(one)
    (folder / "result.json").unlink()
    (folder / "checkpoints").mkdir()

    def checkpoint(code):
        record = {"provenance": [{**one.now, "fl_lightning": code}]}
        kept = {
            "fl_lightning": {"record": record},
            "global_step": 3,
            "state_dict": {},
            "pytorch-lightning_version": "2",
        }
        AtomicCheckpointIO().save_checkpoint(kept, folder / "checkpoints" / "last.ckpt")

    checkpoint(one.now["fl_lightning"])
    assert one.state().phase == "stopped"
    assert one.checkpoint() == folder / "checkpoints" / "last.ckpt"
    checkpoint("0ld")
    assert (one.state().phase, one.checkpoint()) == ("missing", None)


@pytest.mark.slow
def test_how_a_cell_is_computed_stands_in_its_configuration():
    """Whatever the base says for runs by themselves."""
    Path("base.yaml").write_text("threads: 2\ntrainer: {accelerator: auto, devices: 2}\n")
    scale = {**STUDY["scales"]["quick"], "base": [STUDY["scales"]["quick"]["base"], "base.yaml"]}
    ((one, *_),) = study_cells(scales={"quick": scale}).trials
    assert one.config["threads"] == 1
    assert one.config["model"]["executor"] == {
        "class_path": "fl_lightning.SequentialExecutor",
        "init_args": {"compile": False},
    }
    assert (one.config["trainer"]["accelerator"], str(one.config["trainer"]["devices"])) == ("cpu", "1")
    ((other, *_),) = study_cells(["--model.executor=VectorizedExecutor", "--trainer.max_epochs=3"]).trials
    assert other.config["model"]["executor"]["class_path"] == "fl_lightning.VectorizedExecutor"
    assert other.rounds == 3


def test_no_value_of_a_stale_cell_is_in_the_table():
    cells = study_cells(choose=[], axes={"method": {"BN": {}}})
    one = cells.cell({"method": "BN"}, 0)
    one.data = {"training": "now"}
    finish(one, data={"training": "others"}, **{"test/accuracy": 0.5})
    results = collect(cells.study, [one], [], {})
    assert (len(results.values), [*results.cells["phase"]]) == (0, ["stale"])


def test_what_is_read_of_the_runs_of_another_method_says_whose_costs_they_are():
    methods = {"BN": {}, "silo": {"metric": "test/accuracy_silobn"}, "GN": {"model.model.norm": "gn"}}
    cells = study_cells(choose=[], axes={"method": methods})
    lines = remarks(collect(cells.study, cells.table([]), [], {}))
    costs = [[line for line in of_row if line.startswith("costs")] for of_row in lines]
    assert costs == [[], ["costs are those of method=BN"], []]


def test_all_columns_of_a_row_are_measured_with_the_same_statistics():
    measured = {"test/accuracy": 0.5, "test/loss": 2.0, "test/own_accuracy": 0.75}
    measured |= {f"{name}_silobn": value / 4 for name, value in measured.items()}
    labels = {"BN": {}, "SiloBN": {"metric": "test/accuracy_silobn"}}
    names = ("test/accuracy", "test/loss", "test/own_accuracy")
    metrics = {name: name for name in (*names, "test/other")}
    cells = study_cells(choose=[], axes={"method": labels}, metrics=metrics)
    table = cells.table([])
    for one in table[:2]:  # both labels have the same runs
        (finish(one, **measured, **{"test/other": 1.0}) / "metrics.jsonl").write_text("")
    bn, silobn = collect(cells.study, table, [], {}).rows
    assert [bn.of(name)[0] for name in metrics] == [0.5, 2.0, 0.75, 1.0]
    assert [silobn.of(name)[0] for name in names] == [0.125, 0.5, 0.1875]
    assert silobn.of("test/other").empty  # not measured with these statistics


@pytest.mark.parametrize("personal", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("metric", ["test/{}accuracy", "{}test_f1"])
def test_named_clients_are_judged_by_the_models_that_they_use(metric, named, personal):
    """Hospitals use their own models under FedBN, unless a label asks for the server's."""
    of_server = metric.format("")
    measured = {of_server: 0.5, metric.format("own_"): 0.75}
    measured |= {metric.format("personal_"): 0.25} if personal else {}
    measured |= {"metrics": [name for name in measured if "/" not in name]}
    labels = {"FedBN": {}, "server": {"metric": of_server}}
    cells = study_cells(choose=[], axes={"method": labels}, metrics={of_server: "accuracy"})
    table = cells.table([])
    folder = finish(table[0], **measured)  # both labels have the same run
    (folder / "metrics.jsonl").write_text("")
    (folder / "partition.json").write_text(json.dumps({"clients": ["Oslo"]} if named else {}))
    results = collect(cells.study, table, [], {})
    fedbn, server = results.rows
    assert [row.of(of_server)[0] for row in (fedbn, server)] == [0.75 if named else 0.5, 0.5]
    words = "accuracy of FedBN: the model that each client uses, on the client's own data."
    assert (words in caption(results)) == named
    line = "the server's model has the mean of the clients' local state, which no client uses"
    assert (line in remarks(results)[0]) == personal


def checkout(folder, monkeypatch):
    """A package in a git checkout."""
    for name in ("fl_lightning", "callbacks", "datamodules", "docs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file.py").write_text("x = 1\n")
    (folder / ".gitignore").write_text("*.pyc\n")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        git(folder, *arguments)
    monkeypatch.setattr(source, "_HOME", folder / "fl_lightning")


def git(folder, *arguments):
    names = ["-c", "user.name=one", "-c", "user.email=one@example.org"]
    subprocess.run(["git", "-C", str(folder), *names, *arguments], check=True, capture_output=True)


def package():
    source._package.cache_clear()
    try:
        return provenance({})["fl_lightning"]
    finally:
        source._package.cache_clear()


def test_the_code_of_a_checkout_has_a_digest_of_what_is_committed_and_of_what_is_not(tmp_path, monkeypatch):
    folder = tmp_path / "a folder"
    checkout(folder, monkeypatch)
    clean = package()
    assert clean.startswith(f"{__version__} ")
    assert "+" not in clean
    seen = [clean]
    no_utf8 = os.fsdecode(b"callbacks/\xff.py")
    for name in (
        "fl_lightning/file.py",
        "callbacks/file.py",
        "datamodules/file.py",
        "callbacks/new ö.py",
        no_utf8,
    ):
        place = folder / name
        before = place.read_bytes() if place.exists() else None
        for text in ("x = 2\n", "x = 3\n"):
            place.write_text(text)
            if text == "x = 3\n" and before is not None:
                git(folder, "add", name)  # to be committed
            seen.append(package())
            assert seen[-1].startswith(f"{clean}+")
        git(folder, "reset", "-q")
        place.unlink() if before is None else place.write_bytes(before)
        assert package() == clean
    assert len({*seen}) == len(seen)
    for other in ("docs/file.py", "docs/new.py", "callbacks/file.pyc"):
        (folder / other).write_text("y\n")
    assert package() == clean
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "docs")
    assert package() == clean
    (folder / "callbacks/file.py").write_text("x = 2\n")
    git(folder, "commit", "-qam", "a change")
    changed = package()
    assert changed.partition("+")[0] != clean
    assert "+" not in changed


@pytest.mark.parametrize("why", ["no checkout", "within another", "no git", "slow"])
def test_without_a_checkout_the_code_has_its_version(why, tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    if why in ("no git", "slow"):
        checkout(folder, monkeypatch)
        error = FileNotFoundError("git") if why == "no git" else subprocess.TimeoutExpired("git", 10)
        monkeypatch.setattr(subprocess, "run", raising(error))
    else:
        (folder / "fl_lightning").mkdir(parents=True)
        if why == "within another":
            (tmp_path / ".gitignore").write_text("site-packages\n")
            for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
                git(tmp_path, *arguments)
        monkeypatch.setattr(source, "_HOME", folder / "fl_lightning")
    assert package() == __version__


def raising(error):
    def run(*arguments, **settings):
        raise error

    return run


def test_own_code_is_named_by_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "mine_for_source.py"
    config = {"trainer": {"callbacks": [{"class_path": "mine_for_source.Mine"}]}}
    own.write_text("class Mine:\n    x = 1\n")
    before = provenance(config)
    assert before.keys() - provenance({}).keys() == {"mine_for_source"}
    own.write_text("class Mine:\n    x = 2\n")
    assert changed_code([before], provenance(config)).startswith(
        f"mine_for_source {before['mine_for_source']}, now "
    )
    assert provenance({"model": {"class_path": "torch.optim.SGD"}}) == provenance({})
    assert provenance(
        {"trainer": {"callbacks": ["FixBN", {"class_path": "fl_lightning.callbacks.FedProx"}]}}
    ) == provenance({})


def test_what_an_own_class_imports_is_source_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_package").mkdir()
    files = {
        "__init__.py": "", "method.py": "from . import losses\nimport torch, json\nclass Mine:\n    pass\n",
        "losses.py": "def f():\n    from mine_package.deeper import g\n", "deeper.py": "def g():\n    pass\n", "other.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / "mine_package" / name).write_text(text)
    config = {"model": {"class_path": "mine_package.method.Mine"}}
    before, counted = provenance(config), set()
    for name, text in files.items():
        (tmp_path / "mine_package" / name).write_text(f"{text}\nx = 2\n")
        if provenance(config) != before:
            counted.add(name)
        (tmp_path / "mine_package" / name).write_text(text)
    assert counted == {"method.py", "losses.py", "deeper.py"}


def test_own_functions_are_code_and_initial_weights_are_settings(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    own, weights = tmp_path / "mine_for_functions.py", tmp_path / "w.pt"
    loss = {"model": {"loss": "mine_for_functions.my_loss"}}
    net = {"model": {"class_path": "library_model", "init_args": {"function": "mine_for_functions.net"}}}
    own.write_text("def my_loss(): return 1\ndef net(): return 1\n")
    before = provenance(loss), provenance(net)
    own.write_text("def my_loss(): return 2\ndef net(): return 1\n")
    assert all(provenance(config) != old for config, old in zip((loss, net), before, strict=True))
    start = {"model": {"initial_weights": str(weights)}}
    found = []
    for content in (b"one", b"other"):
        weights.write_bytes(content)
        os.utime(weights, ns=(len(content), len(content)))
        found.append(config_hash(start))
    assert found[0] != found[1]
    assert provenance({})["torchvision"] == version("torchvision")


def test_classes_of_a_notebook_and_classes_in_classes_have_no_file_of_their_own(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    config = {
        "trainer": {
            "callbacks": [{"class_path": "__main__.Mine"}, {"class_path": "mine_nowhere.Outer.Inner"}]
        }
    }
    assert provenance(config) == provenance({})


def test_the_time_left_counts_the_start_of_each_cell():
    started, resumed, third, running = (cell(seed=seed) for seed in range(4))
    finish(started, train_seconds=4.0, process_seconds=10.0)
    finish(resumed, train_seconds=30.0, process_seconds=5.0)  # of its last start
    finish(third, train_seconds=2.0)  # by a version that did not measure it
    states = [(one, one.state()) for one in (started, resumed, third, running)]
    assert time_left(states, 1) == 10
    assert time_left(states[-1:], 1) is None
    assert time_left(states[-1:], 1, cell_seconds=7.0) == 7


def test_the_time_left_of_a_cell_is_that_of_cells_with_its_labels():
    config = cell().config

    def state(seconds=None):
        return (
            CellState("missing") if seconds is None else CellState("done", result={"train_seconds": seconds})
        )

    def one(method, seed):
        return Cell({"method": method}, seed, config)

    quick = [(one("BN", seed), state(seconds)) for seed, seconds in enumerate((60.0, 2.0, 2.0, None))]
    slow = [(one("FedTAN", seed), state(seconds)) for seed, seconds in enumerate((100.0, None))]
    assert time_left([*quick, *slow], 1) == 2 + 100
    assert time_left([*quick, *slow], 2) == 100
    assert time_left([*quick, *slow, (one("FBN", 0), state())], 1) == 2 + 100 + (2 + 100) / 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_seconds_of_a_process_are_those_since_its_start():
    def tell():
        time.sleep(0.3)
        told.put(process_seconds())

    context = multiprocessing.get_context("fork")
    told, began = context.SimpleQueue(), time.monotonic()
    process = context.Process(target=tell)
    process.start()
    assert 0.28 < told.get() < time.monotonic() - began + 0.05
    process.join()
