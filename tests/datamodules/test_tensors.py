"""Data sets of tensors, arrays and tables."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.client_data.batches import describe_batch
from fl_lightning.client_data.preprocessing import Preprocessing
from fl_lightning.datamodules import (
    IID,
    Dirichlet,
    FromFile,
    HonestOnly,
    Natural,
    ScikitLearn,
    Shards,
    TensorData,
)
from fl_lightning.datamodules.tables import raw_features, read_table
from fl_lightning.experiments.run_directory.describe import clients_table
from tests.support.command_line import main, message_of
from tests.support.helpers import federated_run, train


def samples(count=60, classes=3):
    features = torch.arange(count * 4, dtype=torch.float32).reshape(count, 4)
    return features, torch.arange(count) % classes


def write_csv(path, rows=60):
    lines = ["age,dose,site,outcome"]
    lines += [f"{i},{i / 3},{'abc'[i % 3]},{'yes' if i % 2 else 'no'}" for i in range(rows)]
    path.write_text("\n".join(lines))


def test_each_sample_is_one_clients_or_the_servers():
    features, labels = samples()
    data = TensorData(features, labels, num_clients=4, batch_size=5, val_fraction=0.2)
    data.setup("fit")
    seen = [data.samples.inputs[client.indices] for client in data.clients]
    seen += [data.samples.inputs[part] for part in (data.distribution.val, data.distribution.test)]
    assert sorted(torch.cat(seen)[:, 0].tolist()) == features[:, 0].tolist()
    assert [len(data.distribution.val), len(data.distribution.test)] == [10, 12]
    assert (data.num_classes, data.in_features) == (3, 4)


@pytest.mark.parametrize("fraction", [-0.5, 0.0, 0.01, 1.0])
def test_a_test_fraction_that_leaves_no_samples_is_refused(fraction):
    with pytest.raises(ConfigurationError, match=rf"test_fraction={fraction} takes -?\d+ of 30 samples; use"):
        TensorData(*samples(30), test_fraction=fraction).setup("fit")


def test_partitions_separate_classes_and_quantiles_of_numbers():
    features, labels = samples(classes=4)
    data = TensorData(features, labels, partition=Shards(class_fraction=0.5), num_clients=2, batch_size=5)
    data.setup("fit")
    assert sorted(np.count_nonzero(row) for row in data.class_histograms()) == [2, 2]
    numbers = torch.linspace(0, 1, 60)
    data = TensorData(features, numbers, partition=Shards(class_fraction=0.1), num_clients=10, batch_size=2)
    data.setup("fit")
    spans = [data.samples.labels[client.indices] for client in data.clients]
    assert all(float(span.max() - span.min()) < 0.2 for span in spans)
    assert (data.num_classes, data.class_histograms()) == (None, [])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64])
def test_integers_of_several_dimensions_are_no_classes(dtype):
    targets = torch.randint(0, 2, (40, 3)).to(dtype)
    data = TensorData(torch.rand(40, 2), targets, num_clients=2, batch_size=4)
    data.setup("fit")
    assert (data.num_classes, data.class_histograms()) == (None, [])
    assert data.samples.labels.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(3,), (2, 5), (1, 4, 4)])
def test_features_of_any_type_and_shape_come_as_they_are(dtype, shape):
    features = torch.randint(0, 2, (40, *shape)).to(dtype)
    data = TensorData(features, torch.rand(40, 2), num_clients=2, batch_size=4)
    data.setup("fit")
    inputs, targets = data.cohort_batch([0, 1], [0, 3]).stack()
    assert inputs.shape == (2, 4, *shape)
    assert targets.shape == (2, 4, 2)
    assert inputs.dtype == (torch.float32 if dtype == torch.float64 else dtype)


def test_a_batch_of_the_cohort_is_that_of_each_client():
    data = TensorData(*samples(), num_clients=3, batch_size=5)
    data.setup("fit")
    inputs, labels = data.cohort_batch([2, 0], [1, 6]).stack()
    for row, (client, step) in enumerate([(2, 1), (0, 6)]):
        expected = data.clients[client].train_batch(step)
        assert torch.equal(inputs[row], expected[0])
        assert torch.equal(labels[row], expected[1])


def test_standardized_features_have_the_moments_of_the_training_samples():
    features, labels = samples()
    features[:, 3] = 7
    data = TensorData(features, labels, num_clients=3, batch_size=5, standardize=True)
    data.setup("fit")
    train = data.samples.inputs[torch.cat(data.distribution.clients)].double()
    assert torch.allclose(train.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(train[:, :3].std(0, correction=0), torch.ones(3, dtype=torch.float64), atol=1e-6)
    assert bool((data.samples.inputs[data.distribution.test, 3] == 0).all())


@pytest.mark.parametrize("ending", ["npz", "pt", "csv"])
def test_files_give_what_tensors_give(ending, tmp_path):
    path = tmp_path / f"table.{ending}"
    write_csv(tmp_path / "table.csv")
    features = np.array([[i, i / 3] for i in range(60)], dtype=np.float64)
    labels, sites = np.arange(60) % 2, np.array([*"abc"] * 20)
    if ending == "npz":
        np.savez(path, features=features, targets=labels, groups=sites)
        data = TensorData(str(path), batch_size=4)
    elif ending == "pt":
        groups = torch.from_numpy(np.arange(60) % 3)
        torch.save(
            {"features": torch.tensor(features), "targets": torch.tensor(labels), "groups": groups}, path
        )
        data = TensorData(path, batch_size=4)
    else:
        data = TensorData(path, "outcome", groups="site", batch_size=4)
    given = TensorData(features, labels, groups=sites, batch_size=4)
    for one in (data, given):
        one.setup("fit")
    assert type(data.partition) is Natural
    assert data.num_clients == 3
    assert data.fingerprint() == given.fingerprint()
    if ending != "pt":
        assert data.partition_record()["clients"] == ["a", "b", "c"]


def test_groups_with_test_samples_evaluate_on_their_own():
    features, labels = samples()
    groups = torch.arange(60) % 3
    data = TensorData(
        features,
        labels,
        groups=groups,
        test_features=features,
        test_targets=labels,
        test_groups=groups,
        batch_size=4,
    )
    data.setup("fit")
    ((inputs, _),) = data.own_dataloader(1, "test")
    assert torch.equal(inputs, features[groups == 1])


def test_a_table_trains_from_the_command_line(tmp_path):
    write_csv(Path("table.csv"))
    cli = main(
        [
            *("fit", "--config", "configs/breast_cancer_fixbn.yaml", "--trainer.max_epochs", "2"),
            *("--data", "TensorData", "--data.features", "table.csv", "--data.targets", "outcome"),
            *("--data.columns", "[age, dose]", "--data.num_clients", "2", "--data.batch_size", "4"),
        ]
    )
    assert cli.model.model.layers[1].in_features == 2
    assert "test/auroc" in cli.trainer.callback_metrics
    assert json.loads(cli.attempt.result.read_text())["class_accuracy"]["classes"] == ["no", "yes"]


def test_scikit_learns_tables():
    data = ScikitLearn("breast_cancer", num_clients=5, batch_size=8, partition=Dirichlet(alpha=0.5))
    data.setup("fit")
    assert (data.num_classes, data.in_features, data.class_names) == (2, 30, ["malignant", "benign"])
    assert ScikitLearn("diabetes").num_classes is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"features": "no.csv"}, r"data.features: .*no.csv does not exist"),
        ({"features": "table.txt"}, r"data.features: .*table.txt has no known ending"),
        ({"features": "table.csv"}, r"data.features: 60 samples; give features and targets"),
        ({"features": "table.csv", "targets": "outcom"}, r"data.targets: outcom is no column"),
        (
            {"features": "unknown.csv", "targets": "age", "columns": ["mixed"]},
            r"data.columns: mixed is no column of numbers, line 3 of unknown.csv has '12O'; write a number or leave the value empty, name mixed in",
        ),
        (
            {"features": "unknown.csv", "targets": "age", "columns": ["day"]},
            r"data.columns: day is no column of numbers, line 2 of unknown.csv has '1/2/2024'; write a number or leave the value empty, name day in",
        ),
        (
            {"features": "unknown.csv", "targets": "age", "columns": ["patient"]},
            r"data.columns: patient has another word in each of 3 samples, as a name has; leave the column out",
        ),
        (
            {"features": "unknown.csv", "targets": "dose", "columns": ["age"], "categorical": ["grade"]},
            r"data.categorical: grade is no feature column of unknown.csv; use some of age",
        ),
        (
            {"features": [[1.0]] * 9, "targets": [0] * 9, "categorical": ["grade"]},
            r"data.categorical: \['grade'\] needs a table; give a .csv or .parquet file in data.features",
        ),
        (
            {"features": [[1.0], [float("inf")]], "targets": [0, 1], "impute": "mean"},
            r"data.features: the value inf at \[1, 0\] is not finite in float32; correct it",
        ),
        (
            {"features": [[1.0], [2.0]], "targets": [0.5, float("nan")], "impute": "mean"},
            r"data.targets: the value nan at \[1\] is not finite in float32; correct it",
        ),
        ({"features": "empty.npz"}, r"data.features: .*empty.npz holds no features and targets"),
        (
            {"features": [[1.0], [float("nan")]], "targets": [0, 1]},
            r"data.features: the value nan at \[1, 0\] is not finite in float32; correct it, .* set data.impute",
        ),
        (
            {"features": [[1.0], [2.0]], "targets": [0]},
            r"data.features: 2 samples, data.targets: 1 samples; give",
        ),
        ({"features": "text", "targets": [0]}, r"data.features: .*text has no known ending"),
        (
            {"features": [[1.0]] * 9, "targets": [0] * 9, "groups": [0]},
            r"data.targets: 9 samples, data.groups: 1 samples; give",
        ),
        (
            {"features": [[1.0]] * 9, "targets": [1, 2, 3] * 3},
            r"data.targets: the classes of 9 samples are 1 to 3; number the classes from 0 to C - 1",
        ),
        (
            {"features": "table.csv", "targets": "outcome", "groups": "site", "partition": IID()},
            r"data.groups: site would be ignored by the partition IID\(\); use data.partition: Natural",
        ),
        (
            {
                "features": [[1.0]] * 9,
                "targets": [0] * 9,
                "test_features": [[1.0]],
                "test_targets": [0],
                "test_groups": [0],
                "partition": IID(),
            },
            r"data.test_groups: test_groups would be ignored by the partition IID\(\)",
        ),
        (
            {"features": "unlabelled.csv", "targets": "outcome"},
            r"data.targets: line 3 of unlabelled.csv has no outcome; fill in a value",
        ),
        (
            {"features": "short.csv", "targets": "outcome"},
            r"data.features: short.csv cannot be read as a table \(line 3 has 1 values for 2 columns\); write a header",
        ),
        (
            {"features": "long.csv", "targets": "outcome"},
            r"data.features: long.csv cannot be read as a table \(line 3 has 3 values for 2 columns\); write a header",
        ),
        ({"features": "empty.csv", "targets": "outcome"}, r"empty.csv cannot be read as a table .*; write a"),
        ({"features": "bytes.csv", "targets": "outcome"}, r"bytes.csv cannot be read .*; save it as UTF-8"),
        (
            {"features": "good.csv", "targets": "outcome", "columns": ["age", "outcome"]},
            r"data.columns: outcome is the target, data.targets; leave it out of the features",
        ),
        (
            {"features": "good.csv", "targets": "outcome", "columns": []},
            r"data.columns: \[\] leaves no feature; name",
        ),
        ({"features": "header.csv", "targets": "outcome"}, r"header.csv has a header, but no samples"),
        (
            {"features": "twice.csv", "targets": "age"},
            r"data.targets: age is more than one column of twice.csv; it has age, age",
        ),
        (
            {"features": "index.csv", "targets": "outcome"},
            r"data.columns: column 1 of index.csv has no name, as pandas writes its index; name the feature columns",
        ),
        (
            {"features": "unknown.csv", "targets": ["dose", "outcome"], "columns": ["age"]},
            r"data.targets: line 3 of unknown.csv has NA for outcome, which stands for a missing value; fill in",
        ),
        (
            {"features": "unknown.csv", "targets": "answer", "columns": ["age"]},
            r"data.targets: line 2 of unknown.csv has N/A for answer, which stands for a missing value; .* if it is a name",
        ),
        (
            {"features": "unknown.csv", "targets": "grade", "columns": ["age"]},
            r"data.targets: line 4 of unknown.csv has none for grade",
        ),
        (
            {"features": "unknown.csv", "targets": "dose", "columns": ["outcome"]},
            r"data.columns: line 3 of unknown.csv has no value for outcome; set data.impute, for example to median",
        ),
        (
            {"features": [[1.0]] * 3, "targets": [0, 1, 0], "groups": ["a", "b", float("nan")]},
            r"data.groups: one group is nan, which stands for a missing value",
        ),
        (
            {"features": [[1.0]] * 3, "targets": [0, 1, 20_240_101]},
            r"data.targets: the classes of 3 samples are 0 to 20240101; number the classes",
        ),
        (
            {"features": "separated.csv", "targets": "outcome"},
            r"data.columns: age is no column of numbers, line 2 of separated.csv has '1_0'",
        ),
        (
            {"features": "groups.npz", "partition": IID()},
            r"data.groups: groups would be ignored by the partition IID",
        ),
        (
            {"features": "groups.npz", "groups": [1, 2]},
            r"data.groups: groups.npz holds groups; leave data.groups out",
        ),
    ],
)
def test_bad_tables_are_one_line(settings, words):
    write_csv(Path("table.csv"))
    Path("table.txt").write_text("")
    Path("unlabelled.csv").write_text("age,outcome\n1,yes\n2, \n")
    Path("good.csv").write_text("age,outcome\n1,2\n3,1\n")
    Path("header.csv").write_text("age,outcome\n")
    Path("short.csv").write_text("age,outcome\n1,yes\n2\n")
    Path("long.csv").write_text("age,outcome\n1,yes\n2,no,3\n")
    Path("empty.csv").write_text("")
    Path("bytes.csv").write_bytes(b"age,outcome\n1,\xff\n")
    Path("twice.csv").write_text("age,age\n1,2\n")
    Path("index.csv").write_text(",age,outcome\n0,1,yes\n1,2,no\n")
    Path("unknown.csv").write_text(
        "age,dose,outcome,answer,grade,mixed,day,patient\n"
        "1,1,0.5,N/A,1,1,1/2/2024,A\n2,2,NA,no,2,12O,2/2/2024,B\n3,3,2,yes,none,3,1/2/2024,C\n"
    )
    Path("separated.csv").write_text("age,outcome\n1_0,yes\n2,no\n")
    np.savez("groups.npz", features=np.zeros((4, 1)), targets=[0, 1, 0, 1], groups=[0, 0, 1, 1])
    np.savez("empty.npz", x=np.zeros(3))
    with pytest.raises(ConfigurationError, match=words) as refused:
        TensorData(**settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "names", "encoding"),
    [
        ("age,dose,outcome\n1,2,cat\n3,4,dog\n", ["cat", "dog"], "utf-8-sig"),
        ("age, dose , outcome\n1,2,cat\n3, 4,cat \n5,6, dog\n", ["cat", "dog"], "utf-8"),
        ("age,dose,outcome\n1,2,1_0\n3,4,0_0\n", ["0_0", "1_0"], "utf-8"),
        ("age,dose,outcome\n1,2,none\n3,4,mild\n", ["mild", "none"], "utf-8"),
        ("age,dose,outcome\n1,2,0\n3,4, 1\n", None, "utf-8"),
        ('age,dose,outcome\n1,2,"small, ""round"""\n"3",4, "large"\n', ["large", 'small, "round"'], "utf-8"),
    ],
)
def test_a_csv_of_a_spreadsheet_gives_its_columns_and_classes(text, names, encoding):
    Path("sheet.csv").write_text(text, encoding=encoding)
    data = TensorData("sheet.csv", "outcome", columns=["age", "dose"])
    assert (data.class_names, data.num_classes) == (names, 2)
    assert data._data["features"][:2].tolist() == [[1, 2], [3, 4]]


