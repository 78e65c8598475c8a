"""``report``: one HTML page about studies, made from their files alone."""

import re
from functools import partial
from html.parser import HTMLParser

import pytest

from fl_lightning import load_study
from fl_lightning.__main__ import main
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.studies.figures import write_figures
from fl_lightning.experiments.studies.html_report import write_report
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
    assert ["GN", "0.406 ± 0.044", "0.625, 1 of 2 runs (0.4512)"] in page.rows
    assert ["lr", "method = BN", "0.25", "val/accuracy", "0.25: 0.876, 0.5: 0.432"] in page.rows
    assert next(row for row in page.rows if row[:2] == ["GN, E = 10", "1"])[2] == "failed: the disk is full"
    assert "GN, E = 10 seed 1 (failed)" in page.text
    assert ["local steps E", "7"] in page.rows
    assert ["fl lightning", "0.3.0 78871f7d"] in page.rows
    assert page.tags.count("svg") == 3  # against E, both axes, curves


def test_a_page_needs_nothing_but_itself(tmp_path):
    page = page_of(tmp_path, write_study(tmp_path / "runs"))
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
    assert ["<script>alert(1)</script> & $x_", "0.406 ± 0.044", "0.625, 1 of 2 runs (0.4512)"] in page.rows


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
    study = write_study(tmp_path / "runs").relative_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    main(["report", str(study), "--output", "out/page.html"])
    assert capsys.readouterr().out == "report  out/page.html\n"
    assert ("a", "href", "../runs/cells/2/00-s0/config.yaml") in Page(
        tmp_path / "out" / "page.html"
    ).addresses


def test_what_is_no_study_is_refused_in_a_line(tmp_path):
    for place in (tmp_path, write_run(tmp_path / "bn" / "a-s0")):
        line = rf"^report: {place} is not the folder of a study, as it has no study.json; give folders such as .* 'runs --csv FILE'$"
        with pytest.raises(ConfigurationError, match=line):
            write_report([place], tmp_path / "report.html")
    for content in ("{}", "[" * 100_000):
        write_text(tmp_path / "study.json", content)
        with pytest.raises(ConfigurationError, match=r"study.json cannot be read as the result of a study"):
            write_report([tmp_path], tmp_path / "report.html")


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
