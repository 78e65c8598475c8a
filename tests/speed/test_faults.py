"""The command that kills runs: what it counts, and that it sees what is lost."""

import json
import random

import pytest
import torch

from benchmarks import faults
from benchmarks.__main__ import main

pytestmark = pytest.mark.slow


def test_killed_runs_and_damaged_checkpoints_are_counted(tmp_path, capsys):
    file = tmp_path / "faults.json"
    options = ["--kills", "2", "--damages", "60", "--rounds", "6", "--executors", "sequential"]
    with pytest.raises(SystemExit) as end:
        main(["faults", *options, "--configurations", "FedBN, Adam kept globally", "--json", str(file)])
    assert end.value.code == 0
    found = json.loads(file.read_text())
    assert sum(found["kills"]["FedBN, Adam kept globally; sequential"].values()) == 2
    assert sum(found["damages"].values()) == 60
    assert found["damages"]["refused in one line"] > 30
    assert "all kills: " in capsys.readouterr().out


def test_other_bits_are_seen():
    tree = {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"c": "d"}}
    assert faults.same(tree, {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"c": "d"}})
    assert not faults.same(tree, {"a": [torch.tensor([1.0, 2.0 + 1e-6]), 3], "b": {"c": "d"}})
    assert not faults.same(tree, {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"c": "e"}})


def test_a_checkpoint_that_loads_as_other_numbers_is_counted(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    path.write_bytes(bytes(5000))
    monkeypatch.setattr(faults, "load_run", lambda path: {"weights": sum(path.read_bytes())})
    assert faults._damaged(path, 20, random.Random(0))["loaded as other numbers"] > 0
    assert path.read_bytes() == bytes(5000)
