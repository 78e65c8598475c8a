"""The command that kills runs, ranks and studies: its counts, and that it sees losses."""

import json
import random

import pytest
import torch

from benchmarks import faults
from benchmarks.__main__ import main
from benchmarks.faults import checkpoints, mistakes, studies

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_killed_runs_and_damaged_checkpoints_are_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(
        studies.FILE, "axes", {"method": {"BN": {}, "FedBN": {"trainer.callbacks": ["FedBN"]}}}
    )
    monkeypatch.setitem(studies.FILE, "scales", {"quick": {"base": "base.yaml"}})
    file = tmp_path / "faults.json"
    options = [
        "--kills",
        "1",
        "--rank-kills",
        "1",
        "--study-kills",
        "1",
        "--damages",
        "20",
        "--mistakes",
        "4",
    ]
    options += ["--rounds", "6", "--executors", "sequential"]
    with pytest.raises(SystemExit) as end:
        main(["faults", *options, "--configurations", "FedBN, Adam kept globally", "--json", str(file)])
    assert end.value.code == 0
    found = json.loads(file.read_text())
    assert sum(found["kills by run"]["FedBN, Adam kept globally; sequential"].values()) == 1
    assert sum(found["kills of ranks"].values()) == 1
    assert sum(count for what, count in found["kills of studies"].items() if what.startswith("of ")) == 1
    assert sum(found["damaged checkpoints"].values()) == 20
    assert found["damaged checkpoints"]["refused in one line"] > 10
    assert found["mistakes"] == {"refused in one line that names it": 4}
    assert "kills of runs: " in capsys.readouterr().out


def test_other_bits_are_seen():
    tree = {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"c": "d"}}
    assert faults.same(tree, {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"c": "d"}})
    assert not faults.same(tree, {"a": [torch.tensor([1.0, 2.0 + 1e-6]), 3], "b": {"c": "d"}})
    assert not faults.same(tree, {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"c": "e"}})


def test_a_checkpoint_that_loads_as_other_numbers_is_counted(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    path.write_bytes(bytes(5000))
    monkeypatch.setattr(checkpoints, "load_checkpoint", lambda path: {"weights": sum(path.read_bytes())})
    assert checkpoints.damaged(path, 20, random.Random(0))["loaded as other numbers"] > 0
    assert path.read_bytes() == bytes(5000)


def test_a_mistake_that_is_accepted_is_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mistakes, "_typed", lambda draw: (mistakes._text(mistakes.FILE).encode(), "title"))
    monkeypatch.setattr(mistakes, "_misspelt", lambda draw: (b"title: [", "no such word"))
    found = mistakes.refused(2, random.Random(0), tmp_path / "folder")
    assert found == {"accepted": 1, "refused without its name": 1}
    assert "accepted: title" in capsys.readouterr().out
