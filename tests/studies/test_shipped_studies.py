"""The shipped studies: at every scale each label is a configuration of its own, and those of ``quick`` and of every method run."""

import json
import re
from copy import deepcopy
from itertools import combinations
from pathlib import Path

import pytest
import yaml

import fl_lightning
from fl_lightning.cli.command_line import main as fit
from fl_lightning.cli.study import cells_of
from fl_lightning.experiments.run_directory.config_digest import class_path
from fl_lightning.experiments.studies.reading import read_study

FOLDER = Path(fl_lightning.__file__).parents[1] / "configs/studies"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
QUICK = [name for name in NAMES if name != "fixbn_table3"]  # no street scenes come with a package
TO_RUN = [(name, "reduced" if name in ("methods", "optimizers") else "quick") for name in QUICK]
"""Those two have a label for every method of the project, on data that come with a package."""
FOR_BN = {"FBN", "FedBN", "FedDNA", "FedTAN", "FixBN", "SiloBN", "StaticBN", "StatisticsSources"}


def sets_labels(scale):
    """Whether a scale's file gives settings to labels, instead of only choosing among them."""
    return any(any(labels.values()) for labels in scale.get("axes", {}).values() if isinstance(labels, dict))


SCALES = [
    (name, scale)
    for name in NAMES
    for scales in [yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["scales"]]
    for scale in scales
    if (name, scale) not in TO_RUN
    and (
        scale in ("reduced", "long") or sets_labels(scales[scale]) or not scales.keys() & {"reduced", "long"}
    )
]
"""Scales whose labels no test runs. Other scales have the labels of ``reduced`` or ``long``."""
SHORT = ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1", "--wandb.mode=disabled"]
RESULTS = {}
"""What short runs have found, by their settings: studies have cells in common, which run once."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def labels_in(combined):
    return {label for labels in combined for label in labels.items()}


def expect_different_runs(study, cells, combined):
    """Two combinations that differ in one label are two configurations, unless they read different metrics."""
    seen = set()
    for one, other in combinations(combined, 2):
        differing = [axis for axis in one if one[axis] != other[axis]]
        pair = [(axis, one[axis], other[axis]) for axis in differing]
        if len(pair) != 1 or pair[0] in seen or study.metric(one) or study.metric(other):
            continue
        seen.update(pair)
        assert cells.cell(one, 0).key != cells.cell(other, 0).key, pair
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_each_label_makes_another_run(name, scale):
    study = read_study(FOLDER / f"{name}.yaml", scale)
    every, near = [*study.combinations()], []
    for start in every[0], every[-1]:  # a label may be left out beside the first of other axes
        if labels_in(near) != labels_in(every):
            near += [labels for labels in every if sum(labels[axis] != start[axis] for axis in start) <= 1]
    assert labels_in(near) == labels_in(every)
    cells = cells_of(study, [])
    assert expect_different_runs(study, cells, near) or len(near) == 1
    for labels in near:  # what is for BN alone ends a run of anything else
        config = cells.cell(labels, 0).config
        names = {class_path(one).rpartition(".")[2] for one in config["trainer"]["callbacks"] or []}
        assert (
            config["model"]["model"].get("init_args", {}).get("norm", "bn") == "bn" or not names & FOR_BN
        ), labels


@pytest.mark.parametrize("name", NAMES)
def test_its_file_can_be_read_and_a_quick_scale_is_small(name):
    scale = "quick" if name in QUICK else "reduced"
    study = read_study(FOLDER / f"{name}.yaml", scale)
    scales = set(study.definition.scales)
    assert scales & {"quick", "reduced"}
    assert scales & {"long", "full"}
    if scale == "quick":
        assert len([*study.combinations()]) <= 8
        assert len(study.scale.seeds) == 1
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith(f"# python -m fl_lightning study configs/studies/{name}.yaml")
    assert re.search(r"^paper: ", text, re.MULTILINE) or name in (
        "bias_or_features",
        "class_assignment",
        "freeze_gap",
        "freeze_or_decay",
        "hybrid_gain",
        "layer_order",
        "many_clients",
        "methods",
        "optimizers",
        "participation_gap",
        "shards_readings",
        "statistics_gain",
        "tabular",
        "what_updates_reveal",
    )


def result_of(study, cell):
    """The result of a short run of a cell."""
    short, config = [*SHORT], deepcopy(cell.config)
    if not config["model"]["local_epochs"]:
        short.append("--model.local_steps=2")
    for setting in short:
        section, name = setting.strip("-").partition("=")[0].split(".")
        del config[section][name]
    settings = json.dumps({**config, "name": None}, sort_keys=True)
    if settings not in RESULTS:
        name = cell.key.name
        fit(["fit", *study.base, *study.arguments(cell.labels, cell.seed), *short, f"--name={name}"])
        (path,) = Path("runs", name).glob("*/result.json")
        RESULTS[settings] = json.loads(path.read_text())
    return RESULTS[settings]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), TO_RUN)
def test_every_label_runs(name, scale):
    study = read_study(FOLDER / f"{name}.yaml", scale)
    cells = cells_of(study, [])
    unseen, ran = labels_in(study.combinations()), []
    for labels in study.combinations():
        if unseen.isdisjoint(labels.items()):
            continue
        unseen -= labels.items()
        ran.append(labels)
        cell = cells.cell(labels, 0)
        result = result_of(study, cell)
        assert result["rounds"] == 1
        assert {study.metric(labels) or next(iter(study.definition.metrics))} <= result.keys()
        assert cell.rounds > 1
    expect_different_runs(study, cells, ran)
