"""What a study's file says: its combinations, their settings, and one line for whatever is wrong in it."""

from pathlib import Path

import pytest
import yaml

from fl_lightning import ConfigurationError
from fl_lightning.studies.reading import read_study

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
    assert (reduced.published(gn), reduced.published(sbn)) == (0.5, None)
    assert reduced.known_labels()["method"] == ["BN", "GN", "sBN"]


def test_a_scale_may_have_a_title_and_published_values_of_its_own(tmp_path):
    scales = {"reduced": {"base": "b.yaml", "title": "Smaller", "published": []}, "full": {"base": "b.yaml"}}
    gn = {"method": "GN", "model.client_optimizer.lr": "0.1"}
    for scale, title, value in (("reduced", "Smaller", None), ("full", "A study", 0.5)):
        own = read(tmp_path, scale, scales=scales)
        assert (own.definition.title, own.published(gn)) == (title, value)


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
    assert (choice.metric, choice.by, choice.seed) == ("val/accuracy", ["method"], None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": {}}, "there is no key 'axis'; did you mean axes"),
        ({"title": ["a"]}, "title"),
        ({"axes": {"method": "GN"}}, r"axes.method: 'GN' must be a list of values, or labels with settings"),
        ({"published": [{"method": "LN", "value": 1}]}, "published: axis method has no label 'LN'; it has BN, GN, sBN"),
        ({"published": [{"method": "GN"}]}, "has no number as its value"),
        ({"published": [{"method": "GN", "value": float("nan")}]}, "has no number as its value"),
        ({"metrics": {}}, "metrics: name one at least"),
        ({"scales": {"reduced": {"base": "b", "seeds": []}}}, r"seeds: \[\] must be a list of different numbers"),
        ({"axes": {"method": {"BN": {}, "GN": {"seeds": 1}, "sBN": {}}}, "scales": {"reduced": {"base": "b"}}}, "seeds: 1 must be a list"),
        ({"scales": {"reduced": {"base": "b", "seeds": [0, 0]}}}, r"seeds: \[0, 0\] must be a list of different numbers"),
        ({"axes": {"method": {"BN": {}, "GN": {}, "sBN": {}}, 5: {"a": {}}}, "scales": {"reduced": {"base": "b"}}}, "axes: 5 is no name"),
        ({"choose": [{"axis": "method", "by": ["method"]}]}, "choose: method is chosen and cannot be in by"),
        ({"settings": {"seed_everything": 3}}, "seed_everything is no setting of a study's cells"),
        ({"axes": {"method": {"BN": {"name": "x"}, "GN": {}, "sBN": {}}}, "scales": {"reduced": {"base": "b"}}}, "name is no setting of"),
        ({"settings": {"config": 3}}, "config: 3 must be a file or a list of files"),
        ({"without": [{"norm": "GN"}]}, "without: there is no axis 'norm'; there are method, model.client_optimizer.lr"),
        ({"claims": ["BN > FN"]}, "claims: 'BN > FN': 'FN' is no label of one axis"),
        ({"difference": "BN > GN"}, "difference: 'BN > GN' must be one label minus another"),
        ({"difference": "BN - FN"}, "difference: 'BN - FN': 'FN' is no label of one axis"),
        ({"spread": "E"}, "spread: there is no axis 'E'"),
        ({"choose": [{"axis": "E"}]}, "choose: there is no axis 'E'"),
        ({"choose": [{"axis": "method", "metric": "test/accuracy"}]}, "choose: metric test/accuracy must be one of the validation data"),
        ({"choose": [{"axes": "E"}]}, "choose: there is no key 'axes'"),
        ({"scales": {"full": {"base": "b.yaml"}}}, "--scale: .*study.yaml has no scale 'reduced'; use one of full"),
        ({"scales": {"reduced": {"seeds": [0]}}}, "scales.reduced: .*base"),
        ({"scales": {"reduced": {"base": "b", "seeds": "x"}}}, "scales.reduced: .*seeds"),
        ({"scales": {"reduced": {"base": "b", "axes": {"method": ["FN"]}}}}, "axes.method has no label 'FN'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(tmp_path, changes, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        read(tmp_path, **changes)
    assert "\n" not in str(refused.value)


def test_files_that_are_no_study_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"study: nowhere.yaml cannot be read: No such file"):
        read_study(Path("nowhere.yaml"), "quick")
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(ConfigurationError, match=r"x.yaml is no YAML"):
        read_study(tmp_path / "x.yaml", "quick")
    (tmp_path / "x.yaml").write_text("- 1")
    with pytest.raises(ConfigurationError, match=r"x.yaml: a mapping is needed, found list"):
        read_study(tmp_path / "x.yaml", "quick")
