"""Values of a table: each is read as what it is, or refused with its line."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from pyarrow import parquet

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import TensorData
from fl_lightning.datamodules.tables import read_frame


def write(path, header, rows, separator=","):
    lines = [separator.join(map(str, row)) for row in (header, *rows)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def made(path="table.csv", targets="outcome", **settings):
    data = TensorData(path, targets, num_clients=2, batch_size=4, **settings)
    data.setup("fit")
    return data


def labels(number):
    return ["yes", "no"][number % 2]


# exact numbers


@pytest.mark.parametrize(
    "column",
    [
        [1_700_000_000 + 10 * i for i in range(80)],
        [20_000_000.5 + i for i in range(80)],
        [1 + 1e-9 * i for i in range(80)],
    ],
)
@pytest.mark.parametrize("ending", ["csv", "parquet", "npz"])
def test_numbers_keep_64_bits_until_they_are_scaled(column, ending, tmp_path):
    path = tmp_path / f"table.{ending}"
    if ending == "csv":
        write(path, ["t", "outcome"], [(t, labels(i)) for i, t in enumerate(column)])
    elif ending == "parquet":
        pd.DataFrame({"t": column, "outcome": [*map(labels, range(80))]}).to_parquet(path)
    else:
        np.savez(path, features=np.array(column, float)[:, None], targets=np.arange(80) % 2)
    data = made(path, None if ending == "npz" else "outcome", standardize=True)
    trained = torch.cat(data.distribution.clients)
    raw = torch.cat([data._split()["features"], data._split()["test_features"]]).numpy()
    train = raw[trained.numpy()]
    expected = ((raw - train.mean(0)) / train.std(0)).astype(np.float32)
    inputs = data.samples.inputs
    assert inputs.dtype == torch.float32
    assert len(inputs.unique()) == 80
    torch.testing.assert_close(inputs, torch.from_numpy(expected), rtol=2e-7, atol=0)


def test_a_missing_number_is_filled_and_scaled_in_64_bits():
    times = [1_700_000_000 + 10 * i for i in range(80)]
    rows = [("" if i == 3 else t, i, labels(i)) for i, t in enumerate(times)]
    write("table.csv", ["t", "x", "outcome"], rows)
    data = made(impute="mean", standardize=True)
    filled = data.preprocessing.inputs(torch.tensor([[float("nan"), 0]], dtype=torch.float64))
    assert abs(float(filled[0, 0])) < 1e-6  # the mean of the training samples is 0


def test_what_replaces_a_gap_is_not_rounded_before_it_is_scaled():
    features = np.linspace(1e6, 1e6 + 1, 60).astype(np.float32)[:, None]
    features[::7] = np.nan
    tests = {"test_features": features[:4], "test_targets": np.zeros(4, int)}
    settings = {"num_clients": 2, "batch_size": 4, "impute": "mean", "standardize": True}
    data = TensorData(features, np.arange(60) % 2, **settings, **tests)
    data.setup("fit")
    exact = features.astype(np.float64)
    exact[::7] = np.nanmean(exact)
    assert data.preprocessing.mean[0] == pytest.approx(exact.mean(), rel=1e-14)


# categories


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["32570681000036106", "32570681000036107", "32570681000036199"], 3),
        (["0.12345678901234567890", "0.12345678901234567891", "0.123456789012345678900"], 2),
        (["1" + "0" * 40, "1" + "0" * 39 + "1", "1e40"], 2),
        (["1", "1.0", "1e0", "+1", "2"], 2),
        (["100", "1E+2", "1e2", "-0", "0"], 2),
        (["1e999999999", "2", "1e99999999999"], 3),
    ],
)
def test_categories_are_equal_as_exact_decimals(words, names):
    write("table.csv", ["code", "outcome"], [(words[i % len(words)], labels(i)) for i in range(60)])
    assert len(made(categorical=["code"]).preprocessing.categories["code"]) == names


def test_codes_of_a_parquet_file_with_a_gap_stay_distinct():
    codes = [None if i == 7 else 32570681000036100 + [6, 7, 99][i % 3] for i in range(60)]
    table = pyarrow.table({"code": codes, "outcome": [*map(labels, range(60))]})
    parquet.write_table(table, "table.parquet")  # pandas would record that it has integers
    data = made("table.parquet", categorical=["code"], impute="median")
    names = [f"32570681000036{x}" for x in (106, 107, 199)]
    assert data.preprocessing.categories["code"] == names


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["02139", "10001", "94105"], ["02139", "10001", "94105"]),
        (["01", "1", "2"], ["01", "1", "2"]),
        (["02139", "02139-1234", "10001"], ["02139", "02139-1234", "10001"]),
    ],
)
def test_leading_zeros_make_a_column_text(words, names):
    write("table.csv", ["zip", "outcome"], [(words[i % 3], labels(i)) for i in range(60)])
    data = made()
    assert data.preprocessing.categories == {"zip": names}
    assert data.in_features == 3
    assert data.samples.inputs.dtype == torch.float32
    write("table.csv", ["zip", "outcome"], [(f"{i:03}", labels(i)) for i in range(60)])
    with pytest.raises(ConfigurationError, match="zip has another word in each of 60 samples, as a name"):
        made()


def test_zero_and_decimal_fractions_are_no_leading_zeros():
    write(
        "table.csv", ["x", "outcome"], [(["0", "0.5", "-0.25", "00.5"][i % 4], labels(i)) for i in range(60)]
    )
    assert made().preprocessing.categories == {}


@pytest.mark.parametrize(
    ("column", "names"),
    [
        (["02139", "10001", "94105"], ["02139", "10001", "94105"]),
        (["10001", "60601", "94105"], ["10001", "60601", "94105"]),
        (["123", "A12", "7"], ["123", "7", "A12"]),
        (pd.Categorical(["1", "2", "3"]), ["1", "2", "3"]),
        (pd.Categorical([1.5, 2, 3]), ["1.5", "2", "3"]),
        (pd.Categorical([3, 1, 2]), ["1", "2", "3"]),
        ([True, False, True], ["False", "True"]),
        ([1, 2, 3], None),
        ([1.5, 2.5, 3.5], None),
    ],
)
def test_types_of_a_parquet_file_decide(column, names):
    outcome = [*map(labels, range(60))]
    one = pd.Series(column)
    column = pd.concat([one] * 20, ignore_index=True)
    pd.DataFrame({"x": column, "outcome": outcome}).to_parquet("table.parquet")
    assert made("table.parquet").preprocessing.categories.get("x") == names


def test_categories_of_a_parquet_file_without_pandas_need_no_record():
    code = pyarrow.array(["1.5", "2", "A"] * 20).dictionary_encode()
    table = pyarrow.table({"code": code, "outcome": [*map(labels, range(60))]})
    parquet.write_table(table, "table.parquet")
    assert made("table.parquet").preprocessing.categories == {"code": ["1.5", "2", "A"]}


def test_dates_in_text_of_a_parquet_file_are_no_words():
    dates = [f"{1 + i % 9}/2/2024" for i in range(60)]
    pd.DataFrame({"day": dates, "outcome": [*map(labels, range(60))]}).to_parquet("table.parquet")
    with pytest.raises(ConfigurationError, match=r"day is no column of numbers, row 1 of .* has '1/2/2024'"):
        made("table.parquet")


def test_a_misspelt_number_in_text_of_a_parquet_file_is_refused():
    column = ["12.5 mg" if i == 7 else str(i / 4) for i in range(60)]
    pd.DataFrame({"x": column, "outcome": [*map(labels, range(60))]}).to_parquet("table.parquet")
    with pytest.raises(ConfigurationError, match=r"x is no column of numbers, row 8 of .* has '12.5 mg'"):
        made("table.parquet")


def test_a_missing_category_is_said_to_become_the_most_frequent():
    rows = [(i / 7, ["NA", "EU", "AS"][i % 3], labels(i)) for i in range(60)]
    write("table.csv", ["x", "continent", "outcome"], rows)
    with pytest.raises(
        ConfigurationError, match=r"no value for continent; set data.impute, .* to most_frequent,"
    ):
        made()
    (said,) = [note for note in made(impute="median").notes if note.startswith("missing")]
    assert said.startswith(
        "missing values, replaced by the most frequent category of the training samples: con"
    )


# class names and targets


@pytest.mark.parametrize("names", [["01", "1", "x1"], ["01", "02", "10"], ["1.0", "1.00", "a"]])
def test_names_of_classes_keep_their_text(names):
    write("table.csv", ["x", "outcome"], [(i / 7, names[i % 3]) for i in range(60)])
    if "." in names[0]:
        with pytest.raises(ConfigurationError, match=r"line 4 of .* has 'a' for outcome beside numbers"):
            made()
        return
    assert made().class_names == sorted(names)


@pytest.mark.parametrize("kind", ["text", "category"])
def test_targets_typed_as_text_are_names(kind):
    outcome = pd.Series([["10", "2"][i % 2] for i in range(60)]).astype(
        "category" if kind == "category" else str
    )
    pd.DataFrame({"x": np.arange(60) / 7, "outcome": outcome}).to_parquet("table.parquet")
    assert made("table.parquet").class_names == ["10", "2"]


@pytest.mark.parametrize(
    ("targets", "row", "words"),
    [
        (["dose", "weight"], "12.5 mg,70", r"line 9 of table.csv has '12.5 mg' for dose beside numbers"),
        (["dose", "weight"], "12.5,7O", r"line 9 of table.csv has '7O' for weight beside numbers"),
        ("dose", "1/2,70", r"line 9 of table.csv has '1/2' for dose beside numbers"),
        ("dose", "1e39,70", r"line 9 of table.csv has 1e39 for dose, which is not finite in float32"),
        (["dose", "weight"], "1.5,inf", r"line 9 of table.csv has inf for weight, which is not finite in float32"),
    ],
)  # fmt: skip
def test_a_word_among_the_numbers_of_a_target_is_refused(targets, row, words):
    rows = [(i, row if i == 7 else f"{i / 4},{60 + i}") for i in range(60)]
    write("table.csv", ["x", "dose", "weight"], rows)
    with pytest.raises(ConfigurationError, match=rf"^data.targets: {words}"):
        made(targets=targets, columns=["x"])


def test_each_of_several_targets_keeps_its_names():
    rows = [(i, ["low", "high"][i % 2], i / 4) for i in range(60)]
    write("table.csv", ["x", "risk", "dose"], rows)
    data = made(targets=["risk", "dose"])
    assert data.targets == {"risk": ["high", "low"], "dose": None}
    assert "classes of risk: high, low" in data.notes
    assert data.class_names is None


# values that are not finite


@pytest.mark.parametrize("word", ["1e39", "-1e39", "1e400", "inf"])
@pytest.mark.parametrize("standardize", [False, True])
def test_a_number_that_is_infinite_in_float32_is_refused_with_its_line(word, standardize):
    write(
        "table.csv",
        ["age", "dose", "outcome"],
        [(i, word if i == 7 else i / 3, labels(i)) for i in range(60)],
    )
    told = rf"^data.columns: line 9 of table.csv has {word} for dose, which is not finite in float32; "
    with pytest.raises(ConfigurationError, match=told):
        made(standardize=standardize)


def test_a_value_of_an_array_that_is_not_finite_is_named_by_its_index():
    features = np.zeros((9, 3))
    features[4, 2] = 1e39
    with pytest.raises(
        ConfigurationError, match=r"data.features: the value 1e\+39 at \[4, 2\] is not finite in"
    ):
        TensorData(features, np.zeros(9, int))
    with pytest.raises(ConfigurationError, match=r"data.targets: the value inf at \[1\] is not finite in"):
        TensorData(np.zeros((2, 1)), [0.5, np.inf])


# quotes and decimal marks


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('age,note\n1,ok\n2,"ok\n3,ok\n4,ok\n', 3),
        ('age,note\n1,ok\n2,"ok\n3,ok\n4,"fine"\n', 3),
        ('age,note\n1,"two\nlines"\n2,"ok"\n3,"never\n', 5),
        ('age,"note\n1,ok\n2,ok\n', 1),
        ('age,note\n1,ok\n2,"5" pipe"\n', 3),
    ],
)
def test_a_quote_that_does_not_close_is_refused_with_the_line_of_its_record(text, line):
    Path("table.csv").write_text(text)
    told = (
        rf"table.csv cannot be read as a table \(a quote in line {line} does not close.*\); close each quote"
    )
    with pytest.raises(ConfigurationError, match=told):
        read_frame(Path("table.csv"))


def test_blanks_around_quotes_are_removed():
    Path("table.csv").write_text('note ; cost\n "a; ""b""" ; "1,5" \n"c" ;2\n')
    table = read_frame(Path("table.csv"))
    assert table.note.to_list() == ['a; "b"', "c"]
    assert table.cost.to_list() == ["1.5", "2"]


