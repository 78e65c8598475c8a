"""What a study's file says: its combinations, their settings, and one line for whatever is wrong in it."""

from pathlib import Path

import pytest
import yaml

import fl_lightning.configs
from fl_lightning import ConfigurationError
from fl_lightning.experiments.studies.reading import read_study

FILE = {
    "title": "A study",
    "settings": {"model.local_steps": 2},
    "axes": {
        "method": {
            "BN": {},
            "GN": {"model.model.norm": "gn"},
            "sBN": {"metric": "test/accuracy_static_pooled", "config": "more.yaml"},
        },
        "model.client_optimizer.lr": [0.1, 0.2],
    },
    "published": [{"method": "GN", "value": 0.5}],
    "scales": {
        "quick": {
            "base": "base.yaml",
            "axes": {"method": ["BN"], "model.client_optimizer.lr": [0.4]},
            "seeds": [3],
        },
        "reduced": {
            "base": ["base.yaml", "data.yaml"],
            "axes": {"method": {"GN": {"trainer.max_epochs": 7}, "sBN": None}},
        },
    },
}


SCALE = "base, settings, axes, seeds, cell_seconds, title, published"


def read(tmp_path, scale="reduced", **changes):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**FILE, **changes}, sort_keys=False))
    return read_study(path, scale)


def test_a_scale_has_its_own_labels_values_and_settings(tmp_path):
    quick, reduced = read(tmp_path, "quick"), read(tmp_path)
    assert [*quick.combinations()] == [{"method": "BN", "model.client_optimizer.lr": "0.4"}]
    assert [tuple(labels.values()) for labels in reduced.combinations()] == [
        ("GN", "0.1"), ("GN", "0.2"), ("sBN", "0.1"), ("sBN", "0.2"),
    ]  # fmt: skip
    gn, *_, sbn = reduced.combinations()
    assert reduced.arguments(gn, 5) == [
        "--model.local_steps=2", "--model.model.norm=gn", "--trainer.max_epochs=7", "--model.client_optimizer.lr=0.1",
        "--seed_everything=5",
    ]  # fmt: skip
    assert reduced.base == [f"--config={tmp_path}/base.yaml", f"--config={tmp_path}/data.yaml"]
    assert reduced.arguments(sbn, 5)[1] == f"--config={tmp_path}/more.yaml"  # after what it may override
    assert (reduced.metric(gn), reduced.metric(sbn)) == (None, "test/accuracy_static_pooled")
    assert (reduced.published(gn)["value"], reduced.published(sbn)) == (0.5, None)
    assert reduced.known_labels()["method"] == ["BN", "GN", "sBN"]


def test_a_base_is_a_shipped_file_unless_the_folder_of_the_study_has_it(tmp_path):
    home, name = Path(fl_lightning.configs.__file__).parents[1], "configs/digits_fedavg_bn.yaml"
    scales = {"reduced": {"base": [name, "configs/mine.yaml"]}}
    axes = {"method": {"FixBN": {"config": "configs/overlays/fixbn.yaml"}}}
    (folder := tmp_path / "studies").mkdir()

    def study():
        return read(folder, axes=axes, scales=scales, published=[])

    assert study().base == [f"--config={(home / name).resolve()}", f"--config={folder}/configs/mine.yaml"]
    overlay = (home / "configs/overlays/fixbn.yaml").resolve()
    assert f"--config={overlay}" in study().arguments({"method": "FixBN"}, 0)
    (folder / "configs").mkdir()
    (folder / name).touch()
    assert study().base[0] == f"--config={folder / name}"


def test_a_scale_may_have_a_title_and_published_values_of_its_own(tmp_path):
    scales = {"reduced": {"base": "b.yaml", "title": "Smaller", "published": []}, "full": {"base": "b.yaml"}}
    gn = {"method": "GN", "model.client_optimizer.lr": "0.1"}
    for scale, title, value in (("reduced", "Smaller", None), ("full", "A study", 0.5)):
        own = read(tmp_path, scale, scales=scales)
        assert (own.definition.title, (own.published(gn) or {}).get("value")) == (title, value)


def test_combinations_can_be_left_out(tmp_path):
    study = read(tmp_path, without=[{"method": ["GN", "BN"], "model.client_optimizer.lr": 0.2}])
    assert [tuple(labels.values()) for labels in study.combinations()] == [
        ("GN", "0.1"),
        ("sBN", "0.1"),
        ("sBN", "0.2"),
    ]


