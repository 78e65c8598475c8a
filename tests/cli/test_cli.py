import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
import yaml

from fl_lightning.__main__ import main as program
from fl_lightning.cli.command_line import main
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.directory import Attempt
from tests.support.command_line import attempts, rows, run, write_config
from tests.support.readme_code import METHOD_BLOCKS

ROUNDS, CLIENTS, STEPS, BATCH = 4, 3, 2, 10
WEIGHTS = 25 * 32 + 25 * 32 * 32 + 25 * 32 * 64 + 64 * 10 + 10  # LeNet on one-channel images of 8x8 pixels
AFFINE = STATISTICS = 2 * (32 + 32 + 64)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its folder, what it printed and its command line."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        printed = []
        patch.setattr(
            "rich.console.Console.print", lambda self, *objects, **_: printed.append(str(objects[0]))
        )
        cli = run()
        return Path.cwd(), "\n".join(printed), cli.attempt.path.resolve()


@pytest.fixture
def in_finished(finished, monkeypatch):
    monkeypatch.chdir(finished[0])
    return finished[2]


def read(path):
    return json.loads(path.read_text())


def test_fit_ends_with_the_table_that_result_json_holds(finished):
    _, printed, folder = finished
    result = read(folder / "result.json")
    table = printed.partition("Result\n")[2]
    assert {
        "method", "model", "partition", "rounds", "planned_rounds", "bn_statistics", "samples", "val/loss", "val/accuracy",
        "test/loss", "test/accuracy", "class_accuracy", "diverged", "upload_bytes", "download_bytes", "train_seconds", "process_seconds", "learning_rates",
        "executor",
        "reports", "seed",
        "directory", "environment", "computed_by", "continued_from", "provenance", "data", "loaded",
        "stopped", "diverged_round", "updates_not_finite", "metrics", "arrays",
    } == set(result)  # fmt: skip
    assert result["method"] == "FedAvg + FixBN(freeze_round=2)"
    assert result["partition"] == "Shards(class_fraction=0.4), 3 clients"
    assert result["bn_statistics"] == [[1, "averaged"], [3, "frozen"]]
    assert "BN statistics    averaged; frozen from round 3" in table
    assert result["directory"] == f"runs/tiny/{folder.name}"
    for name in ("val/loss", "val/accuracy", "test/loss", "test/accuracy"):
        assert f"{result[name]:.4f}" in next(line for line in table.splitlines() if line.startswith(name))
    for text in (result["method"], result["partition"], result["directory"], "LeNet", "240"):
        assert text in table


def test_the_result_of_a_run_that_never_froze_says_so(capsys):
    cli = run("--trainer.max_epochs", 2)
    assert read(cli.attempt.result)["bn_statistics"] == [[1, "averaged"]]
    assert "\nBN statistics    averaged\n" in capsys.readouterr().out


@pytest.mark.parametrize("verbose", [False, True])
def test_the_table_has_at_most_15_rows_unless_the_run_is_verbose(capsys, verbose):
    write_config({"trainer.callbacks": ["FedBN", "ClientEvaluation", "AdaBN"]})
    cli = run(*["--verbose"] * verbose)
    table = capsys.readouterr().out.partition("\nResult\n")[2].splitlines()
    rows = table[: next(i for i, row in enumerate(table) if row.startswith("files "))]
    result = read(cli.attempt.result)
    metrics = [name for name in result if name.startswith(("val/", "test/"))]
    shown = [row.split()[0] for row in rows if "/" in row.split()[0]]
    assert yaml.safe_load(cli.attempt.config.read_text())["verbose"] is False
    if verbose:
        assert {*shown} == {*metrics}
        assert not any(row.startswith("further values") for row in rows)
        whose = next(row for row in rows if row.startswith("test/client_accuracy "))
        assert whose.endswith("  (the server's model, own data)")
    else:
        assert rows[-1].startswith("training time")
        assert rows[-1].endswith(" s without evaluations")
        assert len(rows) == 14  # and the row of files
        assert shown == ["test/own_accuracy", "test/personal_accuracy", "test/accuracy"]
        told = f"{len(metrics) - len(shown)} in result.json; --verbose (in Python verbose=True) prints them"
        assert next(row for row in rows if row.startswith("further values")).endswith(told)


def test_table_has_no_trailing_blanks(finished):
    assert all(line == line.rstrip() for line in finished[1].splitlines())


