"""Which columns of a table are features, and which of its words stand for missing values."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.__main__ import main
from fl_lightning.datamodules import TensorData
from tests.support.command_line import message_of, write_config
from tests.support.helpers import federated_run


def table(rows=60, **columns):
    """Write columns, each a function of the row or a list to repeat, beside a site and an outcome."""
    made = {"x": [i / 7 for i in range(rows)]}
    for name, values in columns.items():
        made[name] = [values(i) if callable(values) else values[i % len(values)] for i in range(rows)]
    made |= {"site": [["a", "b"][i % 2] for i in range(rows)]}
    made |= {"outcome": [["no", "yes"][i // 2 % 2] for i in range(rows)]} if "outcome" not in columns else {}
    pd.DataFrame(made).to_csv("table.csv", index=False)
    return "table.csv"


def made(**settings):
    names = {"targets": "outcome", "groups": "site", "batch_size": 4}
    data = TensorData("table.csv", **{**names, **settings})
    data.setup("fit")
    return data


def read(data, path, labelled=False):
    """The new samples that ``predict`` and ``test`` read with the run's facts."""
    return data.new_samples(path, SimpleNamespace(**data.facts()), labelled)


# columns


def test_all_columns_but_the_named_ones_are_features():
    table(patient=lambda i: f"p{i}", date=lambda i: f"{1 + i % 9}/2/2024", age=lambda i: 40 + i % 30)
    data = made(columns={"except": ["patient", "date"]})
    assert data.preprocessing.columns == ["x", "age"]
    assert made(columns={"except": ["patient", "date", "outcome"]}).preprocessing.columns == ["x", "age"]
    table(patient=lambda i: f"p{i}")
    assert made(columns={"except": "patient"}).preprocessing.columns == ["x"]


def test_a_column_without_a_name_is_left_out_by_except():
    table()
    pd.read_csv("table.csv").rename(columns={"site": "Unnamed: 0"}).to_csv("table.csv", index=False)
    assert made(columns={"except": ["Unnamed: 0"]}, groups=None, num_clients=2).preprocessing.columns == ["x"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"except": ["dtae"]}, r"data.columns: dtae is no column of table.csv; it has x, site, outcome"),
        ({"but": ["x"]}, r"data.columns: {'but': \['x'\]} has other keys than except; write {except: \[NAME"),
        ({"except": [], "but": []}, r"data.columns: .* has other keys than except; write"),
        ({}, r"data.columns: {} has other keys than except; write"),
        ({"except": ["x"]}, r"data.columns: {'except': \['x'\]} leaves no feature; name some of x, site"),
    ],
)
def test_another_way_to_name_columns_is_refused(columns, words):
    table()
    with pytest.raises(ConfigurationError, match=f"^{words}"):
        made(columns=columns)


def test_a_table_of_targets_alone_has_no_feature():
    table()
    with pytest.raises(ConfigurationError, match=r"data.columns: None leaves no feature; name some of x"):
        made(targets=["x", "outcome"])


# missing words


def test_listed_words_are_missing_and_numbers_are_compared_by_value():
    table(
        age=lambda i: {3: "-999", 4: "-999.0", 5: "-9.99e2", 6: "Unknown", 7: ""}.get(i, 40 + i % 30),
        stage=lambda i: {3: "UNKNOWN ", 8: "-999"}.get(i, ["I", "II", "N/A"][i % 3]),
    )
    data = made(missing=["-999", "unknown"], impute="median")
    raw = data._data["features"]
    assert raw[:, 1].isnan().nonzero()[:, 0].tolist() == [3, 4, 5, 6, 7]
    assert raw[:, 2].isnan().nonzero()[:, 0].tolist() == [3, 8]
    assert data.preprocessing.categories == {"stage": ["I", "II", "N/A"]}
    assert [note for note in data.notes if note.startswith("missing")] == [
        "missing values, replaced by median of the training samples: age: 5 of 60 samples",
        "missing values, replaced by the most frequent category of the training samples: stage: 2 of 60 samples",
    ]
    with pytest.raises(
        ConfigurationError, match=r"line 5 of table.csv has no value for age; set data.impute"
    ):
        made(missing=[-999, "unknown"])
    with pytest.raises(ConfigurationError, match=r"line 8 of table.csv has 'Unknown'; .* in data.missing"):
        made(missing=["-999"], impute="median")


