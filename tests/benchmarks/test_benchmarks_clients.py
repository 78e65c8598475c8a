"""The command that measures runs with many clients: what it prints is of runs that were made."""

import json

import pytest

from benchmarks import clients
from benchmarks.__main__ import main

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_runs_are_made_and_their_figures_printed(tmp_path, capsys):
    file = tmp_path / "clients.json"
    options = ["--clients", "12", "--rounds", "4", "--methods", "FedAvg", "--json", str(file)]
    with pytest.raises(SystemExit) as end:
        main(["clients", *options])
    assert end.value.code == 0
    found = json.loads(file.read_text())
    assert [one["run"] for one in found] == ["FedAvg, first start", "FedAvg"]
    for one in found:
        assert (one["clients"], one["rounds"], one["files_mb"]) == (12, 4, 0)
        assert 0 < min(one["round_s"]) <= max(one["round_s"]) < one["start_s"]  # which imports torch
        assert one["peak_mb"] > 100
    assert capsys.readouterr().out.splitlines()[2:] == [*clients.lines(found)]


@pytest.mark.nightly
def test_a_run_that_fails_is_no_figure(tmp_path):
    clients.write_writers(tmp_path / "few", 3)  # 10 of them are wanted in a round
    with pytest.raises(RuntimeError, match="the run of FedAvg has failed"):
        clients.measure(tmp_path, tmp_path / "few", "FedAvg", 2)