def test_policy_in_force_is_printed_and_kept(finished):
    _, printed, folder = finished
    table = printed.partition("Result")[0]
    assert "BN running variance  averaged; frozen from round 3" in table
    assert read(folder / "policy.json") == {
        "weight": [[1, "averaged"]],
        "affine": [[1, "averaged"]],
        "mean": [[1, "averaged"], [3, "frozen"]],
        "var": [[1, "averaged"], [3, "frozen"]],
        "counter": [[1, "max"], [3, "frozen"]],
    }


def test_samples_and_bytes_equal_a_count_by_hand(finished):
    folder = finished[2]
    averaged, frozen = [4 * CLIENTS * (WEIGHTS + AFFINE + sent) for sent in (STATISTICS, 0)]
    result = read(folder / "result.json")
    assert result["samples"] == ROUNDS * CLIENTS * STEPS * BATCH
    for way in ("upload", "download"):
        sent = [
            json.loads(line).get(f"comm/{way}_bytes")
            for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        first = averaged if way == "download" else frozen  # what is frozen is received once
        assert sent == [None, averaged, averaged, first, frozen]
        assert result[f"{way}_bytes"] == sum(sent[1:])


def test_run_directory_holds_rounds_partition_and_checkpoint(finished):
    folder = finished[2]
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "metrics.jsonl", "partition.json", "policy.json", "result.json", "checkpoints",
        "partition.png", "learning_curve.png", "class_accuracy.png", "run.json", "participation.csv",
        ".lock",
    }  # fmt: skip
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in lines] == list(range(ROUNDS + 1))
    assert all(next(iter(row)) == "round" for row in lines)
    assert [row["round"] for row in lines if "val/accuracy" in row] == [0, 2, 4]
    assert AtomicCheckpointIO().load_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] == ROUNDS
    partition = read(folder / "partition.json")
    assert sum(partition["sizes"]) + partition["val_size"] == 300
    assert [sum(classes) for classes in partition["class_histogram"]] == partition["sizes"]


def test_saved_configuration_is_the_same_run_again(finished, in_finished):
    again = run(config=str(in_finished / "config.yaml")).attempt
    assert again.path == Path("runs/tiny") / f"{in_finished.name}.2"
    assert rows(again) == rows(type(again)(in_finished))
    # another attempt must not hide the finished one from the tests of --ckpt_path last
    again.path.rename(again.path.with_name("again"))


def test_printed_configuration_fed_back_is_the_same_configuration(capsys):
    write_config()
    for config in ("tiny.yaml", "printed.yaml"):
        with pytest.raises(SystemExit) as stop:
            run("--print_config", "--model.local_steps", 3, config=config)
        assert stop.value.code in (0, None)
        printed = capsys.readouterr().out
        if config == "tiny.yaml":
            Path("printed.yaml").write_text(printed)
    assert yaml.safe_load(printed) == yaml.safe_load(Path("printed.yaml").read_text())
    first = run("--model.local_steps", 3, "--name", "a")
    second = run("--name", "a", config="printed.yaml")
    assert second.attempt.path.name == f"{first.attempt.path.name}.2"
    assert rows(first.attempt) == rows(second.attempt)


def test_later_configuration_wins_and_a_dotted_setting_wins_over_both():
    write_config()
    Path("later.yaml").write_text("model: {local_steps: 3}\ntrainer: {max_epochs: 2}\n")
    cli = main(["fit", "--config", "tiny.yaml", "--config", "later.yaml", "--trainer.max_epochs", "1"])
    assert (cli.model.local_steps, cli.trainer.max_epochs) == (3, 1)
    assert cli.attempt.path.parent == Path("runs/later")


@pytest.mark.parametrize("given", [["--config", "bare.yaml"], ['--trainer.callbacks=["FedProx"]']])
def test_a_list_of_callbacks_replaces_an_earlier_one_with_its_settings(given, capsys):
    write_config({"trainer.callbacks": [{"class_path": "FedProx", "init_args": {"mu": 10.0}}]})
    Path("bare.yaml").write_text("trainer: {callbacks: [FedProx]}\n")
    with pytest.raises(SystemExit):
        main(["fit", "--config", "tiny.yaml", *given, "--trainer.callbacks+=FBN", "--print_config"])
    first, second = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert first["init_args"]["mu"] == 0.01
    assert second["class_path"].endswith("FBN")


