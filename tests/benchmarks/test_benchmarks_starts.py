"""The command that measures how cells of a study start."""

import json

import pytest

from benchmarks import starts
from benchmarks.__main__ import main


def test_ratios_are_taken_within_a_repetition():
    found = [
        {"way": way, "study_s": x, "study_cpu_s": 2 * x, "beyond_s": x / 2, "rounds_s": 1.0}
        for way, x in (("plain", 8.0), ("forks", 2.0), ("plain", 9.0), ("forks", 3.0))
    ]
    each, forks, ratio = starts.lines(found)
    assert each == "| each by itself | 8.5 [8, 9] | 17 [16, 18] | 4.25 [4, 4.5] | 1 [1, 1] |"
    assert forks.startswith("| as forks of one process | 2.5 [2, 3] |")
    assert ratio == "| ratio | 3.5 [3, 4] | 3.5 [3, 4] | 3.5 [3, 4] | |"


@pytest.mark.nightly
def test_both_ways_are_studies_that_were_run(tmp_path, capsys):
    file = tmp_path / "starts.json"
    with pytest.raises(SystemExit) as stop:
        main(["starts", "--cells", "2", "--rounds", "2", "--repeats", "1", "--json", str(file)])
    assert stop.value.code == 0
    found = json.loads(file.read_text())
    assert [one["way"] for one in found] == ["plain", "forks"]
    for one in found:
        assert 0 < one["rounds_s"] < one["study_s"]
        assert 0 < one["beyond_s"] < one["study_s"]
        assert one["study_cpu_s"] > 1
    assert capsys.readouterr().out.splitlines()[2:5] == [*starts.lines(found)]
