"""Tables as they come: separators, missing values and categories, fitted on training samples."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fl_lightning import ConfigurationError
from fl_lightning.client_data.preprocessing import Preprocessing, restored_preprocessing
from fl_lightning.datamodules import TensorData
from fl_lightning.datamodules.tables import raw_features, read_frame

NUMBERS = ["age", "dose"]


def patients(count=120):
    """A table with missing values, words and numbered grades, in which the last patient's stage is unique."""
    draw = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "site": draw.choice(["Bergen", "Oslo", "Tromsø"], count),
            "age": draw.normal(60, 10, count).round(2),
            "dose": draw.exponential(2, count).round(3),
            "stage": draw.choice(["I", "II", "III"], count).astype(object),
            "grade": draw.integers(1, 4, count),
            "outcome": draw.choice(["no", "yes"], count),
        }
    )
    for column in ("age", "dose", "stage"):
        table.loc[draw.choice(count, 15, replace=False), column] = None
    table.loc[count - 1, "stage"] = "IV"
    return table


def test_without_preprocessing_inputs_are_not_changed():
    inputs = torch.rand(2, 3, 4)
    assert restored_preprocessing(None)(inputs) is inputs


def transformed(preprocessing, table, path):
    """The inputs of a model for the rows of a table."""
    return preprocessing.inputs(torch.from_numpy(raw_features(preprocessing, table, path)))


def write(table, form, path):
    if form == "parquet":
        table.to_parquet(path)
        return
    settings = {
        "comma": {},
        "quotes": {"quoting": 1},
        "semicolon and BOM": {"sep": ";", "encoding": "utf-8-sig"},
        "decimal comma": {"sep": ";", "decimal": ",", "quoting": 2},
        "tab": {"sep": "\t", "na_rep": "NA"},
        "bar": {"sep": "|", "na_rep": "."},
    }
    table.to_csv(path, index=False, **settings[form])


def made(path, **settings):
    data = TensorData(
        path,
        "outcome",
        groups="site",
        **{"impute": "median", "standardize": True, "categorical": ["grade"], "batch_size": 8, **settings},
    )
    data.setup("fit")
    return data


@pytest.mark.parametrize("form", ["quotes", "semicolon and BOM", "decimal comma", "tab", "bar", "parquet"])
def test_a_table_has_the_same_samples_in_each_form(form):
    table = patients()
    if form == "bar":
        table["stage"] = table["stage"].fillna("?").replace("?", "NA")  # "." stands for a number
    write(table, "comma", "comma.csv")
    write(table, form, path := Path("table.parquet" if form == "parquet" else "table.csv"))
    first, second = made("comma.csv"), made(path)
    assert first.fingerprint() == second.fingerprint()
    assert first.client_names == second.client_names == ["Bergen", "Oslo", "Tromsø"]
    decimal = {"parquet": None, "decimal comma": ","}.get(form, ".")
    assert replace(first.preprocessing, decimal=decimal) == second.preprocessing


@pytest.mark.parametrize("impute", ["mean", "median", "most_frequent"])
@pytest.mark.parametrize("val_fraction", [0, 0.3])
def test_inputs_are_those_of_scikit_learn_fitted_on_the_training_samples(impute, val_fraction):
    table = patients()
    write(table, "comma", path := Path("table.csv"))
    data = made(path, impute=impute, val_fraction=val_fraction)
    inputs = transformed(data.preprocessing, table, path)
    text = transformed(data.preprocessing, read_frame(path), path)
    assert torch.equal(inputs, text)
    rows = {tuple(row): number for number, row in enumerate(inputs.tolist())}
    assert len(rows) == len(table)
    parts = data.distribution
    trained, held_out = torch.cat(parts.clients), torch.cat([parts.val, parts.test])
    train = [rows[tuple(row)] for row in data.samples.inputs[trained].tolist()]
    assert len(train) == sum(data.num_examples(client) for client in range(3)) < len(table)
    assert {rows[tuple(row)] for row in data.samples.inputs[held_out].tolist()}.isdisjoint(train)
    reference = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(strategy=impute), StandardScaler()), NUMBERS),
            (
                "words",
                make_pipeline(
                    SimpleImputer(strategy="most_frequent"),
                    OneHotEncoder(handle_unknown="ignore", sparse_output=False),
                ),
                ["stage", "grade"],
            ),
        ]
    )
    table["stage"] = table["stage"].astype(object).where(table["stage"].notna(), np.nan)
    expected = reference.fit(table.iloc[sorted(train)]).transform(table)
    seen = inputs.any(0)  # a category that only the other samples have is always 0
    assert np.allclose(inputs[:, seen], expected, atol=1e-6)
    assert data.in_features == inputs.shape[1]
    names = data.preprocessing.categories["stage"]
    assert (
        names.count(None) == data.in_features - int(seen.sum()) == ("IV" not in set(table.stage.iloc[train]))
    )


