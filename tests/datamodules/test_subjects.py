"""All samples of a subject, such as a patient, are in one part of the data."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import (
    IID,
    Dirichlet,
    FromFile,
    HonestOnly,
    ImageDomains,
    ImageFolder,
    Shards,
    StreamedImages,
    TensorData,
)
from fl_lightning.datamodules.subjects import Subjects
from tests.support.colour_folders import save
from tests.support.command_line import main


def parts_of(data):
    """Samples of each part by name: each client's training data, validation and test data."""
    dealt = data.distribution
    clients = {f"client {client}": part for client, part in enumerate(dealt.clients)}
    return {**clients, "val": dealt.val, "test": dealt.test}


def subjects_of(data, samples):
    """Subjects of samples, found by the first feature, which is the subject's number."""
    inputs = data.samples.inputs[samples]
    return set(inputs.flatten(1)[:, 0].int().tolist())


def drawn_table(seed):
    """A random table: 3 to 500 samples of 1 to 40 each a subject, in up to 12 hospitals or none."""
    draws = np.random.default_rng(seed)
    sizes, target = [], draws.integers(3, 501)
    while sum(sizes) < target:
        sizes.append(min(int(draws.integers(1, 41)), int(target - sum(sizes))))
    subject = np.repeat(np.arange(len(sizes)), sizes)
    classes = int(draws.integers(2, 4))
    label = np.arange(len(sizes)) % classes
    mixed = bool(draws.integers(2))
    labels = draws.integers(0, classes, len(subject)) if mixed else label[subject]
    labels[:classes] = np.arange(classes)[: len(labels)]
    hospitals = draws.integers(0, min(12, max(len(sizes) // 5, 1)), len(sizes))
    named = bool(draws.integers(2))
    order = draws.permutation(len(subject))
    names = np.array([f"P{number:03}" for number in subject]) if named else subject
    features = torch.from_numpy(np.stack([subject, draws.normal(size=len(subject))], 1)).float()
    groups = {"groups": hospitals[subject][order]} if draws.integers(2) else {}
    return features[order], torch.from_numpy(labels[order]).long(), names[order], groups


@pytest.mark.parametrize("seed", range(200))
def test_no_subject_is_in_two_parts(seed):
    features, targets, names, groups = drawn_table(seed)
    share, count = 0.2, len(np.unique(names))
    tested = round(share * count)
    validated = round(share * (count - tested))
    number = max(min(3, count - tested - validated), 1)
    settings = {
        "num_clients": number,
        "val_fraction": share,
        "test_fraction": share,
        "batch_size": 2,
        **groups,
    }

    def made():
        data = TensorData(features, targets, subjects=names, seed=seed, **settings)
        data.setup("fit")
        return data

    if not tested or not validated:
        with pytest.raises(ConfigurationError, match=r"fraction=0\.2 takes 0 of \d+ subjects"):
            made()
        return
    data = made()
    found = {name: subjects_of(data, samples) for name, samples in parts_of(data).items()}
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == count
    assert (len(found["test"]), len(found["val"])) == (tested, validated)
    again = made()
    assert all(torch.equal(parts_of(again)[name], samples) for name, samples in parts_of(data).items())
    every = set(targets.tolist())
    for part, name in (("val", "validation"), ("test", "test")):
        absent = every - set(data.distribution.labels[parts_of(data)[part]].tolist())
        told = [note for note in data.notes if note.startswith(f"no {name} sample has the class")]
        assert bool(absent) == bool(told)


def table(**settings):
    """Twelve subjects with three samples each; the class of a subject is its number modulo 2."""
    subject = torch.arange(36) % 12
    features = torch.stack([subject.float(), torch.arange(36.0)], 1)
    made = {"targets": subject % 2, "subjects": subject, "num_clients": 2, "batch_size": 2, **settings}
    data = TensorData(features, **made)
    data.setup("fit")
    return data


@pytest.mark.parametrize(
    "partition", [Dirichlet(10.0), Shards(0.5), IID(), HonestOnly(IID(), 1)], ids=lambda x: type(x).__name__
)
def test_partitions_deal_subjects(partition):
    data = table(partition=partition, test_fraction=0.25, val_fraction=0.25, max_examples=21)
    found = {name: subjects_of(data, samples) for name, samples in parts_of(data).items()}
    if isinstance(partition, HonestOnly):
        assert found.pop("client 1") == found["client 0"]  # attackers have copies
    assert len(found["test"]) == 3
    trained = set.union(*(x for name, x in found.items() if name != "test"))
    assert len(trained) == round(21 / 27 * 9) == sum(len(x) for name, x in found.items() if name != "test")
    assert all(len(samples) % 3 == 0 for samples in parts_of(data).values())


@pytest.mark.parametrize("seed", range(5))
def test_a_saved_partition_deals_the_same_subjects(seed, tmp_path):
    data = table(seed=seed, test_fraction=0.25, num_clients=3)
    (tmp_path / "clients.json").write_text(json.dumps(data.distribution.as_file("TensorData", {})))
    again = table(seed=seed + 1, test_fraction=0.25, partition=FromFile(str(tmp_path / "clients.json")))
    assert again.index_digests() == data.index_digests()
    found = {name: subjects_of(again, samples) for name, samples in parts_of(again).items()}
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 12


def test_a_subject_of_several_classes_is_not_divided_by_class():
    targets = torch.arange(36) // 12 % 2
    assert len(subjects_of(table(targets=targets, partition=IID()), torch.arange(36))) == 12
    with pytest.raises(
        ConfigurationError, match=r"data\.subjects: \d+ has samples of several classes, which Dir"
    ):
        table(targets=targets, partition=Dirichlet(1.0))


def test_the_number_of_subjects_is_a_note():
    assert "36 samples of 12 subjects (data.subjects)" in table().notes


def test_a_subject_in_two_groups_or_in_training_and_test_data_is_refused():
    groups = [f"site {number % 2}" for number in range(36)]
    groups[0] = "site 1"
    with pytest.raises(
        ConfigurationError,
        match=r"data\.subjects: subject 0 is in the group site 0 and in the group site 1; give all",
    ):
        table(groups=groups)
    tests = {"test_features": torch.zeros(2, 2), "test_targets": torch.arange(2)}
    with pytest.raises(
        ConfigurationError, match=r"subject 11 is in the training data and in the test data; give all samples"
    ):
        table(**tests, test_subjects=[11, 12])
    with pytest.raises(
        ConfigurationError, match=r"data\.test_subjects: missing, although subjects are given"
    ):
        table(**tests)
    assert len(table(**tests, test_subjects=[12, 13]).distribution.test) == 2


@pytest.mark.parametrize(
    ("setting", "unit"), [("test_fraction", "12 subjects"), ("val_fraction", "subjects of")]
)
def test_a_share_without_a_subject_is_refused(setting, unit):
    with pytest.raises(ConfigurationError, match=rf"{setting}=0\.03 takes 0 of .*{unit}"):
        table(**{setting: 0.03})


def test_missing_names_of_subjects_are_refused():
    with pytest.raises(ConfigurationError, match=r"data\.subjects: one subject is nan, which stands for"):
        table(subjects=["nan", *map(str, range(35))])
    with pytest.raises(ConfigurationError, match=r"data\.subjects: 35 samples"):
        table(subjects=torch.arange(35))


def test_a_partition_file_that_divides_a_subject_is_refused(tmp_path):
    data = table(partition=IID())
    saved = data.distribution.as_file("mine", {})
    path = tmp_path / "parts.json"
    path.write_text(json.dumps(saved))
    again = table(partition=FromFile(str(path)))
    assert all(map(torch.equal, again.distribution.clients, data.distribution.clients))
    first, second = (client["train"] for client in saved["clients"])
    first[0], second[0] = second[0], first[0]
    for client in saved["clients"]:
        client["train"].sort()
    path.write_text(json.dumps(saved))
    with pytest.raises(
        ConfigurationError, match=r"subject \d+ is in train of client 0 and in train of client 1"
    ):
        table(partition=FromFile(str(path)))


def test_the_most_frequent_class_is_a_subjects_class():
    subjects = Subjects(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([2, 2, 0, 1, 0]), ["a", "b"])
    assert subjects.labels.tolist() == [2, 0]
    assert subjects.mixed.tolist() == [True, True]


def visits():
    """Write the visits of 60 patients whose labels are chance."""
    draws = np.random.default_rng(0)
    centre, label = draws.normal(size=(60, 8)), draws.permutation(np.arange(60) % 2)
    lines = [",".join(["patient", *(f"x{k}" for k in range(8)), "site", "outcome"])]
    for patient in range(60):
        for _ in range(6):
            x = (centre[patient] + 0.1 * draws.normal(size=8)).round(3)
            values = [f"p{patient:02d}", *map(str, x), "abc"[patient % 3], ["no", "yes"][label[patient]]]
            lines.append(",".join(values))
    Path("visits.csv").write_text("\n".join(lines) + "\n")


def test_the_column_of_subjects_is_no_feature_and_is_said(capsys):
    visits()
    arguments = "--model.model TabularMLP --data TensorData --data.features visits.csv --data.targets outcome"
    more = "--data.subjects patient --data.groups site --data.partition Natural --data.batch_size 8"
    rest = (
        "--trainer.max_epochs 1 --trainer.accelerator cpu --model.local_steps 1 --model.client_optimizer SGD"
    )
    cli = main(
        ["fit", *f"{arguments} {more} {rest} --model.client_optimizer.lr 0.1 --wandb.mode disabled".split()]
    )
    assert cli.datamodule.in_features == 8
    assert "360 samples of 60 subjects (data.subjects patient)" in capsys.readouterr().out
    assert len(cli.datamodule.distribution.test) == 72


@pytest.mark.parametrize(
    ("column", "values", "told"),
    [
        ("patient", 60, True),
        ("Patient_ID", 60, True),
        ("subject id", 60, True),
        ("patient", 360, False),  # no patient has two rows
        ("patient", 1, False),
        ("case", 2, False),
        ("grade", 60, False),
        ("acid", 60, False),
    ],
)
def test_rows_that_repeat_an_id_get_a_line(column, values, told):
    lines = [f"{column},x,outcome", *(f"P{i % values},{i}.5,{'ab'[i % 2]}" for i in range(360))]
    Path("rows.csv").write_text("\n".join(lines) + "\n")
    notes = TensorData("rows.csv", targets="outcome", columns=["x"]).notes
    line = f"360 rows, 60 values of {column}: are rows of one {column} to stay together? then set data.subjects: {column}"
    assert [note for note in notes if "rows" in note] == [line] * told
    named = TensorData("rows.csv", targets="outcome", columns=["x"], subjects=column).notes
    assert not [note for note in named if "rows" in note]


def nearest(data, evaluated):
    """Accuracy of the class of the nearest training sample."""
    inputs, targets = data.samples.inputs, data.distribution.labels
    trained = torch.cat(data.distribution.clients)
    found = torch.cdist(inputs[evaluated], inputs[trained]).argmin(1)
    return float((targets[trained][found] == targets[evaluated]).float().mean())


def logistic(data, evaluated):
    """Accuracy of scikit-learn's logistic regression."""
    inputs, targets = data.samples.inputs.numpy(), data.distribution.labels.numpy()
    trained = torch.cat(data.distribution.clients).numpy()
    model = LogisticRegression().fit(inputs[trained], targets[trained])
    return model.score(inputs[evaluated.numpy()], targets[evaluated.numpy()])


def test_visits_split_by_patient_predict_no_chance_labels():
    """What rows of one patient tell is not known of a new patient: over 20 seeds, whose validation data differ."""
    visits()
    given = {
        "targets": "outcome",
        "groups": "site",
        "standardize": True,
        "batch_size": 8,
        "val_fraction": 0.2,
    }
    ways = {"row": {"columns": [f"x{k}" for k in range(8)]}, "patient": {"subjects": "patient"}}
    found = {}
    for (way, more), seed in product(ways.items(), range(20)):
        data = TensorData("visits.csv", seed=seed, **given, **more)
        data.setup("fit")
        parts = {"val": data.distribution.val, "test": data.distribution.test}
        for (name, part), score in product(parts.items(), (nearest, logistic)):
            found.setdefault((way, name, score), []).append(score(data, part))
    means = {key: np.mean(values) for key, values in found.items()}
    assert min(means["row", part, nearest] for part in ("val", "test")) > 0.95
    assert (
        max(means["patient", part, score] for part in ("val", "test") for score in (nearest, logistic)) < 0.6
    )


PATTERN = r"P\d+"


def write_images(root, layout):
    """Write three images of each of 20 patients; the class of a patient is its number modulo 2."""
    for patient in range(20):
        for image in range(3):
            place = layout.format(
                split="test" if patient >= 14 else "train", label="ab"[patient % 2], patient=patient
            )
            save(root / f"{place}_{image}.png", torch.full((6, 6, 3), 12 * patient + image))


@pytest.mark.parametrize(
    ("layout", "pattern"),
    [
        ("{label}/P{patient:02}", PATTERN),
        ("{label}/P{patient:02}/scan", r"([^/]+)/[^/]+$"),
        ("{label}/P{patient:02}", r"/(P\d+)_"),
    ],
)
def test_images_of_a_subject_stay_together(tmp_path, layout, pattern):
    write_images(tmp_path / "images", layout)
    settings = {"num_clients": 2, "batch_size": 4, "val_fraction": 0.25, "test_fraction": 0.2}
    data = ImageFolder(str(tmp_path / "images"), 6, subjects=pattern, cache_dir=str(tmp_path), **settings)
    data.setup("fit")
    found = {name: patients_of_images(data, samples) for name, samples in parts_of(data).items()}
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 20
    assert (len(found["test"]), len(found["val"])) == (4, 4)
    assert "60 samples of 20 subjects (data.subjects)" in data.notes


def patients_of_images(data, samples):
    """The patients of images, by the brightness of their pixels."""
    scaled = data.samples.inputs[samples].reshape(len(samples), -1)[:, 0]
    return {int(value) // 12 for value in scaled.tolist()}


def test_domains_may_not_share_a_subject(tmp_path):
    for domain in ("one", "two"):
        write_images(tmp_path / "images" / domain, "{split}/{label}/" + domain + "P{patient:02}")
    settings = {"batch_size": 4, "cache_dir": str(tmp_path)}
    ImageDomains(str(tmp_path / "images"), 6, subjects=r"(one|two)P\d+", **settings)
    data = ImageDomains(str(tmp_path / "images"), 6, subjects=r"[onetw]+P\d+", **settings)
    data.setup("fit")
    with pytest.raises(
        ConfigurationError, match=r"subject P00 is in the group one and in the group two; give all"
    ):
        ImageDomains(str(tmp_path / "images"), 6, subjects=PATTERN, **settings).setup("fit")


def test_a_pattern_may_match_the_domain_also_where_the_test_images_are_drawn(tmp_path):
    for domain in ("one", "two"):
        write_images(tmp_path / "images" / domain, "{label}/P{patient:02}")
    settings = {"batch_size": 4, "cache_dir": str(tmp_path), "test_fraction": 0.2}
    data = ImageDomains(str(tmp_path / "images"), 6, subjects=r"^.*P\d+", **settings)
    data.setup("fit")
    assert "120 samples of 40 subjects (data.subjects)" in data.notes
    assert len(data.distribution.test) == 2 * 4 * 3
    assert all(len(own) == 4 * 3 for own in data.distribution.own["test"])


def test_a_partition_file_that_leaves_no_whole_subject_to_validate_is_told(tmp_path):
    subject = torch.cat([torch.zeros(10, dtype=torch.int64), torch.arange(1, 21)])
    given = {"targets": subject % 2, "subjects": subject, "batch_size": 2, "num_clients": 1}
    tests = {"test_features": torch.rand(2, 1), "test_targets": torch.arange(2), "test_subjects": [30, 31]}
    features = subject[:, None].float()
    data = TensorData(features, partition=IID(), **given, **tests)
    data.setup("fit")
    saved = data.distribution.as_file("mine", {})
    saved["clients"][0]["train"] = [*range(10, 30)]  # no client has the ten samples of subject 0
    path = tmp_path / "parts.json"
    path.write_text(json.dumps(saved))
    again = TensorData(features, partition=FromFile(str(path)), val_fraction=0.1, **given, **tests)
    with pytest.raises(
        ConfigurationError, match=r"val_fraction=0\.1 takes no subject of those that belong to no"
    ):
        again.setup("fit")


def test_streamed_images_of_a_subject_stay_together(tmp_path):
    write_images(tmp_path / "images", "{split}/{label}/P{patient:02}")
    settings = {"num_clients": 2, "batch_size": 4, "val_fraction": 0.2}
    data = StreamedImages(str(tmp_path / "images"), 6, subjects=PATTERN, **settings)
    data.setup("fit")
    files = [path.name for path, _ in data.images.files.samples()]
    found = [{files[i][:3] for i in samples.tolist()} for samples in parts_of(data).values()]
    assert sum(map(len, found)) == len(set.union(*found)) == 20


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("Q[0-9]+", "'Q.* is in no part of the path a/P00_0.png; give a pattern"),
        ("P(", "no regular expression: missing"),
    ],
)
def test_a_pattern_that_finds_no_subject_is_refused(tmp_path, pattern, told):
    write_images(tmp_path / "images", "{label}/P{patient:02}")
    data = ImageFolder(
        str(tmp_path / "images"), 6, subjects=pattern, test_fraction=0.2, cache_dir=str(tmp_path)
    )
    with pytest.raises(ConfigurationError, match=rf"data\.subjects: .*{told}"):
        data.setup("fit")