def test_two_forms_of_a_letter_are_one_missing_word():
    table(stage=lambda i: "fehlt für p" if i == 3 else ["I", "II"][i % 2])
    data = made(missing=["fehlt fu\u0308r P "], impute="median")
    assert data.preprocessing.categories == {"stage": ["I", "II"]}


def test_a_value_that_is_missing_need_not_be_finite():
    table(age=lambda i: "1e39" if i == 7 else i)
    assert int(made(missing=["1e39"], impute="mean")._data["features"].isnan().sum()) == 1


@pytest.mark.parametrize("name", ["continent", "site", "outcome", "subject"])
def test_an_empty_list_keeps_na_a_word(name):
    words = {"continent": ["NA", "EU", "AS"], "subject": lambda i: f"s{i}"}
    table(**{**words, "outcome": ["no", "no", "yes"]})
    frame = pd.read_csv("table.csv", keep_default_na=False)
    if name != "continent":
        frame[name] = frame[name].replace({"a": "NA", "no": "NA", "s3": "NA"})
        frame.to_csv("table.csv", index=False)
    named = {"subjects": "subject", "impute": "median"}
    data = made(missing=[], **named)
    assert data.preprocessing.categories == {"continent": ["AS", "EU", "NA"]}
    assert not data._data["features"].isnan().any()
    if name != "continent":
        with pytest.raises(
            ConfigurationError, match=r"has NA for .*; .* \(data.missing: \[\] then allows it\)"
        ):
            made(**named)
    frame.loc[5, name] = ""
    frame.to_csv("table.csv", index=False)
    if name == "continent":
        assert int(made(missing=[], **named)._data["features"].isnan().sum()) == 1
    else:
        with pytest.raises(ConfigurationError, match=rf"line 7 of table.csv has no {name}; fill in"):
            made(missing=[], **named)


def test_predict_and_test_read_the_missing_words_of_the_run():
    table(age=lambda i: -999 if i % 10 == 0 else 40 + i % 30, stage=["NA", "I", "II"], outcome=["NA", "yes"])
    settings = {"columns": {"except": ["site"]}, "groups": None, "num_clients": 2}
    data = made(missing=["-999"], impute="median", **settings)
    pd.DataFrame({"x": [1, 2], "age": [-999.0, 50], "stage": ["NA", ""], "outcome": ["NA", "yes"]}).to_csv(
        "new.csv", index=False
    )
    new = read(data, Path("new.csv"), labelled=True)
    inputs, targets = new[slice(None)]
    assert inputs.nan_to_num(-1).tolist() == [[1, -1, 2], [2, 50, -1]]
    assert targets.tolist() == [0, 1]
    assert new.notes[0].endswith("age: 1 of 2 samples")
    pd.DataFrame({"x": [1], "age": ["?"], "stage": ["I"]}).to_csv("new.csv", index=False)
    with pytest.raises(ConfigurationError, match=r"age is no column of numbers, line 2 of new.csv has '\?'"):
        read(data, Path("new.csv"))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("missing", ["-999"]),
        ("missing", []),
        ("categorical", ["grade"]),
        ("columns", ["age"]),
        ("columns", {"except": ["age"]}),
    ],
)
def test_settings_of_tables_are_refused_for_arrays(setting, value):
    told = (
        rf"^data.{setting}: {re.escape(str(value))} needs a table; give a .csv or .+ leave data.{setting} out"
    )
    with pytest.raises(ConfigurationError, match=told):
        TensorData([[1.0]] * 9, [0] * 9, **{setting: value})


# DataFrames


def frame():
    """A table of every kind of column, with gaps."""
    draw, rows = np.random.default_rng(0), 60
    table = pd.DataFrame(
        {
            "time": 1_700_000_000 + 10 * np.arange(rows),
            "dose": draw.exponential(2, rows),
            "half": draw.normal(size=rows).astype(np.float32),
            "grade": pd.Categorical(np.resize([3, 1, 2], rows)),
            "zip": np.resize(["02139", "10001", "94105"], rows),
            "code": np.resize(["10001", "60601"], rows),
            "flag": np.resize([True, False, False], rows),
            "visits": pd.array(draw.integers(0, 9, rows), dtype="Int64"),
            "site": np.resize([" Köln", "Bonn"], rows),
            "outcome": np.resize(["no", "yes", "yes"], rows),
        }
    )
    for row, name in enumerate(("dose", "grade", "code", "visits")):
        table.loc[row + 3, name] = None
    return table


