"""Published values: each is in the file of numbers with its place, and is shown beside the paper's setting alone."""

import re
from pathlib import Path

import pytest
import yaml

import fl_lightning
from fl_lightning.experiments.studies.collecting import collect
from fl_lightning.experiments.studies.reading import read_study
from fl_lightning.experiments.studies.tables import published_in_words
from tests.support.untrained_cells import STUDY, finish, study_cells

ROOT = Path(fl_lightning.__file__).parents[1]
PUBLISHED = yaml.safe_load((ROOT / "docs/numbers/published.yaml").read_text())
STUDIES = {path.stem: path for path in (ROOT / "configs/studies").glob("*.yaml")}


def numbers(printed):
    """Value and deviation as shares of 1, from ``53.97±4.18`` or ``80%``."""
    value, deviation = re.fullmatch(r"([\d.]+)%?(?:±([\d.]+))?", printed).groups()
    return round(float(value) / 100, 6), deviation and round(float(deviation) / 100, 6)


def by_rows(entries, of):
    return {str(sorted((axis, str(x)) for axis, x in rows.items())): of(e) for rows, e in entries}


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_each_number_of_a_study_is_that_of_the_paper(name):
    scales = yaml.safe_load(STUDIES[name].read_text())["scales"]
    expected = by_rows([(x["rows"], x) for x in PUBLISHED.get(name, [])], lambda x: numbers(x["printed"]))
    shown = [scale for scale in scales if read_study(STUDIES[name], scale).definition.published]
    assert bool(shown) == bool(expected)
    for scale in shown:
        entries = [
            ({axis: x for axis, x in entry.items() if axis not in ("value", "deviation")}, entry)
            for entry in scales[scale]["published"]
        ]
        assert by_rows(entries, lambda x: (x["value"], x.get("deviation"))) == expected


def test_each_number_has_a_place_and_each_quote_its_number():
    for name, entries in PUBLISHED.items():
        assert name in STUDIES or name == "left_out"
        for entry in entries if name != "left_out" else ():
            assert re.match(r"(FixBN|FBN), (Table|section) ", entry["place"])
            assert entry["printed"] in entry.get("quote", entry["printed"]) or "lost points" in entry["place"]


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_values_stand_beside_the_papers_data_model_and_budget_alone(name):
    """Never beside Digits or images of 16x16 pixels: at scales of the paper's own configuration, without another base."""
    for scale in yaml.safe_load(STUDIES[name].read_text())["scales"]:
        study = read_study(STUDIES[name], scale)
        if study.definition.published:
            assert scale.startswith("full")
            for base in study.scale.base:
                config = yaml.safe_load((study.folder / base).read_text())
                assert not re.search("small|digits", base)
                assert "image_size" not in config["data"].get("init_args", {})


def test_a_table_shows_the_published_deviation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    cells = study_cells(
        choose=[],
        axes={"method": STUDY["axes"]["method"]},
        published=[{"method": "GN", "value": 0.5969, "deviation": 0.0076}],
    )
    table = cells.table([])
    for one in table:
        report = {"published": 1.0, "learning_rate": 7.0}  # of a user's own report
        (finish(one, **report, **{"test/accuracy": 0.5}) / "metrics.jsonl").write_text("")
    bn, gn = collect(cells.study, table, [], {}).rows
    assert [published_in_words(group) for group in (bn, gn)] == ["", "0.5969 ± 0.0076"]
    assert {*bn.cells["learning_rate"]} == {cells.any.config["model"]["client_optimizer"]["init_args"]["lr"]}