def test_numbers_of_a_csv_are_the_nearest_floats():
    texts = ["0.1", "1e23", "123456789.123456789012", "2.2250738585072011e-308", "8.41470984807896504e-01"]
    Path("exact.csv").write_text("\n".join(["x,y", *(f"{text},0" for text in texts)]))
    table = read_table(Path("exact.csv"), "y", {}, None)["features"]
    assert raw_features(Preprocessing(["x"]), table, Path("exact.csv"))[:, 0].tolist() == [*map(float, texts)]


def test_a_parquet_file_gives_what_its_csv_gives():
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    write_csv(Path("table.csv"))
    pandas.read_csv("table.csv").to_parquet("table.parquet")
    found = [
        TensorData(f"table.{ending}", "outcome", groups="site", batch_size=4) for ending in ("csv", "parquet")
    ]
    for data in found:
        data.setup("fit")
    assert found[0].fingerprint() == found[1].fingerprint()
    assert found[0].class_names == found[1].class_names == ["no", "yes"]
    table = pandas.read_csv("table.csv")
    table.loc[2, "site"] = None
    table.to_parquet("table.parquet")
    with pytest.raises(ConfigurationError, match=r"data.groups: row 3 of table.parquet has no site; fill in"):
        TensorData("table.parquet", "outcome", groups="site")