def test_a_data_frame_is_read_as_its_parquet_file():
    table = frame().set_axis(np.arange(60) * 2 + 7)
    before = table.copy()
    table.reset_index(drop=True).to_parquet("table.parquet")
    settings = {"groups": "site", "batch_size": 4, "impute": "median", "standardize": True}
    data, of_file = (TensorData(x, "outcome", **settings) for x in (table, "table.parquet"))
    assert [*data.preprocessing.categories] == ["grade", "zip", "code", "flag"]
    assert data.preprocessing.categories["grade"] == ["1", "2", "3"]
    assert data._data["features"].dtype == torch.float64
    for one in (data, of_file):
        one.setup("fit")
    assert data.preprocessing == of_file.preprocessing
    assert data.notes == of_file.notes
    assert data.fingerprint() == of_file.fingerprint()
    assert data.client_names == of_file.client_names == ["Bonn", "Köln"]
    assert torch.equal(data.samples.inputs, of_file.samples.inputs)
    pd.testing.assert_frame_equal(table, before)
    before.to_csv("new.csv", index=False)
    new = read(data, Path("new.csv")).inputs(slice(None))
    assert torch.allclose(
        new, data._data["features"], rtol=1e-7, equal_nan=True
    )  # a CSV rounds half to 32 bits


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        ({}, {"targets": "outcom"}, r"data.targets: outcom is no column of DataFrame; it has time, dose"),
        ({}, {"columns": ["dose"]}, r"data.columns: row 4 of DataFrame has no value for dose; set data.impute"),
        ({"dose": 1e39}, {"columns": ["dose"]}, r"data.columns: row 1 of DataFrame has 1e\+39 for dose, which is not"),
        ({"site": None}, {"groups": "site"}, r"data.groups: row 1 of DataFrame has no site; fill in a value"),
        ({"outcome": None}, {}, r"data.targets: row 1 of DataFrame has no outcome; fill in"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_data_frame_names_its_row(change, settings, words):
    settings = {"targets": "outcome", "columns": {"except": ["dose", "grade", "code", "visits"]}, **settings}
    with pytest.raises(ConfigurationError, match=f"^{words}"):
        TensorData(frame().assign(**change), **settings)


def test_a_data_frame_without_rows_or_with_two_columns_of_a_name_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"^data.features: DataFrame has a header, but no samples; add"
    ):
        TensorData(frame()[:0], "outcome")
    twice = frame()[["time", "time", "outcome"]]
    with pytest.raises(
        ConfigurationError, match=r"^data.columns: time is more than one column of DataFrame; it"
    ):
        TensorData(twice, "outcome")
    assert TensorData(twice.set_axis([0, 1, "outcome"], axis=1), "outcome").preprocessing.columns == [
        "0",
        "1",
    ]


def test_a_data_frame_trains_and_takes_missing_words_and_columns():
    table = frame().assign(dose=-999).astype({"dose": float})
    table.loc[:40, "dose"] = np.arange(41.0)
    settings = {"groups": "site", "batch_size": 4, "impute": "mean", "standardize": True, "missing": [-999]}
    data = TensorData(table, "outcome", columns={"except": ["time"]}, **settings)
    assert int(data._data["features"][:, 0].isnan().sum()) == 19
    module = federated_run(data=data, model=torch.nn.Linear(data.in_features, 2), rounds=1).module
    assert module.record.samples > 0


# the command line


def test_the_command_line_takes_both_settings(capsys):
    table(day=lambda i: f"{i}/2/2024", age=lambda i: -999 if i % 10 == 0 else 40 + i % 30)
    settings = {"features": "table.csv", "targets": "outcome", "groups": "site", "batch_size": 4}
    settings |= {"columns": {"except": ["day"]}, "missing": [-999, "unknown"], "impute": "mean"}
    write_config({"data": {"class_path": "TensorData", "init_args": settings}})
    main(["partition", "--config", "tiny.yaml"])
    assert "replaced by mean of the training samples: age: 6 of 60 samples" in capsys.readouterr().out
    main(["partition", "--config", "tiny.yaml", "--data.columns", "{except: [day, age]}"])
    assert "replaced" not in capsys.readouterr().out
    wrong = ["partition", "--config", "tiny.yaml", "--data.columns", "{but: [day]}"]
    assert message_of(capsys, lambda: main(wrong)).startswith(
        "error: data.columns: {'but': ['day']} has other"
    )
