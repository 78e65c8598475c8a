"""The README's code runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import lightning as L
from readme_code import BLOCKS, README

ROOT = Path(__file__).parent.parent


def test_the_example_of_own_data_runs_as_it_stands(tmp_path):
    script = tmp_path / "own_data.py"
    script.write_text(next(block for block in BLOCKS if "class Hospital" in block))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "tensor(" in done.stdout


def test_every_configuration_that_the_readme_names_exists():
    named = set(re.findall(r"configs/[\w/]+\.yaml", README))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_readme_lists_every_shipped_callback():
    import callbacks

    assert [name for name in callbacks.__all__ if f"`{name}(" not in README] == []
    assert issubclass(callbacks.FixBN, L.Callback)