def test_categories_that_no_training_sample_has_are_all_zero():
    write(patients(), "comma", path := Path("table.csv"))
    preprocessing = made(path).preprocessing
    new = pd.DataFrame({"age": [50], "dose": ["1"], "stage": ["V"], "grade": [2.0], "unused": ["x"]})
    (inputs,) = transformed(preprocessing, new, Path("new.csv")).tolist()
    width = len(preprocessing.categories["stage"])
    assert inputs[2 : 2 + width] == [0] * width
    assert inputs[2 + width :] == [0, 1, 0]
    missing = new.assign(age=np.nan, stage=None)
    filled = new.assign(
        age=preprocessing.fill[0], stage=preprocessing.categories["stage"][int(preprocessing.fill[2])]
    )
    results = [transformed(preprocessing, table, Path("new.csv")) for table in (missing, filled)]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ({"age": [1, 2]}, r"data.columns: dose is no column of new.csv; it has age"),
        ({"age": [1, "old"], "dose": [1, 1]}, r"age is no column of numbers, line 1 of new.csv has 'old'"),
        ({"age": [1, None], "dose": [1, 1]}, r"line 1 of new.csv has no value for age; set data.impute"),
    ],
)
def test_a_new_table_that_does_not_fit_is_named(new, words):
    with pytest.raises(ConfigurationError, match=words):
        raw_features(Preprocessing(NUMBERS), pd.DataFrame(new), Path("new.csv"))


def test_the_fitted_values_are_plain_and_survive_a_pickle():
    write(patients(), "comma", path := Path("table.csv"))
    preprocessing = made(path).preprocessing
    content = vars(preprocessing)
    assert pickle.loads(pickle.dumps(preprocessing)) == preprocessing == Preprocessing(**content)

    def plain(value):
        if isinstance(value, list):
            return all(map(plain, value))
        return value is None or type(value) in (str, float)

    assert all(map(plain, [*content["categories"].values(), *(content[x] for x in ("fill", "mean", "std"))]))


def test_missing_values_of_tensors_of_any_shape_are_replaced():
    features = torch.arange(240, dtype=torch.float64).reshape(40, 2, 3)
    features[3, 1, 2] = float("nan")
    tests = {"test_features": features[:5], "test_targets": torch.zeros(5).long()}
    data = TensorData(features, torch.arange(40) % 2, impute="mean", num_clients=2, batch_size=4, **tests)
    data.setup("fit")
    filled = features[:, 1, 2].nanmean().float()
    assert data.samples.inputs[3, 1, 2] == data.samples.inputs[40 + 3, 1, 2] == filled
    assert bool(data.samples.inputs.isfinite().all())
    features[:, 0, 0] = float("nan")
    data = TensorData(features, torch.arange(40) % 2, impute="mean", num_clients=2, batch_size=4)
    with pytest.raises(
        ConfigurationError, match=r"data.impute: mean of feature 0 is not defined, because each"
    ):
        data.setup("fit")


def test_a_category_of_the_test_samples_alone_is_always_zero():
    table = patients().fillna({"age": 60, "dose": 1, "stage": "I"})
    table["stage"] = table["stage"].replace("IV", "I")
    table["age"] = np.arange(len(table))
    for held_out in (True, False):
        write(table, "comma", path := Path("table.csv"))
        data = made(path, standardize=False)
        sample = int((data.distribution.test if held_out else data.distribution.clients[0])[0])
        changed = table.assign(
            stage=table["stage"].where(table["age"] != int(data.samples.inputs[sample, 0]), "IV")
        )
        write(changed, "comma", path)
        preprocessing = made(path, standardize=False).preprocessing
        assert preprocessing.categories["stage"] == ["I", "II", "III", None if held_out else "IV"]
        assert transformed(preprocessing, changed, path)[:, 5].sum() == (0 if held_out else 1)