def test_pandas_is_imported_for_tables_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # an import of it fails
    importlib.reload(sys.modules["fl_lightning.datamodules.tables"])
    assert TensorData([[1.0]] * 9, [0] * 9, groups=["a", "b", "c"] * 3).num_classes == 1
    write_csv(Path("table.csv"))
    with pytest.raises(ImportError, match="pandas"):
        TensorData("table.csv", "outcome", columns=["age", "dose"])


def test_labels_of_more_than_64_bits_are_no_classes():
    Path("large.csv").write_text("age,outcome\n1,0\n2,99999999999999999999\n")
    assert TensorData("large.csv", "outcome").num_classes is None


@pytest.mark.parametrize("drawn", ["test_fraction", "val_fraction"])
def test_a_group_that_keeps_no_training_sample_is_no_client_and_named(drawn):
    features, labels = samples(40, classes=2)
    groups = ["a"] * 39 + ["lonely"]
    settings = {"groups": groups, "batch_size": 1}
    left_out = "left out, as they have fewer training samples than min_examples=1: lonely: 0"
    for fraction in (0.2, 0.9):
        data = TensorData(features, labels, **settings, **{drawn: fraction})
        data.setup("fit")
        assert data.client_names == (["a", "lonely"] if fraction < 0.9 else ["a"])
        assert data.notes == ([left_out] if fraction == 0.9 else [])
    data = TensorData(features, labels, **settings, min_examples=2)
    data.setup("fit")
    assert data.notes == ["left out, as they have fewer training samples than min_examples=2: lonely: 1"]


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64, np.complex64])
def test_a_model_that_converts_its_inputs_takes_any_type(kind, tmp_path):
    class Converts(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs.double())

    class Fails(torch.nn.Linear):
        def forward(self, inputs):
            raise ValueError("of the model")

    features = np.arange(80).reshape(40, 2).astype(kind)
    data = TensorData(features, np.arange(40) % 2, num_clients=2, batch_size=4)
    if kind is not np.complex64:
        train(Converts(2, 2), data, 1, trainer={"limit_val_batches": 1.0})
    with pytest.raises(ValueError, match="of the model"):
        train(Fails(2, 2), data, 1, trainer={"limit_val_batches": 1.0})
    first = kind(1).dtype.name
    words = f"{first} [2] from 1 to 2" if kind is not np.complex64 else "complex64 [2]"
    assert describe_batch(torch.from_numpy(np.array([1, 2], dtype=kind))) == words


