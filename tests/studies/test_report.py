"""``report``: one HTML page about studies and runs, made from their files alone."""

import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fl_lightning import load_study
from fl_lightning.__main__ import main
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.studies.figures import write_figures
from fl_lightning.experiments.studies.report import write_report
from fl_lightning.experiments.studies.runs_as_study import runs_as_study
from fl_lightning.files import write_text
from tests.support.command_line import message_of
from tests.support.written_runs import write_run, write_study

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """The text, the tables and the addresses of a page whose tags must match."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text()
        self.open, self.tags, self.addresses, self.texts, self.rows = [], [], [], [], []
        self.feed(self.source)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [(tag, name, value) for name, value in attributes if name.endswith(("src", "href"))]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & {*self.open}:
            self.texts.append(data)
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data.strip()


def page_of(tmp_path, *directories):
    write_report([*directories], tmp_path / "report.html")
    return Page(tmp_path / "report.html")


def test_a_page_has_all_that_a_study_has_found(tmp_path):
    page = page_of(tmp_path, write_study(tmp_path / "runs"))
    for text in (
        "Layers and local steps",
        "A paper, Table 9",
        "Scale: quick, seed 0 (1 row) and seeds 0, 1 (3 rows). Values: after the last round, mean ± standard deviation over seeds. A declared subset",
        "undecided GN > BN",
    ):
        assert text in page.text
    assert ["BN", "0.156 ± 0.044", "0.281 ± 0.044 (0.4512)"] in page.rows
    assert ["GN", "0.406 ± 0.044", "0.625, 1 of 2 seeds (0.4512)"] in page.rows
    assert ["lr", "method = BN", "0.25", "val/accuracy", "0.25: 0.876, 0.5: 0.432"] in page.rows
    assert next(row for row in page.rows if row[:2] == ["GN, E = 10", "1"])[2] == "failed: the disk is full"
    assert "GN, E = 10 seed 1 (failed)" in page.text
    assert ["local steps E", "7"] in page.rows
    assert ["fl lightning", "0.3.0 78871f7d"] in page.rows
    assert page.tags.count("svg") == 3  # against E, both axes, curves


def test_a_page_needs_nothing_but_itself(tmp_path):
    page = page_of(tmp_path, write_study(tmp_path / "runs"), write_run(tmp_path / "runs" / "bn" / "a-s0"))
    assert not {"link", "iframe", "object", "embed", "image"} & {*page.tags}
    loads = [entry for entry in page.addresses if entry[0] != "a" and not entry[2].startswith(("data:", "#"))]
    assert loads == []
    assert re.findall(r"@import|https?://|url\((?!#)", page.source) == []
    links = [value for tag, _, value in page.addresses if tag == "a" and not value.startswith("#")]
    assert "runs/cells/2/00-s0/config.yaml" in links
    assert all((tmp_path / link).exists() for link in links)


def test_names_are_text_and_no_html(tmp_path):
    label = "<script>alert(1)</script> & $x_"
    page = page_of(tmp_path, write_study(tmp_path / "runs", label))
    assert page.tags.count("script") == 1
    assert ["<script>alert(1)</script> & $x_", "0.406 ± 0.044", "0.625, 1 of 2 seeds (0.4512)"] in page.rows


def test_seeds_of_one_configuration_are_one_row(tmp_path):
    runs = tmp_path / "runs"
    places = [write_run(runs / "bn" / f"a-s{seed}", seed=seed, accuracy=0.5 + seed / 4) for seed in (0, 1)]
    places.append(write_run(runs / "gn" / "b-s0", name="gn", norm="gn", accuracy=0.875))
    page = page_of(tmp_path, *places)
    assert [row[:2] for row in page.rows if row[0] in ("bn", "gn")][:2] == [
        ["bn", "0.625 ± 0.177"],
        ["gn", "0.875"],
    ]
    assert ["gn", "model.model.norm: bn → gn"] in page.rows
    assert page.tags.count("svg") == 2


def test_configurations_of_one_name_are_told_apart(tmp_path):
    places = [write_run(tmp_path / f"x{norm}", norm=norm) for norm in ("bn", "gn")]
    names = runs_as_study(places).axes["run"]
    assert len({*names}) == 2
    assert all(re.fullmatch(r"FedAvg \([0-9a-f]{8}\)", name) for name in names)
    places = [write_run(tmp_path / f"y{callback}", callback=callback) for callback in (None, "FixBN")]
    assert runs_as_study(places).axes["run"] == ["FedAvg", "FedAvg + FixBN()"]


def test_the_newest_finished_attempt_counts(tmp_path):
    places = [write_run(tmp_path / f"a-s0{end}", accuracy=x) for end, x in (("", 0.25), (".2", 0.5))]
    places.append(write_run(tmp_path / "a-s0.10", accuracy=0.75, finished=False))
    assert runs_as_study(places).rows[0].of("test/accuracy").to_dict() == {0: 0.5}


def test_equal_runs_in_two_folders_are_two_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = [
        write_run(Path(root, "q", f"a-s{seed}"), name="q", seed=seed, accuracy=x + seed / 4)
        for root, x in (("one", 0.25), ("two", 0.5))
        for seed in (0, 1)
    ]
    found = runs_as_study([*places, Path.cwd() / places[0]])
    assert found.axes["run"] == ["FedAvg (one/q)", "FedAvg (two/q)"]
    values = [row.of("test/accuracy").to_dict() for row in found.rows]
    assert values == [{0: 0.25, 1: 0.5}, {0: 0.5, 1: 0.75}]
    apart = runs_as_study([places[0], places[3]])  # of different seeds: as if they lay in one folder
    assert (apart.axes["run"], len(apart.rows[0].cells)) == (["q"], 2)
    copy = (
        write_run(Path("one/q/copy"), name="q", norm="gn"),
        write_run(Path("one/q/b-s0"), name="q", norm="gn"),
    )
    names = runs_as_study([*copy, *places]).axes["run"]
    assert [re.sub(r"\([0-9a-f]{8}, ", "(", name) for name in names] == [
        "FedAvg (one/q/copy)",
        "FedAvg (one/q/b-s0)",
        "FedAvg (one/q)",
        "FedAvg (two/q)",
    ]


def test_a_label_has_no_empty_part(tmp_path):
    places = [write_run(tmp_path / root / "q/a-s0", name="q") for root in ("one", "two")]
    alone = write_run(tmp_path / "one/q/b-s0", name="q", norm="gn")
    first, second, third = (
        re.sub("[0-9a-f]{8}", "hash", x) for x in runs_as_study([*places, alone]).axes["run"]
    )
    assert (first, second) == (f"FedAvg (hash, {tmp_path}/one/q)", f"FedAvg (hash, {tmp_path}/two/q)")
    assert third == "FedAvg (hash)"


def test_runs_without_a_result_are_shown_as_what_they_are(tmp_path):
    runs = tmp_path / "runs"
    unfinished = write_run(runs / "bn" / "a-s0", finished=False)
    failed = write_run(runs / "bn" / "a-s1", seed=1, finished=False)
    write_text(failed / "error.txt", "Traceback\nValueError: too large\n")
    page = page_of(tmp_path, unfinished, failed)
    states = {row[1]: row[2] for row in page.rows if len(row) == 5}
    assert states["0"] == "unfinished: no result.json; the last logged round is 2"
    assert states["1"] == "failed: ValueError: too large"
    assert page.tags.count("svg") == 1  # what it has logged


def test_a_single_run_shows_its_own_pictures_and_its_curve_first(tmp_path):
    place = write_run(tmp_path / "a-s0")
    (place / "class_accuracy.png").write_bytes(b"\x89PNG")
    page = page_of(tmp_path, place)
    assert page.tags.count("svg") == 1  # its picture is not drawn yet
    (place / "learning_curve.png").write_bytes(b"PNG")
    page = page_of(tmp_path, place)
    pictures = [source for tag, name, source in page.addresses if (tag, name) == ("img", "src")]
    assert pictures == ["data:image/png;base64,UE5H", "data:image/png;base64,iVBORw=="]
    assert "svg" not in page.tags


def test_the_same_files_give_the_same_page(tmp_path):
    study = write_study(tmp_path / "runs")
    assert page_of(tmp_path, study).source == page_of(tmp_path, study).source


@pytest.mark.slow
@pytest.mark.pictures
def test_a_figure_that_fails_harms_nothing_else(tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise ValueError("no ink")

    study = write_study(tmp_path / "runs")
    monkeypatch.setattr("fl_lightning.experiments.studies.figures.heat_figure", fail)
    write_figures(study, load_study(study))
    assert "heat_map was not drawn: ValueError: no ink" in capsys.readouterr().err
    assert sorted(path.name for path in study.glob("*.p*")) == [
        f"{name}.{form}" for name in ("by_E", "curves") for form in ("pdf", "png")
    ]
    page = page_of(tmp_path, study)
    assert "test accuracy by E: mean over seeds; bars from the smallest to the largest value." in page.text
    assert "not drawn: ValueError: no ink" in page.text


def test_the_command_writes_the_page_and_says_where(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs" / "bn" / "a-s0")
    monkeypatch.chdir(tmp_path)
    main(["report", "runs/bn/a-s0", "--output", "out/page.html"])
    assert capsys.readouterr().out == "report  out/page.html\n"
    assert ("a", "href", "../runs/bn/a-s0") in Page(tmp_path / "out" / "page.html").addresses


def test_what_is_neither_study_nor_run_is_refused_in_a_line(tmp_path):
    with pytest.raises(ConfigurationError, match=r"^report: .* is neither a study's folder .*; give .*$"):
        write_report([tmp_path], tmp_path / "report.html")
    for content in (b"\xff\x00", b"[1, 2]", b"text", b"", b"{a: [", b"[" * 10_000, b"name: x\n"):
        (tmp_path / "config.yaml").write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"config.yaml is no resolved configuration"):
            write_report([tmp_path], tmp_path / "report.html")
    for content in ("{}", "[" * 100_000):
        write_text(tmp_path / "study.json", content)
        with pytest.raises(ConfigurationError, match=r"study.json cannot be read as the result of a study"):
            write_report([tmp_path], tmp_path / "report.html")


@pytest.mark.parametrize("content", ["[1]", "null", "{}", '{"rounds": "two"}'])
def test_a_result_that_no_run_writes_is_named_in_the_page(tmp_path, content):
    place = write_run(tmp_path / "a")
    (place / "result.json").write_text(content)
    ((run,),) = [row.runs for row in runs_as_study([place]).rows]
    assert run["phase"] == "failed"
    assert "result.json is not what a finished run writes" in run["why"]


@pytest.mark.slow
def test_the_page_of_a_study_lies_in_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one, two = (write_study(tmp_path / place).relative_to(tmp_path) for place in ("one", "two"))
    for _ in range(2):
        main(["report", str(one)])
        assert capsys.readouterr().out == f"report  {one}/report.html\n"
    main(["report", str(one), str(two)])
    assert capsys.readouterr().out == "report  report.html\n"


def test_report_writes_chosen_columns_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = write_study(tmp_path / "runs")
    main(["report", str(study), "--columns", "seeds, test/accuracy"])
    assert (study / "table.csv").read_text().splitlines()[0] == "method,E,seeds,test accuracy"
    assert f"file    {study}/cells.csv" in capsys.readouterr().out
    message = message_of(capsys, partial(main, ["report", str(study), "--columns", "sead"]))
    assert "--columns: there is no column 'sead'" in message
