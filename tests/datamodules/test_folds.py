"""Folds of a cross-validation: each client is in each fold, and each subject is tested once."""

import json
import warnings

import numpy as np
import pytest
import torch
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import Dirichlet, FromFile, HonestOnly, ImageDomains, Natural, TensorData
from fl_lightning.datamodules.partition_file import _labels_sha256
from tests.support.colour_folders import save


def drawn_table(seed):
    """Samples of up to 60 subjects in up to six hospitals; the features are the sample's number."""
    draws = np.random.default_rng(seed)
    count = int(draws.integers(8, 60))
    subject = np.repeat(np.arange(count), draws.integers(1, 8, count))
    hospital = draws.integers(0, int(draws.integers(1, 7)), count)[subject]
    labels = draws.integers(0, 3, len(subject))
    labels[:3] = 0, 1, 2
    order = draws.permutation(len(subject))
    features = torch.arange(len(subject)).double()[:, None]
    return features, torch.from_numpy(labels[order]), hospital[order], subject[order]


def made(features, labels, groups, subjects, **settings):
    data = TensorData(features, labels, groups=groups, subjects=subjects, **settings)
    data.setup("fit")
    return data


def numbers(data, samples):
    """Numbers of samples in the table."""
    return {*data.samples.inputs[samples].flatten().int().tolist()}


def by_scikit_learn(labels, hospital, subjects, folds):
    """Test samples of each fold, computed with scikit-learn for each hospital."""
    tests = [set() for _ in range(folds)]
    for place, name in enumerate(np.unique(hospital)):
        here = np.flatnonzero(hospital == name)
        units = here if subjects is None else subjects[here]
        count = min(folds, len(np.unique(units)))
        if count < 2:
            continue
        kind = StratifiedKFold if subjects is None else StratifiedGroupKFold
        strata = labels[here]
        if np.bincount(strata).max() < count:
            strata = np.zeros_like(strata)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for fold, (_, test) in enumerate(
                kind(count, shuffle=True, random_state=0).split(
                    here, strata, None if subjects is None else units
                )
            ):
                tests[(fold + place) % folds] |= set(here[test].tolist())
    return tests


@pytest.mark.parametrize("seed", range(40))
def test_folds_are_those_of_scikit_learn_within_each_hospital(seed):
    features, labels, hospital, subjects = drawn_table(seed)
    subjects = subjects if seed % 4 else None
    folds = 2 + seed % 5
    expected = by_scikit_learn(labels.numpy(), hospital, subjects, folds)
    tested = []
    for fold in range(folds):
        if not expected[fold]:
            with pytest.raises(ConfigurationError, match="has no test sample"):
                made(features, labels, hospital, subjects, folds=folds, fold=fold)
            continue
        settings = {"folds": folds, "fold": fold, "batch_size": 2}
        data = made(features, labels, hospital, subjects, **settings, seed=seed)
        dealt = data.distribution
        test = numbers(data, dealt.test)
        assert test == expected[fold]
        assert test == set().union(*(numbers(data, part) for part in dealt.own["test"]))
        assert test | set().union(*(numbers(data, part) for part in dealt.clients)) == {*range(len(labels))}
        for client, name in enumerate(data.client_names):
            assert {str(hospital[x]) for x in numbers(data, dealt.own["test"][client])} <= {name}
        other = made(features, labels, hospital, subjects, **settings, seed=seed + 1)
        assert other.index_digests() == data.index_digests()
        tested += test
    assert len(tested) == len({*tested})
    units = [
        *zip(
            hospital.tolist(), subjects.tolist() if subjects is not None else range(len(labels)), strict=True
        )
    ]
    alone = [x for x, (name, _) in enumerate(units) if len({u for h, u in units if h == name}) < 2]
    assert {*range(len(labels))} - {*tested} == {*alone}


