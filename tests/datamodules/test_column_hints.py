"""Hints about columns: what a careful person would look at, and ordinary tables that need no look."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn import datasets

from fl_lightning.__main__ import main
from fl_lightning.datamodules import TensorData
from fl_lightning.datamodules.column_hints import feature_hints, label_hint, subject_hint
from tests.support.command_line import write_config

ROWS = np.arange(80)
DRAW = np.random.default_rng(0)
OUTCOME = np.array(["no", "yes"])[ROWS % 2]


def notes(outcome=OUTCOME, ending="csv", settings=None, **columns):
    """The notes of a table before its features are listed, without the names of its classes."""
    table = pd.DataFrame({**columns, "outcome": outcome})
    table.to_csv("table.csv", index=False) if ending == "csv" else table.to_parquet("table.parquet")
    data = TensorData(f"table.{ending}", "outcome", num_clients=2, batch_size=4, **(settings or {}))
    return [note for note in data.notes if not note.startswith("classes of")]


# numbers


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("patient_id", 1000 + ROWS),
        ("row", ROWS),
        ("row", 500 - ROWS),
        ("t", 1_700_000_000 + 10 * ROWS),
        ("number", DRAW.permutation(ROWS) + 100),
        ("number", DRAW.permutation(900_000)[:80] + 100_000),
        ("MRN", DRAW.permutation(5000)[:80]),
    ],
)
def test_integers_that_all_differ_as_ids_do_are_to_be_left_out(name, column):
    (hint,) = notes(x=ROWS / 7 % 3, **{name: column})
    assert hint == (
        f"{name} differs in each of 80 samples, as row numbers, ids and times do; leave it out by "
        f"data.columns: {{except: [{name}]}}"
    )
    assert notes(x=ROWS / 7 % 3, settings={"columns": {"except": [name]}}, **{name: column}) == []


@pytest.mark.parametrize(
    "column",
    [
        ROWS + 0.5,
        [5, *ROWS[1:]],
        DRAW.permutation(5000)[:80],
        DRAW.permutation(90_000)[:80] + 10_000,
    ],
)  # floats that count up, one value twice, and measurements such as calories or cells
def test_other_numbers_are_no_ids(column):
    assert notes(number=column) == []


def test_a_column_of_ids_with_a_gap_is_one_too():
    column = pd.Series(1000 + ROWS).astype("Int64").where(ROWS != 5)
    (hint,) = notes(case=column, settings={"impute": "mean"})
    assert hint.startswith("case differs in each of 79 samples")
    assert notes(ROWS[:9] % 2, case=1000 + ROWS[:9]) == []  # too few to say


@pytest.mark.parametrize(
    ("word", "others"),
    [
        ("-999", 40 + ROWS % 30),
        ("-999.0", 1.5 + ROWS % 30),
        ("9999", 20 + ROWS % 70),
        ("99", 1 + ROWS % 7),
        ("-99", ROWS % 50),
        ("100000", ROWS % 30),
    ],
)
def test_one_repeated_extreme_value_may_be_a_missing_value(word, others):
    column = [word if i % 10 == 0 else str(x) for i, x in enumerate(others)]
    (hint,) = notes(age=column)
    low, high = (f"{x:g}" for x in (min(others[ROWS % 10 > 0]), max(others[ROWS % 10 > 0])))
    assert hint == (
        f"age is {word} in 8 of 80 samples, far from {low} to {high}; if it stands for a missing value, set "
        f'data.missing: ["{word}"] and data.impute'
    )
    assert notes(age=column, settings={"missing": [word], "impute": "median"}) == []


@pytest.mark.parametrize(
    "column",
    [
        np.where(ROWS % 40 == 0, -999, 40 + ROWS % 30),
        np.where(ROWS % 10 == 0, 100, 40 + ROWS % 30),
        np.where(ROWS % 10 == 0, -1, ROWS % 2 * 100),
        np.where(ROWS % 10 == 0, 99, 40 + ROWS % 50),
        np.where(ROWS % 2 == 0, 0, DRAW.lognormal(2, 1, 80)),
    ],
)  # twice alone, near the others, three values, a limit of the range, and many zeros
def test_other_extreme_values_are_no_missing_values(column):
    assert notes(age=column) == []


# words


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("unit", [" kg", "mg/ml", ",5 cm"])
def test_numbers_with_a_unit_are_not_meant_as_categories(unit, ending):
    column = [f"{60 + i % 12}{unit}" for i in ROWS]
    (hint,) = notes(mass=column, ending=ending)
    assert hint == (
        f"mass has numbers with a unit, such as {column[0]!r}, which are read as categories; write the numbers alone, or name "
        "mass in data.categorical"
    )
    assert notes(mass=column, ending=ending, settings={"categorical": ["mass"]}) == []


@pytest.mark.parametrize(
    "words", [["1st", "2nd", "3rd"], ["stage 1", "stage 2"], ["10 kg", "light"], ["1a", "1b"]]
)
def test_words_with_numbers_are_no_units(words):
    assert notes(mass=np.resize(words, 80)) == []


def test_leading_zeros_of_a_csv_are_categories_and_named():
    column = np.resize(["10001", "02139", "94105", "60601"], 80)
    (hint,) = notes(zip=column)
    assert hint == (
        "zip has numbers with leading zeros, such as 02139, which are read as categories; name zip in data.categorical, or "
        "write the numbers without zeros"
    )
    assert notes(zip=column, settings={"categorical": ["zip"]}) == []
    assert notes(zip=column, ending="parquet") == []  # its types say that they are text
    assert notes(zip=pd.Categorical(np.resize(["1 kg", "2 kg"], 80)), ending="parquet") == []


def test_a_category_with_one_sample_is_named_and_one_category_has_one_name():
    stage = np.resize(["I", "II", "III"], 80).astype(object)
    assert notes(stage=stage) == []
    stage[5] = "IIII"
    (hint,) = notes(stage=stage)
    assert hint == (
        "stage: 1 of 4 labels have one sample, such as the category 'IIII'; correct a misspelling, or leave stage out by "
        "data.columns: {except: [stage]}"
    )
    grade = np.resize(["1", "2", "x"], 80).astype(object)
    grade[0] = "1.0"  # the category 1
    assert notes(grade=grade, settings={"categorical": ["grade"]}) == []


@pytest.mark.parametrize("odd", ["Malignant", "malig nant", "MALIGNANT"])
@pytest.mark.parametrize("count", [1, 3])
def test_labels_that_differ_in_case_or_blanks_alone_are_named(odd, count):
    labels = np.resize(["benign", "malignant"], 80).astype(object)
    labels[1 : 2 * count : 2] = odd
    ends = f"(samples: {count}) looks like 'malignant' ({40 - count}); write one word if both are one "
    assert notes(labels, x=ROWS / 7) == [f"outcome: the class {odd!r} {ends}class"]
    assert notes(kind=labels) == [f"kind: the category {odd!r} {ends}category"]


@pytest.mark.parametrize("names", [["a", "b", "rare"], ["0", "1", "2"]])
def test_a_class_with_one_sample_is_named(names):
    labels = np.resize(names[:2], 80).astype(object)
    assert notes(labels, x=ROWS / 7) == []
    labels[7] = names[2]
    assert notes(labels, x=ROWS / 7) == [
        f"outcome: 1 of 3 labels have one sample, such as the class {names[2]!r}; correct a misspelling, or leave the sample out"
    ]


def test_few_samples_and_numeric_targets_give_no_hint_about_labels():
    assert label_hint("outcome", "class", {"a": 8, "b": 1}) == ""
    assert label_hint("outcome", "class", {"a": 9, "b": 1}) != ""
    assert notes(ROWS / 7, x=ROWS / 7 % 3) == []


# many columns, and where hints are shown


def test_of_many_hints_ten_are_shown():
    table = pd.DataFrame({f"c{i}": 1000 + ROWS for i in range(12)}).astype(str)
    hints = feature_hints(Path("table.csv"), table, table.to_numpy(float), {})
    assert len(hints) == 11
    assert hints[9].startswith("c9 differs")
    assert hints[10] == "and 2 more hints about other columns"
    assert len(feature_hints(Path("table.csv"), table.iloc[:, :10], table.to_numpy(float)[:, :10], {})) == 10


def test_subjects_have_a_name_and_several_rows():
    table = pd.DataFrame({"patient": np.repeat(ROWS, 2), "evidence": 1}).astype(str)
    assert subject_hint(table, ["evidence", "patient"]).startswith("160 rows, 80 values of patient: are rows")
    assert subject_hint(table, ["evidence"]) == subject_hint(table[::2], ["patient"]) == ""


def test_hints_are_printed_by_the_command_partition(capsys):
    pd.DataFrame({"patient_id": 1000 + ROWS, "x": ROWS / 7, "outcome": OUTCOME}).to_csv(
        "table.csv", index=False
    )
    settings = {"features": "table.csv", "targets": "outcome", "num_clients": 2, "batch_size": 4}
    write_config({"data": {"class_path": "TensorData", "init_args": settings}})
    main(["partition", "--config", "tiny.yaml"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("patient_id differs in each of 80 samples") for line in lines) == 1
    assert "features: patient_id: numbers 1000 to 1079; x: numbers 0 to 11.29" in lines


# ordinary tables


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "iris", "diabetes"])
def test_tables_of_scikit_learn_give_no_hint(name):
    frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
    assert notes(frame.pop("target"), **frame) == []


def test_patients_of_hospitals_give_no_hint():
    path = Path(__file__).parents[2] / "examples/hospitals/lung.csv"
    settings = {"groups": "institution", "impute": "median", "batch_size": 2}
    assert TensorData(path, "one_year", **settings).notes == ["classes of one_year: alive, dead"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [12, 60, 1000])
def test_ordinary_columns_give_no_hint(seed, rows):
    draw = np.random.default_rng(seed)
    columns = {
        "normal": draw.normal(size=rows),
        "rounded": draw.normal(60, 10, rows).round(1),
        "skewed": draw.lognormal(0, 2, rows),
        "heavy": draw.standard_t(2, rows),
        "flag": draw.integers(0, 2, rows),
        "rare": draw.random(rows) < 0.1,
        "age": draw.integers(18, 95, rows),
        "year": draw.integers(1990, 2025, rows),
        "calories": draw.integers(0, 250, rows) * 10,
        "cells": draw.integers(4000, 11_000, rows),
        "count": draw.poisson(3, rows),
        "expense": draw.exponential(1000, rows).round(2),
        "stage": np.resize(["I", "II", "III"], rows),
        "score": draw.integers(0, 11, rows),
        "constant": np.ones(rows),
    }
    columns["rare"] = columns["rare"].astype(int)
    assert notes(np.resize(["no", "yes"], rows), **columns) == []


def test_a_feature_without_a_value_at_a_client_is_named(tmp_path):
    site = np.repeat(["Bergen", "Bonn", "Lund"], [8, 6, 4])
    frame = pd.DataFrame({"age": np.arange(18) % 7 + 40.0, "lab": np.arange(18) % 5 + 1.0, "site": site})
    frame["stage"] = np.array(["I", "II"])[np.arange(18) % 2]
    frame["outcome"] = np.arange(18) % 2
    frame.loc[site == "Bonn", ["lab", "stage"]] = None
    frame.loc[site == "Lund", "lab"] = None  # too few samples for a hint
    frame.loc[0, "age"] = None
    data = TensorData(frame, "outcome", groups="site", impute="most_frequent")
    assert [note for note in data.notes if "no value" in note] == [
        f"{name} has no value at Bonn: leave it out by data.columns: {{except: [{name}]}}, or replace it there by values of others"
        for name in ("lab", "stage")
    ]