@pytest.mark.parametrize("words", [["1,5e3", "2,5E-03", "3,25"], [",5", "-,25", "+1,5e+0"]])
def test_decimal_commas_may_have_exponents_and_no_digit_before(words):
    write("table.csv", ["x", "outcome"], [(words[i % 3], labels(i)) for i in range(60)], ";")
    data = made()
    assert data.preprocessing.categories == {}
    expected = [float(word.replace(",", ".")) for word in words]
    assert data._data["features"][:3, 0].tolist() == expected


@pytest.mark.parametrize("words", [["5%", "7.5 %"], ["\u22121.5", "\u22122"]])
def test_percent_and_typographic_minus_make_no_categories(words):
    write("table.csv", ["x", "outcome"], [(words[i % 2], labels(i)) for i in range(60)])
    with pytest.raises(
        ConfigurationError, match=rf"x is no column of numbers, line 2 of .* has '{words[0]}'"
    ):
        made()


def test_quotes_inside_an_unquoted_value_are_letters():
    Path("table.csv").write_text('age,note\n1,5" pipe\n2,"two ""marks"""\n')
    assert read_frame(Path("table.csv")).note.to_list() == ['5" pipe', 'two "marks"']


@pytest.mark.parametrize(
    ("trained", "text", "refused"),
    [
        (",", "cost;age\n1.250;44\n980;51\n", "1.250"),
        (",", "cost\tage\n1.250\t44\n", "1.250"),
        (",", "cost;age\n1.250.000;44\n", "1.250.000"),
        (",", "cost;age\n0.250;44\n1.5;3\n", None),
        (",", "cost,age\n1.250,44\n", None),
        (".", "cost;age\n1,250;44\n", "1,250"),
        (".", "cost;age\n1,5;44\n", None),
        (None, "cost;age\n1.250;44\n", None),
        (None, "cost;age\n1,250;44\n", None),
    ],
)
def test_the_decimal_mark_of_training_holds_for_new_files(trained, text, refused):
    Path("new.csv").write_text(text)
    if refused is None:
        assert float(read_frame(Path("new.csv"), trained).cost.iloc[0]) in (0.25, 1.25, 1.5)
        return
    with pytest.raises(ConfigurationError, match=rf"line 2 of new.csv has {refused} .*thousands"):
        read_frame(Path("new.csv"), trained)