def test_a_hospital_with_fewer_subjects_than_folds_is_named():
    subjects = np.repeat(np.arange(9), 2)
    hospital = np.array(["Oslo"] * 5 + ["Bergen"] * 3 + ["Bodø"])[subjects]
    features, labels = torch.arange(18).float()[:, None], torch.arange(18) % 2
    sizes = []
    for fold in range(5):
        data = made(features, labels, hospital, subjects, folds=5, fold=fold)
        sizes.append([len(x) for x in data.distribution.own["test"]])
        note = "fewer subjects than 5 folds (n subjects are test data in n folds, a single one in none): Bergen: 3, Bodø: 1"
        assert note in data.notes
    # sorted by name: Bergen with three patients, Bodø with one, Oslo with five
    assert sizes == [[2, 0, 2]] * 3 + [[0, 0, 2]] * 2


def test_validation_is_drawn_from_whole_subjects_that_are_not_tested():
    features, labels, hospital, subjects = drawn_table(3)
    data = made(features, labels, hospital, subjects, folds=3, fold=1, val_fraction=0.3)
    parts = [*data.distribution.clients, data.distribution.val, data.distribution.test]
    of = [{subjects[x] for x in numbers(data, part)} for part in parts]
    assert sum(map(len, of)) == len(set().union(*of)) == len({*subjects.tolist()})
    assert len(data.distribution.val)


def test_numbers_are_stratified_by_ten_strata():
    draws = np.random.default_rng(0)
    targets = torch.from_numpy(draws.normal(size=100))
    hospital = np.arange(100) % 2
    data = made(torch.arange(100).float()[:, None], targets, hospital, None, folds=5, fold=2)
    strata = np.searchsorted(np.quantile(targets.numpy(), np.linspace(0, 1, 11)[1:-1]), targets.numpy())
    assert numbers(data, data.distribution.test) == by_scikit_learn(strata, hospital, None, 5)[2]


def test_a_file_of_clients_gives_the_folds_of_its_clients(tmp_path):
    features, labels, hospital, subjects = drawn_table(4)
    clients = [{"id": str(x), "train": np.flatnonzero(hospital == x).tolist()} for x in np.unique(hospital)]
    content = {
        "format": "fl_lightning.partition/1",
        "space": "train",
        "examples": len(labels),
        "labels_sha256": _labels_sha256(labels),
        "clients": clients,
    }
    file = tmp_path / "clients.json"
    file.write_text(json.dumps(content))
    settings = {"folds": 3, "fold": 1, "batch_size": 2}
    from_file = made(features, labels, None, subjects, partition=FromFile(str(file)), **settings)
    by_groups = made(features, labels, hospital, subjects, **settings)
    assert from_file.index_digests() == by_groups.index_digests()
    assert numbers(from_file, from_file.distribution.test) == numbers(by_groups, by_groups.distribution.test)
    del clients[0]["train"][0]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match="training data of 0 clients"):
        made(features, labels, None, subjects, partition=FromFile(str(file)), **settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"folds": 1}, "data.folds must be a whole number from 2, such as 5, found 1"),
        ({"folds": 5, "fold": 5}, "data.fold must be in 0 to 4, as data.folds=5; found 5"),
        ({"fold": 2}, "data.fold=2 needs the number of folds; set data.folds"),
        ({"folds": 5, "groups": None}, r"data.folds=5 divides .* IID.* give data.groups"),
        ({"folds": 5, "groups": None, "partition": Dirichlet(1.0)}, "Dirichlet"),
        ({"folds": 5, "partition": HonestOnly(Natural(), 1)}, "HonestOnly"),
        (
            {"folds": 5, "test_features": torch.zeros(2, 1), "test_targets": torch.tensor([0, 1])},
            "data.folds=5 draws the test data, but data.test_targets are given",
        ),
    ],
)
def test_settings_that_folds_exclude_are_refused(settings, told):
    given = {"groups": np.arange(20) % 2} | settings
    with pytest.raises(ConfigurationError, match=told):
        TensorData(torch.zeros(20, 1), torch.arange(20) % 2, **given)


