"""Files that cannot be settings, paths that cannot be, and commands that do not exist."""

import io
import json
import sys
from pathlib import Path

import pytest

import fl_lightning.__main__ as program
from tests.support.command_line import attempts, message_of, run, write_config

TEXT = "model:\n  local_steps: 3\n"

FILES = {
    "a bracket that stays open": (b"a: 1\nb: [1\nc: }\n", "is not YAML: line 3: expected ',' or ']', but got ':'"),
    "a tab": (b"model:\n\tlocal_steps: 1\n", "is not YAML: line 2: found character '\\t' that cannot start any token"),
    "binary": (bytes(range(256)), "is not YAML: 'utf-8' codec can't decode byte 0x80 in position 128: invalid start byte"),
    "UTF-16": (TEXT.encode("utf-16"), "is not YAML: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    "Latin-1": ("name: Zürich\n".encode("latin-1"), "is not YAML: 'utf-8' codec can't decode byte 0xfc in position 7: invalid start byte"),
    "a key twice": (
        (TEXT + "  local_steps: 4\n").encode(),
        "is not YAML: line 3: 'local_steps' is given twice; keep one of them",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "line"), FILES.values(), ids=FILES)
def test_file_that_is_no_yaml_is_named_wherever_it_is_given(content, line, capsys):
    Path("odd.yaml").write_bytes(content)
    for changes, arguments in (({}, ["--config", "odd.yaml"]), ({"model.model": "odd.yaml"}, [])):
        write_config(changes)
        message = message_of(capsys, lambda arguments=arguments: run(*arguments))
        assert message == f"error: config odd.yaml {line}\n"
    assert attempts() == []


def test_merged_keys_of_yaml_are_given_once():
    write_config()
    text = (
        Path("tiny.yaml")
        .read_text()
        .replace("trainer:\n", "trainer:\n  <<: {max_epochs: 3}\n  <<: {devices: 1}\n")
    )
    Path("merged.yaml").write_text(text)
    assert run("--config", "merged.yaml").trainer.max_epochs == 4


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trainer:\n", "trainer: null holds no settings such as trainer.accelerator"),
        ("model: null\n", "model: null holds no settings such as model.model"),
        ("wandb:\n", "wandb: null holds no settings such as wandb.mode"),
        ("trainer: [1, 2]\n", "trainer: [1, 2] holds no settings such as trainer.accelerator"),
    ],
)
def test_section_without_settings_in_a_second_file_is_refused(text, line, capsys):
    write_config()
    Path("odd.yaml").write_text(text)
    assert message_of(capsys, lambda: run("--config", "odd.yaml")) == f"error: {line}\n"


@pytest.mark.parametrize(("given", "t_star"), [("1", 1), ("1.0", 4), ("0.25", 1)])
def test_a_freeze_round_by_hand_replaces_the_fraction_of_the_yaml(given, t_star):
    write_config({"trainer.callbacks": [{"class_path": "FixBN", "init_args": {"freeze_round": 0.5}}]})
    cli = run("--trainer.callbacks.freeze_round", given, "--trainer.fast_dev_run", "true")
    (method,) = [callback for callback in cli.trainer.callbacks if type(callback).__name__ == "FixBN"]
    assert method.last_batch_round(4) == t_star


