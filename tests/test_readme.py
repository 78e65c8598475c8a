"""The README's code runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
from helpers import blobs, distance, small_cnn, train

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_of_own_data_runs_as_it_stands(tmp_path):
    script = tmp_path / "own_data.py"
    script.write_text(next(block for block in BLOCKS if "class Hospital" in block))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "tensor(" in done.stdout


@pytest.fixture
def fedprox():
    namespace = {}
    exec(next(block for block in BLOCKS if "class FedProx" in block), namespace)  # noqa: S102  # our own README
    return namespace["FedProx"]


def test_the_readme_fedprox_pulls_clients_to_the_server(fedprox):
    plain = train(small_cnn("gn"), blobs(), 2, local_steps=3)
    proximal = train(small_cnn("gn"), blobs(), 2, [fedprox(mu=5.0)], local_steps=3)
    start = small_cnn("gn").double().state_dict()
    assert distance(proximal, start) < distance(plain, start)


def test_the_readme_fedprox_with_one_local_step_or_without_mu_is_fedavg(fedprox):
    assert (
        distance(train(small_cnn("gn"), blobs(), 3), train(small_cnn("gn"), blobs(), 3, [fedprox(mu=1.0)]))
        < 1e-12
    )
    plain = train(small_cnn("gn"), blobs(), 2, local_steps=3)
    assert distance(plain, train(small_cnn("gn"), blobs(), 2, [fedprox(mu=0.0)], local_steps=3)) == 0


def test_every_configuration_that_the_readme_names_exists():
    named = set(re.findall(r"configs/[\w/]+\.yaml", README))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_readme_lists_every_shipped_callback():
    import callbacks

    assert [name for name in callbacks.__all__ if f"`{name}(" not in README] == []
    assert issubclass(callbacks.FixBN, L.Callback)