def test_a_fold_without_test_samples_is_refused():
    settings = {"groups": np.zeros(2), "folds": 5, "batch_size": 1}
    data = TensorData(torch.zeros(2, 1), torch.arange(2), fold=2, **settings)
    with pytest.raises(
        ConfigurationError, match="has no test sample, as the clients have too few subjects; use fewer folds"
    ):
        data.setup("fit")


def test_folds_of_small_hospitals_have_similar_sizes():
    hospital = np.repeat(np.arange(10), 3)
    sizes = []
    for fold in range(5):
        data = made(
            torch.arange(30).float()[:, None], torch.arange(30) % 2, hospital, None, folds=5, fold=fold
        )
        sizes.append(len(data.distribution.test))
    assert sizes == [6] * 5


def write_images(root):
    """Write images of 23 patients in two domains: one to four of each patient, each of another brightness."""
    rows, draws = [], np.random.default_rng(0)
    for patient, number in enumerate(draws.integers(1, 5, 23)):
        domain, label = ("north", "south")[patient < 9], "ab"[patient % 2]
        for image in range(number):
            place = f"{domain}/{label}/P{patient:02}_{image}.png"
            save(root / place, torch.full((6, 6, 3), 10 * patient + image))
            rows.append((place, domain, "ab".index(label), patient, 10 * patient + image))
    return [np.array(column) for column in zip(*sorted(rows), strict=True)]


@pytest.mark.parametrize("pattern", [r"P\d+", None])
def test_images_of_each_domain_are_divided_into_the_folds_of_scikit_learn(tmp_path, pattern):
    files, domain, labels, patients, brightness = write_images(tmp_path / "images")
    expected = by_scikit_learn(labels, domain, patients if pattern else None, 4)
    tested = set()
    for fold in range(4):
        made = []
        for seed in range(2):
            data = ImageDomains(
                str(tmp_path / "images"), 6, subjects=pattern, folds=4, fold=fold, seed=seed, batch_size=2,
                cache_dir=str(tmp_path),
            )  # fmt: skip
            data.setup("fit")
            made.append(data)
        data, other = made
        pixels = data.samples.inputs[:, 0, 0, 0]
        found = {int(value) for value in pixels[data.distribution.test]}
        assert found == {*brightness[[*expected[fold]]]}
        for name, part in zip(data.client_names, data.distribution.own["test"], strict=True):
            assert {*pixels[part].tolist()} == found & {*brightness[domain == name].tolist()}
            places = [brightness.tolist().index(value) for value in pixels[part].tolist()]
            samples = data.own_samples(data.client_names.index(name), "test")
            assert [*samples["file"]] == files[places].tolist()
            assert samples.get("subject") == ([f"P{patients[x]:02}" for x in places] if pattern else None)
        assert other.index_digests() == data.index_digests()
        assert f"test data: fold {fold} of 4, 0 to 3" in data.notes
        tested |= found
    assert tested == {*brightness}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"test_fraction": 0.2},
            "data.folds=4 divides each domain, but data.test_fraction=0.2 is set; leave",
        ),
        (
            {"partition": Dirichlet(1.0)},
            r"data.folds=4 divides each domain, but Dirichlet\(.*\) is set; leave",
        ),
        ({"fold": 4}, "data.fold must be in 0 to 3, as data.folds=4; found 4"),
    ],
)
def test_settings_of_images_that_folds_exclude_are_refused(tmp_path, settings, told):
    write_images(tmp_path)
    with pytest.raises(ConfigurationError, match=told):
        ImageDomains(str(tmp_path), 6, folds=4, **settings)


def test_domains_with_test_images_have_no_folds(tmp_path):
    save(tmp_path / "north/train/a/1.png", torch.zeros(6, 6, 3))
    with pytest.raises(
        ConfigurationError, match=r"folds=4 splits class folders, but .* holds train/; leave folds"
    ):
        ImageDomains(str(tmp_path), 6, folds=4)