def test_a_run_names_classes_categories_and_missing_values():
    write(patients(), "comma", path := Path("table.csv"))
    hint, *notes = made(path).notes
    assert hint.startswith("stage: 1 of 4 labels have one sample, such as the category 'IV'; correct a")
    age, dose = (
        f"numbers {x.min():.4g} to {x.max():.4g}, 15 missing" for x in (patients().age, patients().dose)
    )
    assert notes == [
        "classes of outcome: no, yes",
        f"features: age: {age}; dose: {dose}; stage: 4 categories, 15 missing; grade: 3 categories",
        "missing values, replaced by median of the training samples: age: 15, dose: 15 of 120 samples",
        "missing values, replaced by the most frequent category of the training samples: stage: 15 of 120 samples",
    ]


def test_a_category_is_known_in_a_file_of_one_sample_although_its_word_may_stand_for_a_gap():
    table = patients()
    table["stage"] = table["stage"].replace("II", "none")
    write(table, "comma", path := Path("table.csv"))
    preprocessing = made(path, impute="mean").preprocessing
    number = preprocessing.categories["stage"].index("none")
    (inputs,) = transformed(preprocessing, table[table.stage == "none"].head(1), path).tolist()
    assert inputs[2 : 2 + len(preprocessing.categories["stage"])].index(1) == number


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("age;dose\n57,5;900\n60,1;8.700\n", r"^data.features: line 3 of table.csv has 8.700 beside decimal commas, which may be .* thousands"),
        ("age;dose\n57,5;1,5\n;\n60,1;2\n", r"line 3 of table.csv has no value; leave it out"),
    ],
)  # fmt: skip
def test_values_that_may_be_read_in_two_ways_are_refused(text, words):
    Path("table.csv").write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        read_frame(Path("table.csv"))


def test_points_are_decimal_points_where_no_number_has_a_decimal_comma():
    Path("table.csv").write_text("age;dose\n57;900\n60;8.700\n")
    assert read_frame(Path("table.csv")).dose.to_list() == ["900", "8.700"]


def test_a_place_is_the_first_line_of_a_record():
    Path("table.csv").write_text('age,note\n57,"two\nlines"\n60,one\n')
    assert read_frame(Path("table.csv")).index.to_list() == [2, 4]


def test_none_is_a_word_in_a_column_of_words():
    categories = {"pain": ["mild", "severe"], "grade": ["1", "2"]}
    preprocessing = Preprocessing(["pain", "grade"], categories, "median", fill=[1.0, 0.0])
    table = pd.DataFrame({"pain": ["none", "NA", "mild"], "grade": ["none", "3", "2"]})
    raw = torch.from_numpy(raw_features(preprocessing, table, Path("new.csv")))
    assert raw[:, 0].nan_to_num(-9).tolist() == [-1, -9, 0]
    assert raw[:, 1].nan_to_num(-9).tolist() == [-9, -1, 1]
    assert preprocessing.describe(raw) == [
        "missing values, replaced by the most frequent category of the training samples: pain: 1, grade: 1 of 3 samples",
        "values that are no category of the training samples: pain: 1, grade: 1 of 3 samples",
    ]


def test_of_hundreds_of_features_twenty_are_listed():
    features = torch.arange(500.0).reshape(2, 250)
    (note,) = Preprocessing([f"g{i}" for i in range(250)]).listed(features)
    assert note.startswith("features: g0: numbers 0 to 250; g1: numbers 1 to 251;")
    assert note.endswith("; g19: numbers 19 to 269; and 230 more")
    assert Preprocessing().listed(features) == Preprocessing().listed(features[0]) == []


def test_features_are_listed_with_large_and_small_numbers_and_categories_of_training_samples():
    preprocessing = Preprocessing(["time", "x", "stage"], {"stage": ["I", None, "II"]})
    rows = [[1_700_000_000, 0.123456, 0], [1_700_000_790, float("nan"), 1]]
    features = torch.tensor(rows, dtype=torch.float64)
    assert preprocessing.listed(features) == [
        "features: time: numbers 1700000000 to 1700000790; x: numbers 0.1235 to 0.1235, 1 missing; stage: 2 categories"
    ]