def test_a_label_may_have_seeds_of_its_own(tmp_path):
    study = read(
        tmp_path, "quick", axes={**FILE["axes"], "method": {"BN": {"seeds": [0, 1, 2]}, "GN": {}, "sBN": {}}}
    )
    (labels,) = study.combinations()
    assert study.seeds(labels) == [0, 1, 2]
    assert not any("seeds" in argument for argument in study.arguments(labels, 0))
    assert read(tmp_path, "quick").seeds(labels) == [3]


def test_an_axis_with_one_label_is_not_chosen(tmp_path):
    choose = [{"axis": "model.client_optimizer.lr", "by": ["method"]}]
    assert read(tmp_path, "quick", choose=choose).choices == []
    (choice,) = read(tmp_path, choose=choose).choices
    assert (choice.metric, choice.by, choice.seed) == ("val/accuracy", ["method"], 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": {}}, "there is no key 'axis'; did you mean axes"),
        ({"title": ["a"]}, "title"),
        ({"axes": {"method": "GN"}}, r"axes.method: 'GN' must be a list of values, or labels with settings"),
        ({"published": [{"method": "LN", "value": 1}]}, "published: axis method has no label 'LN'; it has BN, GN, sBN"),
        ({"published": [{"method": "GN"}]}, "published.0: value is missing"),
        ({"published": [{"method": "GN", "value": float("nan")}]}, "published.0.value: nan must be a finite number"),
        ({"metrics": {}}, "metrics: {} must not be empty"),
        ({"axes": {"seed": {"a": {}}}}, "axes.seed.* is a column of the results; give the axis another name"),
        ({"axes": {"learning_rate": {"a": {}}}}, "axes.learning_rate.* is a column of the results"),
        ({"axes": {"value": {"a": {}}}}, "axes.value.* is a column of the results"),
        ({"report": "mean of the last 0"}, "report: 'mean of the last 0' must be last, best, or a rule such as 'mean of"),
        ({"headline": ["GN > BN", "GN > BN at E=1", "GN > BN at E=2", "BN > GN"]}, "headline: .* must have at most three entries"),
        ({"headline": ["GN > BN"], "claims": ["GN > BN"]}, "headline: 'GN > BN' is in claims too; keep it in headline"),
        ({"scales": {"reduced": {"base": "b", "seeds": []}}}, r"scales.reduced.seeds: \[\] must not be empty"),
        ({"axes": {"method": {"BN": {}, "GN": {"seeds": 1}, "sBN": {}}}, "scales": {"reduced": {"base": "b"}}}, "seeds: 1 must be a list"),
        ({"scales": {"reduced": {"base": "b", "seeds": [0, 0]}}}, r"scales.reduced.seeds: \[0, 0\] must be different; 0 appears twice"),
        ({"choose": [{"axis": "method", "by": ["method"]}]}, "choose: method is the chosen axis and in by"),
        ({"settings": {"seed_everything": 3}}, "seed_everything is no setting of a study's cells"),
        ({"axes": {"method": {"BN": {"name": "x"}, "GN": {}, "sBN": {}}}, "scales": {"reduced": {"base": "b"}}}, "name is no setting of"),
        ({"settings": {"config": 3}}, "settings.config.0: 3 must be a text"),
        ({"without": [{"norm": "GN"}]}, "without: there is no axis 'norm'; there are method, model.client_optimizer.lr"),
        ({"claims": ["BN > FN"]}, "claims: 'BN > FN': 'FN' is no label of one axis"),
        ({"difference": "BN > GN"}, "difference: 'BN > GN' must be one label minus another"),
        ({"difference": "BN - FN"}, "difference: 'BN - FN': 'FN' is no label of one axis"),
        ({"spread": "E"}, "spread: there is no axis 'E'"),
        ({"choose": [{"axis": "E"}]}, "choose: there is no axis 'E'"),
        ({"choose": [{"axis": "method", "metric": "test/accuracy"}]}, "choose: metric test/accuracy must be a metric on validation data"),
        ({"choose": [{"axes": "E"}]}, "choose.0: there is no key 'axes'"),
        ({"scales": {"full": {"base": "b.yaml"}}}, "--scale: .*study.yaml has no scale 'reduced'; use one of full"),
        ({"scales": {"reduced": {"seeds": [0]}}}, "scales.reduced: .*base"),
        ({"scales": {"reduced": {"base": "b", "seeds": "x"}}}, "scales.reduced.seeds: 'x' must be a list"),
        ({"scales": {"reduced": {"base": "b", "axes": {"method": ["FN"]}}}}, "axes.method has no label 'FN'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(tmp_path, changes, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        read(tmp_path, **changes)
    assert "\n" not in str(refused.value)


BN_GN = {"method": {"BN": {}, "GN": {}, "LN": {}}, "E": ["1", "2"]}
SMALL = {"title": "t", "axes": BN_GN, "scales": {"reduced": {"base": "b"}}, "published": [], "settings": {}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claims": ["BN > GN ~ LN within 0.5"]}, "mixes > and ~; write a claim for each"),
        ({"claims": ["BN ~ GN within inf"]}, "'BN ~ GN within inf' must be"),
        ({"claims": ["BN ~ GN within nan"]}, "'BN ~ GN within nan' must be"),
        ({"claims": ["BN > BN"]}, "has BN twice"),
        ({"claims": ["BN > GN > BN"]}, "has BN twice"),
        ({"claims": ["BN > GN at method=BN"]}, "compares labels of method, so 'at' must not name this axis"),
        ({"claims": ["BN > E=1"]}, "compares BN with E=1, labels of different axes"),
        ({"claims": ["BN, GN > LN"]}, "'BN, GN' names method twice"),
        ({"difference": "BN - BN"}, "difference: 'BN - BN' has BN twice"),
        ({"settings": {"seeds": [1]}}, "settings: .* seeds is no setting of a study's cells"),
        ({"settings": {"metric": "test/loss"}}, "settings: .* metric is no setting"),
        ({"scales": {"reduced": {"base": "b", "settings": {"seeds": [1]}}}}, "scales.reduced.settings: .* seeds is no"),
        ({"published": [{"method": "GN", "value": 1}, {"E": 1, "value": 2}]}, "published: .* are values of the same row"),
        ({"published": [{"method": "GN", "value": True}]}, "published.0.value: True must be a number"),
        ({"axes": {"method": {"BN": {"seeds": [1]}}, "E": {"1": {"seeds": [2]}}}}, "seeds: .* are for the same row"),
        ({"choose": [{"axis": "E", "at": {"E": 1}}]}, "choose: at cannot name a label of E"),
        (
            {"choose": [{"axis": "E"}], "claims": ["E=1 ~ E=2 within 0.1"]},
            "claims: 'E=1 ~ E=2 within 0.1' compares labels of E, but the table has only the chosen label",
        ),
        (
            {"choose": [{"axis": "E", "by": ["method"]}], "claims": ["BN > GN at E=1"]},
            "claims: 'BN > GN at E=1' names a label of E, but the table has only the chosen label",
        ),
        ({"choose": [{"axis": "E"}, {"axis": "E", "by": ["method"]}]}, "choose: E is chosen twice"),
        (
            {"axes": {"method": {"BN": {}, "own": {"metric": "test/own_accuracy"}}}, "choose": [{"axis": "method"}]},
            "choose: labels of method have different metrics, test/accuracy and test/own_accuracy, which cannot be compared",
        ),
        (
            {"axes": {**BN_GN, "method": {"silo": {"metric": "test/accuracy_silobn"}}}, "choose": [{"axis": "E", "metric": "val/loss"}]},
            "choose: metric val/loss has no effect on a label with the metric test/accuracy_silobn, which is chosen by val/accuracy_silobn",
        ),
        ({"axes": {"E": [1, "1"]}}, r"axes.E: \[1, '1'\] must be different; 1 appears twice"),
        ({"scales": {"reduced": {"base": "b", "seeds": [-1]}}}, "seeds.0: -1 must be greater than or equal to 0"),
        ({"choose": [{"axis": "E", "seed": -1}]}, "choose.0.seed: -1 must be greater"),
        *(({key: value}, f"{key}: {value} must be a ") for key in ("axes", "scales", "claims", "published") for value in (None, 3)),
        ({"axes": {"method": None}}, "axes.method: None must be a list of values, or labels"),
        ({"scales": {"reduced": None}}, "scales.reduced: None must be a mapping"),
        ({"scales": {"reduced": {"base": None}}}, r"scales.reduced.base: None must not be empty"),
        ({"scales": {"reduced": {"base": "b", "axes": {"method": {"BN": "x"}}}}}, "axes.method.BN: 'x' must be a mapping"),
        ({"axes": {"method": {"BN": "x"}}}, "axes.method.BN: 'x' must be a mapping"),
        ({"axes": {"method": {"BN\nx: 1": {}}}}, r"'BN\\nx: 1' must be one line without control characters"),
        ({"axes": {"method": {"BN\u2028": {}}}}, r"'BN\\u2028' must be one line without control characters"),
        ({"axes": {"E": ["\x1b[31m"]}}, r"\\x1b\[31m'\] must be one line without control characters"),
        ({"title": "red \x1b[31m"}, r"title: 'red \\x1b\[31m' must be one line without control characters"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        read(tmp_path, **{**SMALL, **changes})
    assert str(refused.value).isprintable()
    assert "mistakes" not in str(refused.value)


def test_everything_that_is_wrong_at_any_scale_is_named_at_once(tmp_path):
    with pytest.raises(ConfigurationError) as refused:
        read(
            tmp_path,
            claims=["BN > FN", "BN > BN"],
            published=[{"method": "LN", "value": 1}],
            scales={"reduced": {"base": "b"}, "full": {"base": "b", "published": [{"E": 1, "value": 1}]}},
        )
    said = str(refused.value)
    for part in (
        "4 mistakes: ", "'FN' is no label", "has BN twice", "no label 'LN'", "there is no axis 'E'",
    ):  # fmt: skip
        assert part in said
    with pytest.raises(ConfigurationError) as refused:
        read(
            tmp_path,
            claim=[],
            published=[{"value": "x"}],
            scales={"reduced": {"base": "b", "seed": 1}, "full": {"base": []}},
        )
    said = str(refused.value)
    for part in (
        "4 mistakes: ", "no key 'claim'; did you mean claims", "scales.reduced: there is no key 'seed'", "scales.full.base: [] must not be empty",
        "published.0.value: 'x' must be a number",
    ):  # fmt: skip
        assert part in said


def test_a_wrong_key_or_value_is_told_with_its_line(tmp_path):
    text = "title: t\naxes:\n  m:\n    BN: {}\nscales:\n  quick:\n    base: b\n    seeds:\n    - 0\n    - x\n"
    for content, line in (
        (text, "scales.quick.seeds.1: 'x' must be a whole number (line 8)"),
        (text.replace("- x", "- 1\n    seed: 3"), f"scales.quick: there is no key 'seed'; did you mean seeds?; use {SCALE} (line 11)"),
        (text.replace("BN: {}", "BN: 3"), "axes.m.BN: 3 must be a mapping (line 4)"),
        (text.replace("title: t", "{titel: t"), "is not YAML: line 2: "),
    ):  # fmt: skip
        (tmp_path / "s.yaml").write_text(content)
        with pytest.raises(ConfigurationError) as refused:
            read_study(tmp_path / "s.yaml", "quick")
        assert line in str(refused.value)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("{m: {BN: {}, GN: {}, BN: {a: 1}}}", "is not YAML: line 3: 'BN' is given twice; keep one of them"),
        ("{m: {1: {}, '1': {a: 1}}}", "'1' is given twice"),
        ("{m: {a: {x: 1, x: 2}}}", "'x' is given twice"),
        ("{m: {a: {x: !!set {y}}}}", "Object of type set is not JSON serializable; use texts, numbers, true"),
        ("{m: [!!binary aGk=]}", "Object of type bytes is not JSON"),
        (f"{'[' * 3000}{']' * 3000}", "is not YAML: maximum recursion depth"),
        ("&a {m: {x: *a}}", "Circular reference detected; use texts"),
        (f"{{m: [{'9' * 5000}]}}", "is not YAML: .*4300 digits"),
        ("{m: {[1, 2]: {}}}", "is not YAML"),
    ],
)
def test_what_is_no_plain_yaml_is_refused(tmp_path, axes, message):
    (tmp_path / "s.yaml").write_text(f"title: t\nscales: {{quick: {{base: b}}}}\naxes: {axes}\n")
    with pytest.raises(ConfigurationError, match=message) as refused:
        read_study(tmp_path / "s.yaml", "quick")
    assert "\n" not in str(refused.value)


def test_names_may_be_numbers_and_a_mapping_may_take_another_s_keys(tmp_path):
    (tmp_path / "s.yaml").write_text(
        "title: >\n  two\n  lines\nscales: {1: &one {base: b, seeds: [4]}, two: {<<: *one, seeds: [5]}}\naxes: {m: {1: {}, 2.5: null, 2020-01-01: {}}}\n"
    )
    studies = [read_study(tmp_path / "s.yaml", scale) for scale in ("1", "two")]
    assert [study.scale.seeds for study in studies] == [[4], [5]]
    assert studies[0].definition.title == "two lines"
    assert [*studies[0].combinations()] == [{"m": "1"}, {"m": "2.5"}, {"m": "2020-01-01"}]


def test_files_that_are_no_study_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"study: nowhere.yaml cannot be read: No such file"):
        read_study(Path("nowhere.yaml"), "quick")
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(ConfigurationError, match=r"x.yaml is not YAML"):
        read_study(tmp_path / "x.yaml", "quick")
    (tmp_path / "x.yaml").write_text("- 1")
    with pytest.raises(ConfigurationError, match=r"x.yaml: \[1\] must be a mapping"):
        read_study(tmp_path / "x.yaml", "quick")
