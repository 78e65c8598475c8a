"""New files are read as the training file was: types, names, decimal marks, and values that are not finite."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from fl_lightning import ConfigurationError, load_model
from fl_lightning.__main__ import main as command
from fl_lightning.datamodules import TensorData
from tests.support.command_line import message_of
from tests.support.trained_models import accuracy_on, fit, outputs_on_test_data, predicted, probabilities


def write(path, header, rows, separator=","):
    lines = [separator.join(map(str, row)) for row in (header, *rows)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def trained(path, standardize=True, **settings):
    """Train on the table ``path`` with the columns ``site`` and ``outcome``."""
    columns = {"targets": "outcome", "groups": "site", "batch_size": 8}
    return fit(features=path, standardize=standardize, **columns, **settings)


def reader(path, targets=None, **settings):
    """Return a function that reads a new file as a model that is trained on ``path`` would."""
    data = TensorData(path, targets, num_clients=2, batch_size=4, **settings)
    data.setup("fit")
    known = SimpleNamespace(**data.facts())
    return lambda new, labelled=True: TensorData.new_samples(Path(new), known, labelled)


DRAWS = np.random.default_rng(0).normal(size=90).round(3)


def test_a_new_file_keeps_the_names_of_classes(capsys):
    write(
        "table.csv",
        ["x", "site", "outcome"],
        [(x, "ab"[i % 2], ["01", "1", "x1"][i % 3]) for i, x in enumerate(DRAWS)],
    )
    write("new.csv", ["x", "outcome"], [(x, "01") for x in DRAWS[:30]])
    _, run = trained("table.csv", standardize=False)
    rows = predicted(capsys, run, "new.csv")
    assert rows[0][2:] == ["probability_01", "probability_1", "probability_x1"]
    share = np.mean([row[1] == "01" for row in rows[1:]])
    assert accuracy_on(capsys, run, "new.csv") == pytest.approx(share)


@pytest.mark.parametrize(
    ("trained", "new", "numbers"),
    [
        (["01", "1", "x1"], ["x1", "1", "01"], [2, 1, 0]),
        (["01", "1", "x1"], ["1"], [1]),
        (["01", "02", "03"], ["03"], [2]),
        (["0", "1", "2"], ["2", "2"], [2, 2]),
        (["0", "1", "2"], ["02"], "the target 02 is no class of the run; its classes are 0, 1, 2"),
        (["01", "02", "03"], ["1"], "line 2 of new.csv: the target 1 is no class of the run"),
        (["no", "yes", "ill"], ["yes", "Yes"], "line 3 of new.csv: the target Yes is no class of the run"),
        (["no", "yes", "ill"], ["yes", "NA"], "line 3 of new.csv has NA for outcome"),
    ],
)
def test_labels_of_a_new_file_are_numbered_as_in_training(trained, new, numbers):
    write("table.csv", ["x", "outcome"], [(x, trained[i % 3]) for i, x in enumerate(DRAWS)])
    write("new.csv", ["x", "outcome"], [(1, word) for word in new])
    read = reader("table.csv", "outcome")
    if isinstance(numbers, list):
        assert read("new.csv").targets.tolist() == numbers
        return
    with pytest.raises(ConfigurationError, match=numbers):
        read("new.csv")


def test_each_of_several_targets_is_numbered_as_in_training():
    rows = [(x, ["low", "mid", "high"][i % 3], i / 4, i % 2) for i, x in enumerate(DRAWS)]
    write("table.csv", ["x", "risk", "dose", "dead"], rows)
    read = reader("table.csv", ["risk", "dose", "dead"], columns=["x"])
    write("new.csv", ["dead", "dose", "x", "risk"], [(1, 3, 0.5, "mid"), (0, 2.5, 0.5, "low")])
    assert read("new.csv").targets.tolist() == [[2, 3, 1], [1, 2.5, 0]]
    assert read("new.csv").targets.dtype == torch.float32
    write("new.csv", ["dead", "dose", "x", "risk"], [(1, 3, 0.5, "late")])
    with pytest.raises(
        ConfigurationError, match="target late is no class of the run; its classes are high, low, mid"
    ):
        read("new.csv")


@pytest.mark.parametrize("targets", ["dose", ["dose", "age"]])
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("3.0x", r"line 3 of new.csv has '3.0x' for dose; write a number"),
        ("3_0", r"line 3 of new.csv has '3_0' for dose; write a number"),
        ("", r"line 3 of new.csv has no dose; fill in"),
        ("1e39", r"line 3 of new.csv has 1e39 for dose, which is not finite in float32"),
    ],
)
def test_a_word_in_a_numeric_target_of_a_new_file_is_refused(targets, word, told):
    write("table.csv", ["x", "dose", "age"], [(x, i / 4, i) for i, x in enumerate(DRAWS)])
    read = reader("table.csv", targets, columns=["x"])
    write("new.csv", ["x", "dose", "age"], [(1, 2, 3), (1, word, 3)])
    with pytest.raises(ConfigurationError, match=told):
        read("new.csv")
    write("new.csv", ["x", "dose", "age"], [(1, 2, 3)])  # integers in this file, numbers in the run
    assert read("new.csv").targets.dtype == torch.float32


KINDS = ["int64", "uint8", "float16", "float64", "bool"]


@pytest.mark.slow
@pytest.mark.parametrize("standardize", [True, False])
def test_new_features_of_any_type_are_used_as_the_training_features(standardize, capsys):
    small = np.random.default_rng(0).integers(0, 9, (90, 4))
    np.savez("train.npz", features=small.astype("float32"), targets=(small[:, 0] > 4).astype(int))
    _, run = fit(features="train.npz", standardize=standardize, num_clients=2, batch_size=8)
    new = small[:6] % 2
    model, found = load_model(run), []
    for kind in ["float32", *KINDS]:
        np.savez(f"{kind}.npz", features=new.astype(kind), targets=(new[:, 0] > 0).astype(int))
        with torch.no_grad():
            found.append(model(torch.from_numpy(new.astype(kind))).softmax(1))
        assert torch.equal(probabilities(predicted(capsys, run, f"{kind}.npz")), found[-1])
        accuracy_on(capsys, run, f"{kind}.npz")
    assert all(torch.equal(scores, found[0]) for scores in found)


SHAPE = "new.npz: samples have the shape {}, but [2] in the run"
CLASS = "features.npz: the target {} is no class of the run; its classes are 0 to 1"


@pytest.mark.parametrize(
    ("trained", "new", "told"),
    [
        ("uint8", [[1, 300]], "new.npz: features: the value 300 at [0, 1] is no value of uint8"),
        ("int64", [[1, 2], [1.5, 2]], "new.npz: features: the value 1.5 at [1, 0] is no value of int64"),
        ("bool", [[1, 2]], "the value 2 at [0, 1] is no value of bool"),
        ("float16", [[1, 70000.0]], "the value 70000.0 at [0, 1] is not finite in float16"),
        ("float32", [[1, 1e39]], "the value 1e+39 at [0, 1] is not finite in float32"),
        *[("float64", np.zeros((5, *shape)), SHAPE.format([*shape])) for shape in ((3,), (1,), (), (2, 1))],
        ("float64", "table", "new.csv is a table, but the run's data are arrays; give .npz"),
    ],
)
def test_new_features_that_the_run_cannot_have_are_refused(trained, new, told):
    np.savez("train.npz", features=np.arange(80).reshape(40, 2).astype(trained), targets=np.arange(40) % 2)
    np.savez("new.npz", features=np.array(new))
    write("new.csv", ["a", "b"], [(1, 2)])
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        reader("train.npz")("new.csv" if isinstance(new, str) else "new.npz", labelled=False)


@pytest.mark.parametrize(
    ("trained", "new", "told"),
    [
        # the name of the file does not make its targets features
        *[(np.arange(40) % 2, np.array([0.0, label]), CLASS.format(label)) for label in (2, -1)],
        # a loss of targets [N, 1] and outputs [N] would compare each sample with all others
        *[
            (np.arange(40) / 7, np.zeros(shape), f"targets have the shape {[*shape]}, but [3]")
            for shape in ((3, 1), (2,), (3, 2))
        ],
    ],
)
def test_new_targets_that_the_run_cannot_have_are_refused(trained, new, told):
    np.savez("train.npz", features=np.zeros((40, 2)), targets=trained)
    np.savez("features.npz", features=np.zeros((2 if trained.dtype == int else 3, 2)), targets=new)
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        reader("train.npz")("features.npz")


def test_large_numbers_are_predicted_as_inside_the_run_bit_for_bit(capsys):
    rows = [(1_700_000_000 + 10 * i, x, "ab"[i % 2], "yes" if i >= 45 else "no") for i, x in enumerate(DRAWS)]
    write("table.csv", ["t", "x", "site", "outcome"], rows)
    cli, run = trained("table.csv")
    raw = cli.datamodule._split()["test_features"]
    write("new.csv", ["t", "x"], raw.tolist())
    scores = outputs_on_test_data(cli)
    assert torch.equal(probabilities(predicted(capsys, run, "new.csv")), scores.softmax(1))
    with torch.no_grad():
        assert torch.equal(load_model(run)(raw), scores)


def test_a_number_that_is_not_finite_is_named_in_predict(capsys):
    rows = [(x, abs(x), "ab"[i % 2], "yes" if x > 0 else "no") for i, x in enumerate(DRAWS)]
    write("table.csv", ["x", "dose", "site", "outcome"], rows)
    _, run = trained("table.csv")
    write("new.csv", ["x", "dose"], [(1, 1), (1, "1e39")])
    message = message_of(capsys, lambda: command(["predict", run, "new.csv"]))
    assert "line 3 of new.csv has 1e39 for dose, which is not finite in float32" in message
    write("new.csv", ["x", "dose"], [(1, 1), (1, "3e38")])  # finite, but not after scaling
    message = message_of(capsys, lambda: command(["predict", run, "new.csv"]))
    assert "the model's scores for line 3 are not finite; correct its values" in message
    assert not [*Path(run).glob("predictions_new*")]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_the_decimal_mark_of_the_training_table_holds_for_a_new_file(separator):
    rows = [(str(200.5 + i).replace(".", ","), i % 7, ["no", "yes"][i % 2]) for i in range(60)]
    write("table.csv", ["cost", "age", "outcome"], rows, ";")
    write("new.csv", ["cost", "age"], [("1.250", 44), ("980", 51)], separator)
    with pytest.raises(
        ConfigurationError, match=r"^data.features: line 2 of new.csv has 1.250 beside decimal commas"
    ):
        reader("table.csv", "outcome")("new.csv", labelled=False)


def test_a_postal_code_of_a_parquet_file_is_the_category_of_a_csv():
    codes = ["02139", "10001", "94105"]
    table = pd.DataFrame(
        {"zip": [codes[i % 3] for i in range(60)], "outcome": [["no", "yes"][i % 2] for i in range(60)]}
    )
    table.to_parquet("table.parquet")
    read = reader("table.parquet", "outcome")
    write("new.csv", ["zip"], [["94105"], ["02139"], ["2139"]])
    samples = read("new.csv", labelled=False)
    assert samples.inputs(slice(None)).flatten().tolist() == [2, 0, -1]
    assert samples.notes == ["values that are no category of the training samples: zip: 1 of 3 samples"]