def test_groups_beside_the_clients_of_a_file_are_refused(tmp_path):
    write_csv(tmp_path / "table.csv")
    (tmp_path / "clients.json").write_text("{}")
    partition = FromFile(str(tmp_path / "clients.json"))
    with pytest.raises(
        ConfigurationError, match=r"data.groups: site would be ignored by the partition FromFile"
    ):
        TensorData(tmp_path / "table.csv", "outcome", groups="site", partition=partition)


def test_the_data_decide_the_classes_of_a_metric_that_requires_them(tmp_path):
    write_csv(Path("table.csv"))
    Path("metric.yaml").write_text(
        "model: {metrics: {macro: {class_path: torchmetrics.classification.MulticlassAUROC}}}\n"
    )
    cli = main(
        [
            *("fit", "--config", "configs/breast_cancer_fixbn.yaml", "--config", "metric.yaml"),
            *("--trainer.max_epochs", "1", "--data", "TensorData", "--data.features", "table.csv"),
            *("--data.targets", "outcome", "--data.columns", "[age, dose]", "--data.num_clients", "2"),
            *("--data.batch_size", "4"),
        ]
    )
    assert cli.model.task.measured["macro"].num_classes == 2
    assert "test/macro" in cli.trainer.callback_metrics


def test_labels_with_a_decimal_point_are_refused_with_a_remedy(capsys):
    Path("point.csv").write_text("age,outcome\n" + "".join(f"{i},{i % 2}.0\n" for i in range(40)))
    command = [
        "fit",
        "--config",
        "configs/breast_cancer_fixbn.yaml",
        "--data=TensorData",
        "--data.features=point.csv",
    ]
    command += ["--data.targets=outcome", "--data.num_clients=2", "--data.batch_size=4"]
    line = message_of(capsys, lambda: main([*command, "--model.metrics=null"]))
    assert "are torch.float32; write labels as integers (1, not 1.0), or set model.task" in line
    line = message_of(capsys, lambda: main(command))
    assert line.endswith("The data have no classes (integer targets).\n")


