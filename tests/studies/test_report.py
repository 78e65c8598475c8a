"""``report``: one HTML page about studies and runs, made from their files alone."""

import json
import re
from html.parser import HTMLParser

import pytest
import yaml

from fl_lightning.__main__ import main
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import write_json, write_text
from fl_lightning.studies.figures import pictures, write_figures
from fl_lightning.studies.report import write_report
from fl_lightning.studies.run_groups import found_in

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


def write_run(place, *, name="bn", seed=0, norm="bn", accuracy=0.5, finished=True, callback=None):
    config = {
        "name": name,
        "seed_everything": seed,
        "trainer": {"max_epochs": 2, "callbacks": [{"class_path": callback}] if callback else None},
        "model": {
            "model": {"class_path": "fl_lightning.models.LeNet", "init_args": {"norm": norm}},
            "client_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.25}},
            "local_steps": 7,
            "participation": 1.0,
        },
        "data": {"class_path": "datamodules.Digits", "init_args": {"batch_size": 20}},
    }
    write_text(place / "config.yaml", yaml.safe_dump(config))
    rows = [{"round": r, "val/accuracy": accuracy * r / 2, "comm/upload_bytes": 5e5} for r in range(3)]
    write_text(place / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        write_json(place / "result.json", result(accuracy, callback))
    return place


def result(accuracy, callback):
    return {
        "method": f"FedAvg + {callback}()" if callback else "FedAvg",
        "model": "LeNet",
        "partition": "Shards(class_fraction=0.1), 10 clients",
        "rounds": 2,
        "planned_rounds": 2,
        "samples": 2800,
        "test/loss": 1.75,
        "test/accuracy": accuracy,
        "diverged": False,
        "upload_bytes": 1_500_000,
        "download_bytes": 1_500_000,
        "train_seconds": 12.5,
        "executor": "SequentialExecutor()",
        "computed_by": {"device": "cpu", "threads": 1},
        "environment": {"python": "3.11.7", "torch": "2.11.0", "git_commit": "abcdef12"},
        "provenance": [{"source": "78871f7d"}],
        "data": {"training": "468d2b204465bea7"},
    }


def run_of(place, seed):
    kept = result(0.5, None)
    for name in ("planned_rounds", "test/loss", "test/accuracy", "computed_by"):
        del kept[name]
    found = {"seed": seed, "phase": "done", "why": "", "directory": f"elsewhere/cells/2/{place.name}"}
    return {**found, "exchanges": 2, **kept}


def write_study(root, label="GN"):
    """A study of two methods, two numbers of local steps and two seeds, of which one cell has failed."""
    values = {("BN", "1"): 0.125, ("BN", "10"): 0.25, (label, "1"): 0.375, (label, "10"): 0.625}
    groups = []
    for number, ((method, steps), value) in enumerate(values.items()):
        places = [write_run(root / "cells/2" / f"{number}{number}-s{seed}", seed=seed) for seed in (0, 1)]
        runs = [run_of(place, seed) for seed, place in enumerate(places)]
        accuracies = {"0": value, "1": value + 0.0625}
        if (method, steps) == (label, "10"):
            del accuracies["1"]
            runs[1] = {
                "seed": 1,
                "phase": "failed",
                "why": "the disk is full",
                "directory": "cells/2/none-s1",
            }
        groups.append(
            {
                "labels": {"method": method, "model.E": steps},
                "published": 0.4512 if steps == "10" else None,
                "learning_rate": 0.25,
                "values": {"test/accuracy": accuracies},
                "runs": runs,
            }
        )
    axes = {"method": ["BN", label], "model.E": ["1", "10"]}
    choice = {"axis": "lr", "for": {"method": "BN"}, "metric": "val/accuracy", "chosen": "0.25"}
    found = {
        "name": "table9",
        "title": "Layers and local steps",
        "paper": "A paper, Table 9",
        "scale": "quick",
        "seeds": [0, 1],
        "axes": axes,
        "choose": [],
        "spread": "model.E",
        "metrics": {"test/accuracy": "test accuracy"},
        "groups": groups,
        "choices": [{**choice, "values": {"0.25": 0.8765, "0.5": 0.4321}}],
        "known": axes,
        "claims": [{"claim": f"{label} > BN", "verdict": "undecided", "words": "2 undecided"}],
    }
    write_json(root / "studies" / "table9-quick" / "study.json", found)
    return root / "studies" / "table9-quick"


def page_of(tmp_path, *directories):
    write_report([*directories], tmp_path / "report.html")
    return Page(tmp_path / "report.html")


def test_a_page_has_all_that_a_study_has_found(tmp_path):
    page = page_of(tmp_path, write_study(tmp_path / "runs"))
    for text in (
        "Layers and local steps",
        "A paper, Table 9",
        "quick A declared subset",
        "undecided GN > BN",
    ):
        assert text in page.text
    assert ["BN", "0.156 ± 0.044", "0.281 ± 0.044 (0.451)"] in page.rows
    assert ["GN", "0.406 ± 0.044", "0.625 (0.451)"] in page.rows
    assert ["lr", "method = BN", "0.25", "val/accuracy", "0.25: 0.876, 0.5: 0.432"] in page.rows
    assert next(row for row in page.rows if row[:2] == ["GN, E = 10", "1"])[2] == "failed: the disk is full"
    assert "GN, E = 10 seed 1 (failed)" in page.text
    assert ["local steps E", "7"] in page.rows
    assert ["source hash", "78871f7d"] in page.rows
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
    assert ["<script>alert(1)</script> & $x_", "0.406 ± 0.044", "0.625 (0.451)"] in page.rows


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


def test_what_was_sent_is_an_axis_where_it_differs(tmp_path):
    places = [write_run(tmp_path / f"x{norm}", norm=norm, name=norm) for norm in ("bn", "gn")]
    assert [picture.name for picture in pictures(found_in(places))] == ["by_run", "curves"]
    path = places[1] / "result.json"
    write_json(path, {**json.loads(path.read_text()), "upload_bytes": 5_000})
    *_, bytes_sent = pictures(found_in(places))
    axes = bytes_sent.draw([]).axes[0]
    assert axes.get_xlabel() == "sent and received, kB"
    assert [list(line.get_xdata()) for line in axes.lines] == [[500.0, 1000.0, 1500.0]] * 2


def test_a_label_that_is_read_by_a_metric_of_its_own_has_its_own_curve(tmp_path):
    place = write_run(tmp_path / "a-s0")
    rows = [{"round": r, "val/accuracy": 0.5, "val/accuracy_silobn": 0.25 * r} for r in range(3)]
    write_text(place / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    found = found_in([place])
    found["groups"].append(
        {**found["groups"][0], "labels": {"run": "silo"}, "metric": "test/accuracy_silobn"}
    )
    found["axes"]["run"].append("silo")
    curves = next(picture for picture in pictures(found) if picture.name == "curves").draw([]).axes[0]
    assert [list(line.get_ydata()) for line in curves.lines] == [[0.5, 0.5, 0.5], [0.0, 0.25, 0.5]]


def test_configurations_of_one_name_are_told_apart(tmp_path):
    places = [write_run(tmp_path / f"x{norm}", norm=norm) for norm in ("bn", "gn")]
    names = found_in(places)["axes"]["run"]
    assert len({*names}) == 2
    assert all(re.fullmatch(r"FedAvg \([0-9a-f]{8}\)", name) for name in names)
    places = [write_run(tmp_path / f"y{callback}", callback=callback) for callback in (None, "FixBN")]
    assert found_in(places)["axes"]["run"] == ["FedAvg", "FedAvg + FixBN()"]


def test_the_newest_finished_attempt_counts(tmp_path):
    places = [write_run(tmp_path / f"a-s0{end}", accuracy=x) for end, x in (("", 0.25), (".2", 0.5))]
    places.append(write_run(tmp_path / "a-s0.10", accuracy=0.75, finished=False))
    assert found_in(places)["groups"][0]["values"]["test/accuracy"] == {"0": 0.5}


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


def test_a_single_run_shows_its_own_pictures(tmp_path):
    place = write_run(tmp_path / "a-s0")
    write_json(place / "policy.json", {"mean": [[1, "averaged"], [2, "frozen"]]})
    (place / "class_accuracy.png").write_bytes(b"\x89PNG")
    page = page_of(tmp_path, place)
    assert ("img", "src", "data:image/png;base64,iVBORw==") in page.addresses
    assert "BN running mean frozen from round 2" in page.text  # the legend of its learning curve


def test_a_map_of_differences_has_0_in_the_middle(tmp_path):
    """What is not there has no colour, and what one method has more is as dark as what it has less."""
    groups = [
        {"labels": {"method": m, "E": e, "b": b}, "values": {"a": {"0": x}}, "published": None, "runs": []}
        for m, e, b, x in [("BN", "1", "2", 0.5), ("GN", "1", "2", 0.75), ("BN", "9", "2", 0.5), ("GN", "9", "2", 0.375), ("BN", "1", "4", 0.5)]
    ]  # fmt: skip
    found = {
        "axes": {"method": ["BN", "GN"], "E": ["1", "9"], "b": ["2", "4"]},
        "choose": [],
        "spread": "E",
        "groups": groups,
    }
    found |= {"metrics": {"a": "accuracy"}, "difference": "GN - BN"}
    found["known"] = found["axes"]
    assert "difference" not in [picture.name for picture in pictures(found)]  # b is 2 in both pairs
    groups.append({**groups[1], "labels": {"method": "GN", "E": "1", "b": "4"}})
    (picture,) = (picture for picture in pictures(found) if picture.name == "difference")
    (axes,) = picture.draw([]).axes
    assert [text.get_text() for text in axes.texts] == ["+0.250", "-0.125", "+0.250"]
    assert axes.collections[0].get_clim() == (-0.25, 0.25)
    assert axes.get_title() == "GN \N{MINUS SIGN} BN, accuracy"


def test_the_same_files_give_the_same_page(tmp_path):
    study = write_study(tmp_path / "runs")
    assert page_of(tmp_path, study).source == page_of(tmp_path, study).source


def test_a_figure_that_fails_harms_nothing_else(tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise ValueError("no ink")

    study = write_study(tmp_path / "runs")
    found = json.loads((study / "study.json").read_text())
    monkeypatch.setattr("fl_lightning.studies.figures.heat_figure", fail)
    write_figures(study, found)
    assert "heat_map was not drawn: ValueError: no ink" in capsys.readouterr().err
    assert sorted(path.name for path in study.glob("*.p*")) == ["by_E.pdf", "by_E.png"]
    assert "not drawn: ValueError: no ink" in page_of(tmp_path, study).text


def test_the_command_writes_the_page_and_says_where(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs" / "bn" / "a-s0")
    monkeypatch.chdir(tmp_path)
    main(["report", "runs/bn/a-s0", "--output", "out/page.html"])
    assert capsys.readouterr().out == "report  out/page.html\n"
    assert ("a", "href", "../runs/bn/a-s0") in Page(tmp_path / "out" / "page.html").addresses


def test_what_is_neither_study_nor_run_is_refused_in_a_line(tmp_path):
    with pytest.raises(ConfigurationError, match=r"^report: .* is neither a study's folder .*; give .*$"):
        write_report([tmp_path], tmp_path / "report.html")
    write_text(tmp_path / "config.yaml", "name: x\n")
    with pytest.raises(ConfigurationError, match=r"config.yaml is no resolved configuration"):
        write_report([tmp_path], tmp_path / "report.html")
    write_text(tmp_path / "study.json", "{}")
    with pytest.raises(ConfigurationError, match=r"study.json is not what a study writes"):
        write_report([tmp_path], tmp_path / "report.html")
