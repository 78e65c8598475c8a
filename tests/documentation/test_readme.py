"""The README's code runs as it stands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
from command_line import main
from helpers import write_cifar10_folders
from readme_code import BLOCKS, METHOD_BLOCKS, README

from fl_lightning.__main__ import main as program

ROOT = Path(__file__).parents[2]


def test_the_example_of_own_data_runs_as_it_stands(tmp_path):
    script = tmp_path / "own_data.py"
    script.write_text(next(block for block in BLOCKS if "class Hospital" in block))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "tensor(" in done.stdout


COMMANDS = [
    command
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    for command in line.split(" && ")
]
OURS = ".venv/bin/python -m fl_lightning "


def test_the_readme_has_no_command_that_no_test_and_no_developer_runs():
    by_hand = (
        "python3 -m venv",
        ".venv/bin/pip",
        ".venv/bin/python -m pytest",
        ".venv/bin/ruff",
        ".venv/bin/mypy",
    )
    others = (".venv/bin/wandb sync", ".venv/bin/wandb leet", ".venv/bin/python -m benchmarks")
    assert [command for command in COMMANDS if not command.startswith((OURS, *by_hand, *others))] == []


def test_every_command_of_the_readme_runs_in_its_order_for_two_rounds(tmp_path, monkeypatch, capsys):
    write_cifar10_folders()
    Path("methods.py").write_text("\n\n".join(METHOD_BLOCKS.values()))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "methods", raising=False)
    ran = [shlex.split(command.removeprefix(OURS)) for command in COMMANDS if command.startswith(OURS)]
    for arguments in ran:
        if arguments[0] == "verify":
            continue  # tests/verification/test_verify.py has them all
        shorter = ["--trainer.max_epochs", "2"] if arguments[0] in ("fit", "search-freeze") else []
        program([*arguments, *shorter, "--trainer.enable_progress_bar", "false"])
        assert "error" not in capsys.readouterr().err
    assert {arguments[0] for arguments in ran} >= {
        "fit",
        "validate",
        "test",
        "predict",
        "search-freeze",
        "verify",
    }


def test_the_methods_of_the_readme_keep_what_they_promise(tmp_path, monkeypatch, capsys):
    Path("methods.py").write_text("\n\n".join(METHOD_BLOCKS.values()))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "methods", raising=False)
    for name in METHOD_BLOCKS:
        with pytest.raises(SystemExit) as ended:
            program(["verify", "--callback", f"methods.{name}"])
        assert ended.value.code == 0, capsys.readouterr().out


def test_the_table_of_methods_is_made_from_the_callbacks():
    table = subprocess.run(
        [sys.executable, ROOT / "docs" / "scripts" / "methods_table.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    written = re.search(r"<!-- methods -->\n(.*?)\n<!-- end of methods -->", README, re.DOTALL)[1]
    assert table.stdout.strip() == written, table.stderr


@pytest.mark.parametrize("snippet", re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))
def test_every_piece_of_yaml_changes_the_quickstart(snippet):
    write_cifar10_folders()
    Path("mine.yaml").write_text(snippet)
    quickstart = ["fit", "--config", "configs/quickstart.yaml", "--name", "changed"]
    cli = main([*quickstart, "--config", "mine.yaml", "--trainer.max_epochs", "2"])
    assert cli.trainer.global_step == 2


def test_every_configuration_that_the_readme_names_exists():
    named = set(re.findall(r"configs/[\w/]+\.yaml", README))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_readme_lists_every_shipped_callback():
    import callbacks

    assert [name for name in callbacks.__all__ if f"`{name}`" not in README] == []
    assert issubclass(callbacks.FixBN, L.Callback)