@pytest.mark.parametrize(
    ("separator", "cost", "mark"), [(";", "1250,5", ","), (";", "1250.5", "."), (",", "1250", "."), (";", "1250", None)]
)  # fmt: skip
def test_a_run_keeps_the_decimal_mark_of_its_table(separator, cost, mark):
    write("table.csv", ["cost", "outcome"], [(cost, labels(i)) for i in range(60)], separator)
    assert vars(made().preprocessing)["decimal"] == mark


# new features of any type


def test_test_features_of_another_type_are_not_cut():
    tests = {"test_features": np.full((4, 2), 0.5), "test_targets": np.zeros(4, int)}
    data = TensorData(np.ones((60, 2), int), np.arange(60) % 2, num_clients=2, batch_size=4, **tests)
    data.setup("fit")
    assert data.samples.inputs[-1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("kind", ["int64", "uint8", "float16", "float64", "bool", "uint16"])
@pytest.mark.parametrize("trained", ["float32", "int64", "float64", "uint8"])
def test_inputs_have_the_type_of_the_training_features(trained, kind):
    features = np.random.default_rng(0).integers(0, 2, (60, 4))
    data = TensorData(features.astype(trained), np.arange(60) % 2, num_clients=2, batch_size=4)
    data.setup("fit")
    new = data.preprocessing.inputs(torch.from_numpy(features.astype(kind)))
    assert new.dtype == data.samples.inputs.dtype
    assert new.tolist() == features.tolist()