COMMANDS = (
    "use one of fit, validate, test, predict, export, verify, study, report, runs, partition, list, dashboard"
)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("fitt", f"there is no command 'fitt'; did you mean fit?; {COMMANDS}"),
        ("verfy --callback FixBN", f"there is no command 'verfy'; did you mean verify?; {COMMANDS}"),
        ("--config tiny.yaml", f"there is no command '--config'; {COMMANDS}"),
    ],
)
def test_usage_error_names_all_commands(arguments, line, capsys):
    assert message_of(capsys, lambda: program.main(arguments.split())) == f"error: {line}\n"


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ("schedules.nothing", "client_lr_schedule, round 2: nan must be at least 0 and finite"),
        ("schedules.negative", "client_lr_schedule, round 1: -1.0 must be at least 0 and finite"),
    ],
)
def test_schedule_that_gives_no_factor_is_refused(schedule, line, capsys, tmp_path, monkeypatch):
    Path("schedules.py").write_text(
        "def nothing(round, rounds): return 1.0 if round == 1 else float('nan')\n"
        "def negative(round, rounds): return -1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "schedules", raising=False)
    assert message_of(capsys, lambda: run("--model.client_lr_schedule", schedule)) == f"error: {line}\n"


def test_function_that_is_no_schedule_is_named_with_the_round(capsys):
    message = message_of(capsys, lambda: run("--model.client_lr_schedule", "math.sqrt"), status=1)
    assert message == (
        "error: TypeError: math.sqrt() takes exactly one argument (2 given) (calling model.client_lr_schedule with round 1 "
        "of 4; the traceback is in error.txt)\n"
    )


def test_row_of_metrics_whose_round_is_no_number_is_refused(capsys):
    attempt = run("--trainer.max_epochs", 2).attempt
    lines = attempt.metrics.read_text().splitlines()
    lines[1] = json.dumps({"round": "one"})
    attempt.metrics.write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    message = message_of(capsys, lambda: run("--ckpt_path", "last", "--trainer.max_epochs", 3))
    assert message == (
        f"error: {attempt.metrics} line 2 is not a row of metrics; restore the file or start anew\n"
    )


def test_a_name_that_the_terminal_cannot_show_ends_no_run(monkeypatch, capsys):
    write_config({"name": "Zürich"})
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        program.main(["fit", "--config", "tiny.yaml", "--trainer.max_epochs", "1"])
        terminal.flush()
        assert rb"runs/Z\xfcrich/" in terminal.buffer.getvalue()
    assert capsys.readouterr().err == ""


CALLBACKS = [
    {"class_path": "FedProx", "init_args": {"mu": "x"}},
    {"class_path": "FixBN", "init_args": {"freeze_rond": 2}},
]
# (changes of the YAML, arguments, the end of the line; L the line of the file that begins with these words)
PLACES = [
    ({"model.local_stepz": 3}, "", ("local_stepz",)),
    ({"dta": {"class_path": "Digits", "init_args": {"num_clients": 3}}}, "", ("dta",)),
    ({"trainer.max_epochs": "x"}, "", ("max_epochs",)),
    ({"trainer.callbacks": CALLBACKS[1:]}, "", ("freeze_rond",)),
    ({"trainer.callbacks": CALLBACKS[:1]}, "", ("mu",)),
    ({"model.client_optimizer.init_args": {"lr": "x"}}, "", ("lr",)),
    ({"model.model": {"class_path": "LeNet", "norm": "gn"}}, "", ("class_path: LeNet",)),
    ({"model.aggregator": ["Median"]}, "", ("aggregator",)),
    ({}, "--trainer.max_epochs x", None),  # not in the file
    ({"trainer.max_epochs": 3}, "--trainer.max_epochs x", None),
    ({"trainer.callbacks": [{**CALLBACKS[0], "init_args": {"mu": 1}}, CALLBACKS[0]]}, "", ("mu: x",)),
]


@pytest.mark.parametrize(("changes", "arguments", "words"), PLACES)
def test_a_wrong_setting_of_a_file_is_named_with_its_line(changes, arguments, words, capsys):
    write_config(changes)
    message = message_of(capsys, lambda: run(*arguments.split())).rstrip()
    if words is None:
        assert "tiny.yaml" not in message
        return
    lines = [text.strip(" -") for text in Path("tiny.yaml").read_text().splitlines()]
    (line,) = (number for number, text in enumerate(lines, 1) if text.startswith(words))
    assert message.endswith(f" (tiny.yaml, line {line})")