def test_own_callback_and_model_resolve_by_dotted_path_beside_shipped_ones_by_bare_name(
    tmp_path, monkeypatch
):
    Path("ours.py").write_text(
        "import torch\n"
        "from fl_lightning.callbacks import FixBN\n"
        "class Late(FixBN):\n"
        "    def on_round_end(self, trainer, pl_module, cohort):\n"
        "        pl_module.log('ours/round', cohort.round)\n"
        "    def policy(self, round_number, total_rounds):\n"
        "        return {'2': 'frozen'} if round_number > 2 else {}\n"
        "class Linear(torch.nn.Sequential):\n"
        "    def __init__(self, width: int = 4) -> None:\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.BatchNorm1d(width),\n"
        "                         torch.nn.Linear(width, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    write_config(
        {
            "trainer.callbacks": [{"class_path": "ours.Late"}],
            "model.model": {"class_path": "ours.Linear", "init_args": {"width": 5}},
        }
    )
    cli = run()
    assert [row.get("ours/round") for row in rows(cli.attempt)] == [None, 1.0, 2.0, 3.0, 4.0]
    assert cli.model.model[1].out_features == 5
    assert read(cli.attempt.result)["bn_statistics"] == [[1, "averaged"], [3, "frozen"]]  # layer by layer


def test_classes_channels_and_image_size_reach_the_model_from_the_data():
    model = run("--trainer.fast_dev_run", "true").model.model
    assert (model.in_channels, model.image_size, model.classifier.out_features) == (1, 8, 10)


@pytest.mark.parametrize(("participation", "cohort"), [("1", 1), ("1.0", 3), ("2", 2), ("0.4", 1)])
def test_whole_participation_counts_clients_and_a_fraction_is_a_share_of_them(participation, cohort):
    cli = run("--model.participation", participation, "--trainer.max_epochs", 1)
    assert cli.model.record.samples == cohort * STEPS * BATCH
    assert len(cli.model.plan.cohort(1)) == cohort


@pytest.mark.parametrize(("command", "split"), [("validate", "val"), ("test", "test")])
def test_evaluating_the_last_checkpoint_gives_the_metrics_that_fit_ended_with(in_finished, command, split):
    metrics = run("--ckpt_path", "last", command=command).trainer.callback_metrics
    result = read(in_finished / "result.json")
    for name in (f"{split}/loss", f"{split}/accuracy"):
        assert metrics[name].item() == result[name]


def test_predictions_give_the_accuracy_of_the_test(in_finished, capsys):
    cli = run("--ckpt_path", "last", command="test")
    program(["predict", str(in_finished), "--checkpoint", "last"])
    (file,) = in_finished.glob("predictions_*_last_round_4.csv")
    header, *lines = file.read_text().splitlines()
    assert header == ",".join(["index,target,prediction", *(f"probability_{digit}" for digit in range(10))])
    table = [line.split(",") for line in lines]
    assert [int(index) for index, *_ in table] == list(range(359))
    assert "359 predictions" in capsys.readouterr().out
    targets = torch.cat([targets for _, targets in cli.datamodule.test_dataloader()])
    assert [int(target) for _, target, *_ in table] == targets.tolist()
    right = sum(target == prediction for _, target, prediction, *_ in table)
    assert right / 359 == pytest.approx(read(in_finished / "result.json")["test/accuracy"], abs=1e-6)
    shares = torch.tensor([[float(x) for x in row[3:]] for row in table])
    torch.testing.assert_close(shares.sum(1), torch.ones(359))
    assert shares.argmax(1).tolist() == [int(row[2]) for row in table]


def test_predictions_of_another_round_replace_nothing(capsys):
    path = run("--checkpoint.keep_rounds", "[1]").attempt.path
    first = path / "checkpoints" / "round_1.ckpt"
    written = {}
    for checkpoint, name in (("last", "last_round_4"), (first, "round_1_round_1")):
        program(["predict", str(path), "--checkpoint", str(checkpoint)])
        name = f"predictions_{path.name}_{name}.csv"
        assert f"359 predictions written to {path / name}\n" in capsys.readouterr().out
        written[name] = (path / name).read_text()
    assert {file.name: file.read_text() for file in path.glob("predictions*")} == written
    assert len(set(written.values())) == 2


def test_fast_dev_run_is_one_whole_round_that_writes_nothing(capsys):
    cli = run("--trainer.fast_dev_run", "true")
    assert (cli.trainer.global_step, cli.model.record.samples) == (1, CLIENTS * STEPS * BATCH)
    assert [path.name for path in Path().iterdir()] == ["tiny.yaml"]
    assert "none (fast_dev_run)" in capsys.readouterr().out


