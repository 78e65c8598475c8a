"""A run that goes on otherwise than it began says so: in its configuration, result, pictures and at W&B."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.config_digest import deciding_settings
from fl_lightning.experiments.run_directory.describe import run_title
from tests.support.command_line import run, write_config

LR = "model.client_optimizer.lr"
LAST = ("--ckpt_path", "last")


def change(attempt, rounds, *settings):
    return run("--ckpt_path", attempt.checkpoints / "last.ckpt", "--trainer.max_epochs", rounds, *settings)


def result(attempt):
    return json.loads(attempt.result.read_text())


@pytest.mark.slow
def test_a_run_continued_twice_under_other_learning_rates_names_both_everywhere(capsys):
    first = run("--trainer.max_epochs", 1).attempt
    second = change(first, 2, "--model.client_optimizer.init_args.lr", 0.01).attempt
    wider = ("--model.client_optimizer.init_args.lr", 0.02, "--trainer.callbacks", "FedProx")
    cli = change(second, 3, *wider)
    third = cli.attempt
    words = [
        f"continued from round 1 of {first.path.name}: {LR} 0.05 -> 0.01",
        (
            f"continued from round 2 of {second.path.name}: {LR} 0.01 -> 0.02, trainer.callbacks.FixBN fl_lightning.callbacks.FixBN -> None, "
            "trainer.callbacks.FixBN.freeze_round 2 -> None, "
            "trainer.callbacks.FixBN.freeze statistics -> None, "
            "trainer.callbacks.FedProx None -> fl_lightning.callbacks.FedProx, trainer.callbacks.FedProx.mu None -> 0.01"
        ),
    ]
    first_entry, second_entry = result(third)["continued_from"]
    assert first_entry == {
        "checkpoint": str(first.checkpoints / "last.ckpt"),
        "round": 1,
        "differs": {LR: [0.05, 0.01]},
    }
    assert second_entry["differs"][LR] == [0.01, 0.02]
    assert [line for line in third.config.read_text().splitlines() if "continued" in line] == [
        f"# {line}" for line in words
    ]
    assert run_title(cli.model)[2:] == words
    assert json.loads(cli.attempt.identity.read_text())["continued_from"] == words
    assert f"continued        {words[1].removeprefix('continued ')}" in capsys.readouterr().out
    # the same run, resumed as it is, keeps the list; its configuration starts a run that continues none
    assert result(run(*LAST, "--trainer.max_epochs", 4, *wider).attempt)["continued_from"] == [
        first_entry,
        second_entry,
    ]
    assert run("--trainer.max_epochs", 1, config=str(third.config)).model.record.continued_from == []


def test_a_run_that_goes_on_as_it_was_has_no_origin():
    write_config()
    attempt = run("--trainer.max_epochs", 1).attempt
    again = run(*LAST, "--trainer.max_epochs", 2).attempt
    assert again.path.samefile(attempt.path)
    assert result(again)["continued_from"] == []
    assert "continued" not in again.config.read_text()


def test_a_checkpoint_of_a_plain_trainer_says_that_its_settings_are_unknown():
    first = run("--trainer.max_epochs", 1).attempt
    checkpoint = AtomicCheckpointIO().load_checkpoint(first.checkpoints / "last.ckpt")
    checkpoint["fl_lightning"]["record"]["description"] = {}
    torch.save(checkpoint, "copy.ckpt")
    copied = run("--ckpt_path", "copy.ckpt", "--trainer.max_epochs", 2)
    assert result(copied.attempt)["continued_from"] == [
        {"checkpoint": "copy.ckpt", "round": 1, "differs": {"settings": ["unknown", "those of config.yaml"]}}
    ]


def test_settings_go_by_dotted_names_and_classes_by_theirs():
    attempt = run("--trainer.max_epochs", 1).attempt
    settings = deciding_settings(yaml.safe_load(attempt.config.read_text()))
    assert settings[LR] == 0.05
    assert settings["model.model"] == "fl_lightning.models.LeNet"
    assert settings["trainer.callbacks.FixBN.freeze_round"] == 2
    assert settings["data.partition.class_fraction"] == 0.4
    assert settings["seed_everything"] == 0
    assert {"model.seed", "data.seed", "trainer.max_epochs", "name"}.isdisjoint(settings)


def test_a_result_says_how_it_was_computed():
    attempt = run("--trainer.max_epochs", 1).attempt
    capability = torch.backends.cpu.get_cpu_capability()
    computed = {
        "block_size": None,
        "compiled": False,
        "threads": 1,
        "cpu_capability": capability,
        "device": "cpu",
    }
    assert result(attempt)["computed_by"] == {"executor": "SequentialExecutor()", **computed}
    many = ("--model.executor", "VectorizedExecutor", "--model.executor.block_size", 2)
    together = run("--trainer.max_epochs", 1, *many).attempt
    assert result(together)["computed_by"] == {
        "executor": "VectorizedExecutor(block_size=2)", **computed, "block_size": 2
    }  # fmt: skip
    checkpoint = AtomicCheckpointIO().load_checkpoint(together.checkpoints / "last.ckpt")
    assert checkpoint["fl_lightning"]["record"]["computed_by"] == result(together)["computed_by"]


@pytest.mark.slow
def test_resuming_with_another_executor_or_number_of_threads_says_that_rounding_differs(capsys):
    first = run("--trainer.max_epochs", 1).attempt
    Path("first.ckpt").write_bytes((first.checkpoints / "last.ckpt").read_bytes())
    line = "computed differently after round 1: {}; results agree up to rounding, which grows with the rounds"
    for settings, told in (
        (("--model.executor", "VectorizedExecutor"), ["block_size None -> 3"]),
        (("--threads", 2), ["threads 1 -> 2"]),
        (("--trainer.devices", 2), []),
    ):
        capsys.readouterr()
        run("--ckpt_path", "first.ckpt", "--trainer.max_epochs", 2, *settings)
        said = [printed for printed in capsys.readouterr().out.splitlines() if "computed" in printed]
        assert said == [line.format(words) for words in told]
        torch.set_num_threads(1)


@pytest.mark.slow
def test_a_run_keeps_the_code_of_the_methods_of_its_first_rounds(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("FedProx", "SiloBN"):
        text = f"from fl_lightning.callbacks import {name}\nclass Mine({name}):\n    pass\n"
        (tmp_path / f"kept_{name.lower()}.py").write_text(text)
    prox, silo = "kept_fedprox.Mine", "kept_silobn.Mine"
    first = run("--trainer.max_epochs", 1, "--trainer.callbacks", prox).attempt
    Path("first.ckpt").write_bytes((first.checkpoints / "last.ckpt").read_bytes())
    (code,) = result(first)["provenance"]
    capsys.readouterr()
    of_both = ("--trainer.callbacks", prox, "--trainer.callbacks+", silo)
    names = {"kept_fedprox"}, {"kept_silobn"}
    for methods, kept in ((("--trainer.callbacks", silo), [*names]), (of_both, [names[0] | names[1]])):
        later = run("--ckpt_path", "first.ckpt", "--trainer.max_epochs", 2, *methods).attempt
        entries = result(later)["provenance"]
        assert [{name for name in entry if name.startswith("kept")} for entry in entries] == kept
        assert {entry["fl_lightning"] for entry in entries} == {code["fl_lightning"]}
    assert "code or versions" not in capsys.readouterr().out


def test_a_run_that_other_code_resumes_says_so(monkeypatch, capsys):
    run("--trainer.max_epochs", 1)
    capsys.readouterr()
    run(*LAST, "--trainer.max_epochs", 2)
    assert "code or versions" not in capsys.readouterr().out
    monkeypatch.setattr(
        "fl_lightning.experiments.run_directory.start_files.provenance", lambda made: {"torch": "edited"}
    )
    run(*LAST, "--trainer.max_epochs", 3)
    assert "code or versions changed after round 2: torch " in capsys.readouterr().out