def test_messages_name_the_clients_of_a_table(capsys):
    features, labels = torch.randn(30, 4), torch.arange(30) % 2
    sites = np.repeat(["Bergen", "Oslo"], [11, 19])
    data = TensorData(
        features, labels, groups=sites, test_features=features, test_targets=labels, batch_size=12
    )
    data.setup("fit")
    assert data.notes == [
        "1 of 2 clients have fewer samples than batch_size=12, and train on all their samples as one batch: client 0 (Bergen): 11"
    ]
    data = TensorData(
        features, labels, groups=sites, test_features=features, test_targets=labels, batch_size=4
    )

    class Breaks(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * (float("nan") if bool((inputs[:, 0] > 9).any()) else 1)

    features[11:, 0] += 100
    data = TensorData(
        features, labels, groups=sites, test_features=features, test_targets=labels, batch_size=4
    )
    with pytest.raises(
        ConfigurationError, match=r"update of client 1 \(Oslo\) is not finite, first in layer"
    ):
        train(Breaks(4, 2), data, 1)
    module = federated_run(data=data, model=Breaks(4, 2).double(), rounds=1, on_divergence="drop").module
    assert "update of client 1 (Oslo) is not finite" in capsys.readouterr().out
    columns, rows = clients_table(module)
    assert columns[:2] == ["client", "name"]
    assert [row[:3] for row in rows] == [[0, "Bergen", 11], [1, "Oslo", 19]]


@pytest.mark.parametrize("attackers", [1, 2])
def test_attackers_beside_groups_have_test_data_and_names(attackers):
    features, labels = samples()
    groups = np.repeat(["a", "b", "c"], 20)
    tests = {"test_features": features, "test_targets": labels, "test_groups": groups}
    partition = HonestOnly(Natural(), attackers)
    data = TensorData(features, labels, groups=groups, **tests, partition=partition, batch_size=4)
    data.setup("fit")
    assert data.client_names == ["a", "b", "c", "a", "b"][: 3 + attackers]
    for client in range(3 + attackers):
        ((inputs, _),) = data.own_dataloader(client, "test")
        assert torch.equal(inputs, features[groups == data.client_names[client]])
    with pytest.raises(
        ConfigurationError, match=r"data.groups: groups would be ignored by the partition HonestOnly"
    ):
        TensorData(features, labels, groups=groups, partition=HonestOnly(IID(), 1))


def test_two_forms_of_a_letter_are_one_name():
    rows = [f"{site},{number},{number % 2}" for number in range(8) for site in ("Köln", "Ko\u0308ln", "Bonn")]
    Path("sites.csv").write_text("\n".join(["site,age,outcome", *rows]), encoding="utf-8")
    data = TensorData("sites.csv", "outcome", groups="site", batch_size=2, test_fraction=0.2)
    data.setup("fit")
    assert data.client_names == ["Bonn", "Köln"]