def digests(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.slow
def test_same_command_makes_a_second_attempt_and_leaves_the_first_alone():
    first = run("--trainer.max_epochs", 1).attempt
    before = digests(first.path)
    second = run("--trainer.max_epochs", 2).attempt
    assert second.path == first.path.with_name(f"{first.path.name}.2")
    assert digests(first.path) == before
    assert run(
        "--trainer.max_epochs", 2, "--ckpt_path", "last", command="test"
    ).config_init.test.ckpt_path == str(second.checkpoints / "last.ckpt")


def test_seed_changes_everything_random_and_equal_seeds_nothing():
    settings = ("--model.participation", 2, "--trainer.max_epochs", 3)
    first, other, again = (run(*settings, "--seed_everything", seed) for seed in (0, 5, 0))
    stem = first.attempt.path.name.removesuffix("-s0")
    assert attempts() == [f"{stem}-s0", f"{stem}-s0.2", f"{stem}-s5"]
    assert rows(first.attempt) == rows(again.attempt)
    partitions = [read(cli.attempt.partition)["sha256"]["total"] for cli in (first, other, again)]
    assert partitions[0] == partitions[2] != partitions[1]
    assert rows(first.attempt)[0]["val/loss"] != rows(other.attempt)[0]["val/loss"]
    cohorts = [[cli.model.plan.cohort(r) for r in range(1, 20)] for cli in (first, other, again)]
    assert cohorts[0] == cohorts[2] != cohorts[1]
    orders = [cli.datamodule.clients[0].train_batch(0)[1].tolist() for cli in (first, other, again)]
    assert orders[0] == orders[2] != orders[1]


def test_without_validation_data_rows_and_table_are_labelled_test(capsys):
    cli = run("--data.init_args.val_fraction", 0)
    names = {name for row in rows(cli.attempt) for name in row}
    assert "test/accuracy" in names
    assert not any(name.startswith("val/") for name in names)
    result = read(cli.attempt.result)
    assert result["test/accuracy"] == rows(cli.attempt)[-1]["test/accuracy"]
    assert "val/accuracy" not in result
    assert "val/" not in capsys.readouterr().out


def test_run_needs_no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a run opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert run().attempt.result.exists()


@pytest.mark.slow
def test_a_process_of_its_own_knows_methods_by_dotted_path_writes_below_its_folder_and_leaves_no_rank(
    tmp_path,
):
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    temporary = Path(tempfile.mkdtemp())  # tmp_path is too long for the sockets of processes
    places = {"HOME": tmp_path / "home", "XDG_CACHE_HOME": tmp_path / "home", "TMPDIR": temporary}
    methods = [{"class_path": f"methods.{name}"} for name in METHOD_BLOCKS]
    Path("work/methods.py").write_text("\n\n".join(METHOD_BLOCKS.values()))
    write_config({"trainer.callbacks": methods, "trainer.max_epochs": 2}, "work/tiny.yaml")
    command = [sys.executable, "-m", "fl_lightning", "fit", "--config", "tiny.yaml"]
    ranks = ["--trainer.devices", "2"]
    done = subprocess.run(
        [*command, *ranks],
        cwd=tmp_path / "work",
        # the list of fonts takes seconds to make
        env=os.environ
        | {k: str(place) for k, place in places.items()}
        | {"MPLCONFIGDIR": mpl.get_cachedir()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "FedAvg + FedProx() + ServerMomentum() + FedBN()" in done.stdout
    assert [path for place in places.values() for path in place.iterdir()] == []
    temporary.rmdir()
    assert {path.name for path in (tmp_path / "work").iterdir()} - {"__pycache__"} == {
        "tiny.yaml",
        "methods.py",
        "runs",
    }
    (attempt,) = (tmp_path / "work").glob("runs/tiny/*")
    assert [row["round"] for row in rows(Attempt(attempt))] == [0, 1, 2]


def test_saved_configuration_of_a_resumed_run_starts_a_new_run():
    run("--trainer.max_epochs", 2)
    resumed = run("--ckpt_path", "last")
    again = run(config=str(resumed.attempt.config))
    assert again.attempt.path.name == f"{resumed.attempt.path.name}.2"
    assert [row["round"] for row in rows(again.attempt)] == [0, 1, 2, 3, 4]
