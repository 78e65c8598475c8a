"""The code of the README and of the pages runs as it stands."""

import re
import shlex
import sys
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
import torchmetrics
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedCallback, FederatedDataModule, FederatedModule
from fl_lightning.__main__ import main as program
from fl_lightning.datamodules import CIFAR10, Digits, Shards
from fl_lightning.experiments.studies.reading import read_study
from fl_lightning.verification import certify
from tests.support.command_line import main
from tests.support.helpers import SGD, ArrayClient, blobs, fit, small_cnn, write_cifar10_folders
from tests.support.pages import (
    METHOD_PAGES,
    METHODS,
    OURS,
    PAGES,
    ROOT,
    blocks,
    commands,
    looped_configurations,
    methods_of,
    take_examples,
)
from tests.support.readme_code import PAGE_OF, hide
from tests.support.street_scenes import write_scenes

BY_HAND = (
    "python3 -m venv",
    ".venv/bin/pip",
    ".venv/bin/python -m pytest",
    ".venv/bin/python -m sphinx",
    ".venv/bin/python -m benchmarks",
    ".venv/bin/python docs/scripts/",
    ".venv/bin/python -m examples.",
    ".venv/bin/ruff",
    ".venv/bin/mypy",
    ".venv/bin/torchrun",
    ".venv/bin/wandb agent",
    ".venv/bin/wandb sweep",
    ".venv/bin/wandb sync",
    ".venv/bin/wandb leet",
    "OMP_NUM_THREADS=1 .venv/bin/python -m pytest",
    "OMP_NUM_THREADS=1 .venv/bin/torchrun",
    "NODE_RANK=",
)
"""What other tests, developers or readers run."""

ELSEWHERE = ("dashboard", "verify")
"""Run by tests/weights_and_biases/ and tests/verification/test_verify.py."""

LEFT = {
    "README.md": "quickstart_lr0.05/*/result.json",
    "docs/byzantine.md": "digits_undefended/*/result.json",
    "docs/configuration.md": "mine/*/result.json",
    "docs/data.md": "quickstart/*/partition.json",
    "docs/diagnostics.md": "quickstart/*/bn_layers.csv",
    "docs/first-run.md": "cifar10_small_fixbn/*/result.json",
    "docs/hospitals.md": "studies/study-full/table.tex",
    "docs/new-data.md": "patients/*/predictions_new_patients_*_a.csv",
    "docs/own-data.md": "digits_fedavg_bn/*/result.json",
    "docs/method-client-state.md": "digits_fedavg_bn/*/result.json",
    "docs/method-evaluations.md": "quickstart/*/updates.csv",
    "docs/method-layers.md": "digits_fedavg_bn/*/result.json",
    "docs/method-parts.md": "digits_fedavg_bn/*/result.json",
    "docs/method-ranks.md": "quickstart/*/result.json",
    "docs/method-server.md": "quickstart/*/result.json",
    "docs/own-method.md": "digits_fedavg_gn/*/result.json",
    "docs/own-model.md": "two_layers/*/result.json",
    "docs/privacy.md": "digits_private/*/privacy.csv",
    "docs/reliability.md": "digits_failures/*/result.json",
    "docs/lightning-module.md": "studies/study-quick/table.tex",
    "docs/models.md": "digits_resnet8/*/result.json",
    "docs/methods.md": "digits_fedavg_bn/*/clients.csv",
    "docs/metrics.md": "quickstart_f1/*/result.json",
    "docs/results.md": "digits_statistics_sources/*/result.json",
    "docs/run-directory.md": "quickstart/*/predictions_*_round_*.csv",
    "docs/studies.md": "studies/mine-full/table.tex",
    "docs/scaling.md": "digits_fixbn_momentum_local/*/result.json",
    "docs/speed.md": "quickstart/*/fit-profile.txt",
}
"""A file below ``runs`` that a page's commands leave."""

QUICK = METHODS
"""The page whose commands run in the README's tests; the others' take longer."""


def ours(name):
    """The arguments of this project's commands on a page."""
    found = [shlex.split(line.removeprefix(OURS)) for line in commands(name) if line.startswith(OURS)]
    return [arguments for arguments in found if arguments[0] not in ELSEWHERE]


@pytest.fixture
def write_methods(tmp_path, monkeypatch):
    """Write a page's ``methods.py`` to where runs start."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "methods", raising=False)

    def write(name):
        Path("methods.py").write_text(methods_of(name))

    yield write
    sys.modules.pop("methods", None)
    hide()


def write_own_images(root):
    """Class folders, and a CSV that says whose each image is."""
    write_cifar10_folders(root)
    lines = ["file,label,split,hospital"]
    for path in sorted(root.rglob("*.png")):
        file = path.relative_to(root)
        label = CIFAR10.class_names.index(file.parts[1])
        lines.append(f"{file},{label},{file.parts[0]},{int(path.stem) % 3}")
    (root / "labels.csv").write_text("\n".join(lines))


def test_no_page_has_a_command_that_no_test_and_no_reader_runs():
    lines = [line for name in PAGES for line in commands(name)]
    assert [line for line in lines if not line.startswith((OURS, *BY_HAND))] == []
    scripts = [shlex.split(line)[1] for line in lines if line.startswith(".venv/bin/python docs/scripts/")]
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_pages_show_every_subcommand():
    shown = {line.partition(OURS)[2].split()[0] for name in PAGES for line in commands(name) if OURS in line}
    assert shown == {
        "fit",
        "validate",
        "test",
        "predict",
        "export",
        "partition",
        "study",
        "report",
        "runs",
        *ELSEWHERE,
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in PAGES if ours(name)],
)
def test_every_command_of_a_page_runs_in_its_order_for_two_rounds(name, write_methods, capsys, monkeypatch):
    write_cifar10_folders()
    write_scenes(Path("data/camvid"), {"train/0016e5": 8, "train/0001tp": 8, "train/seq05vd": 3})
    write_own_images(Path("data/mine"))
    rows = [f"{i % 7},{i % 5},{'ab'[i % 2]},{'yes' if i % 3 else 'no'}" for i in range(120)]
    Path("data/patients.csv").write_text("\n".join(["age,dose,site,outcome", *rows]))
    rows = [
        f"{i % 7};{i % 5 or ''};{'I' * (i % 3)};{'ab'[i % 2]};{'yes' if i % 3 else 'no'}" for i in range(120)
    ]
    Path("data/patients_missing.csv").write_text("\n".join(["age;dose;stage;site;outcome", *rows]))
    rows = [f"P{i % 30},{i % 7},{'ab'[i % 30 % 2]},{'yes' if i % 3 else 'no'}" for i in range(120)]
    Path("data/visits.csv").write_text("\n".join(["patient,age,site,outcome", *rows]))
    Path("data/new_patients.csv").write_text("dose,age\n2,40\n3,50\n")
    Path("data/labelled_patients.csv").write_text("dose,age,outcome\n2,40,no\n3,50,yes\n")
    for written in blocks(name, "yaml")[:1]:  # what a reader of the page has in this file
        Path("mine.yaml").write_text(written)
    take_examples(monkeypatch)
    write_methods(name)
    for arguments in ours(name):
        shorter = ["--trainer.max_epochs", "2"] if arguments[0] in ("fit", "study") else []
        if "--trainer.check_val_every_n_epoch" in arguments:
            shorter += ["--trainer.check_val_every_n_epoch", "2"]
        of_a_run = arguments[0] in ("report", "runs") or arguments[1].startswith("runs/")
        quiet = [] if of_a_run else ["--trainer.enable_progress_bar", "false"]
        program([*arguments, *shorter, *quiet])
        assert "error" not in capsys.readouterr().err
    assert list(Path("runs").glob(LEFT[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGE_OF)
def test_the_methods_of_the_pages_keep_what_they_promise(name):
    namespace = {"__name__": "methods"}
    exec(methods_of(PAGE_OF[name]), namespace)  # noqa: S102  # our own page
    hide()
    assert certify(namespace[name], references=False).failed == []


def test_every_python_block_is_tried():
    used = {
        "README.md": 2,
        "docs/adapters.md": 3,
        "docs/own-method.md": 2,
        "docs/method-client-state.md": 4,
        "docs/method-evaluations.md": 4,
        "docs/method-layers.md": 3,
        "docs/method-parts.md": 3,
        "docs/method-ranks.md": 1,
        "docs/method-server.md": 2,
        "docs/own-data.md": 3,
        "docs/own-model.md": 2,
        "docs/python.md": 3,
        "docs/data.md": 3,
        "docs/metrics.md": 3,
        "docs/lightning-module.md": 3,
    }
    assert {name: len(found) for name in PAGES if (found := blocks(name, "python"))} == used


def test_the_example_of_own_data_runs_as_it_stands(capsys):
    script = blocks("docs/own-data.md", "python")[2]
    exec(script, {"__name__": "__main__"})  # noqa: S102  # our own page
    assert "tensor(" in capsys.readouterr().out


def test_the_loss_of_the_batch_of_the_page_trains_a_network():
    namespace = {"__name__": "__main__"}
    (code,) = (block for block in blocks("docs/own-model.md", "python") if "class TwoViews" in block)
    exec(code, namespace)  # noqa: S102  # our own page
    views = TensorDataset(torch.eye(8, 12), torch.eye(8, 12), torch.arange(8) % 3)

    class Site(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(views, 8)

        val_dataloader = train_dataloader

    module, data = namespace["module"], FederatedDataModule([Site()], server=Site())
    fit(module, data, 20, limit_val_batches=1.0, precision="32-true")
    assert module.metrics["val/loss"] < 0.7


def test_the_script_of_the_page_on_python_leaves_a_run_and_its_weights(capsys):
    namespace = {"__name__": "__main__"}
    for script in blocks("docs/python.md", "python"):
        exec(script, namespace)  # noqa: S102  # our own page
    (folder,) = Path("runs/script").iterdir()
    assert f"{folder} {namespace['result']['test/accuracy']}" in capsys.readouterr().out
    assert namespace["loaded"].values["test/accuracy"] == namespace["result"]["test/accuracy"]
    saved, trained = torch.load("model.pt"), namespace["module"].model.state_dict()
    assert {name: torch.equal(value, trained[name]) for name, value in saved.items()} == dict.fromkeys(
        trained, True
    )


def test_the_metrics_and_tasks_of_the_page_are_logged():
    configured, regression, labels = blocks("docs/metrics.md", "python")
    torch.manual_seed(0)
    written = {}
    for block in (configured, regression, labels):
        exec(block, written)  # noqa: S102  # our own page
    images = Digits(num_clients=5, partition=Shards(class_fraction=0.2), val_fraction=0.2)
    module = written["module"]
    fit(module, images, 1, precision="32-true", limit_val_batches=None)
    assert 0 <= module.metrics["val/macro_f1"] <= 1
    inputs, targets = blobs().clients[0].dataset.tensors
    for name, target, size, metrics in (
        ("Regression", targets.double(), 1, {"r2": torchmetrics.R2Score}),
        (
            "MultiLabel",
            torch.eye(3)[targets],
            3,
            {"f1": partial(torchmetrics.F1Score, "multilabel", num_labels=3)},
        ),
    ):
        model = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), size))
        module = FederatedModule(model, SGD, local_steps=1, task=written[name](), metrics=metrics)
        data = FederatedDataModule([ArrayClient(inputs, target, 8)] * 2, ArrayClient(inputs, target, 8))
        fit(module, data, 1, limit_val_batches=None)
        assert f"val/{written[name].quality}" in module.metrics


def merged(file, part):
    """Return a study's file with a further part. The settings of both mappings count."""
    both = {key: merged(file[key], part[key]) for key in file.keys() & part if isinstance(file[key], dict)}
    return {**file, **part, **both}


def test_the_study_of_the_page_can_be_read(tmp_path):
    file, *parts = map(yaml.safe_load, blocks("docs/studies.md", "yaml"))
    sizes = []
    for part in ({}, *parts):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(merged(file, part)))
        sizes.append(len([*read_study(tmp_path / "mine.yaml", "full").combinations()]))
    assert sizes == [3, 5, 9, 3]


WHOLE = ("docs/studies.md", "docs/lightning-module.md")
"""Pages whose YAML is a file of its own, or a part of such a file. Other tests read these files."""

CHANGES = [text for name in PAGES if name not in WHOLE for text in blocks(name, "yaml")]


@pytest.mark.parametrize("snippet", CHANGES)
def test_every_piece_of_yaml_changes_the_quickstart(snippet):
    write_cifar10_folders()
    Path("mine.yaml").write_text(snippet)
    quickstart = ["fit", "--config", "configs/quickstart.yaml", "--name", "changed"]
    cli = main([*quickstart, "--config", "mine.yaml", "--trainer.max_epochs", "2"])
    assert cli.trainer.global_step == 2


def test_every_configuration_that_a_loop_names_exists():
    named = {path for name in PAGES for path in looped_configurations(name)}
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_a_cohort_has_what_the_pages_say():
    found = []

    class Looks(FederatedCallback):
        def on_before_aggregate(self, trainer, pl_module, cohort):
            found.append({*dir(cohort), *vars(cohort)})

    fit(FederatedModule(small_cnn(), SGD, local_steps=1), blobs(), 1, [Looks()])
    page = "\n\n".join(PAGES[name].read_text() for name in METHOD_PAGES)
    table = page[page.index("| of the `cohort` |") :].split("\n\n")[0]
    named = {
        *re.findall(r"\bcohort\.(\w+)", page),
        *(match for row in table.splitlines()[2:] for match in re.findall(r"`(\w+)", row.split("|")[1])),
    }
    assert len(named) > 15
    assert named - found[0] == set()


def test_the_test_on_the_page_passes(write_methods):
    write_methods(METHODS)
    written = {"__name__": "test_methods"}
    exec(blocks(METHODS, "python")[1], written)  # noqa: S102  # the code of the page
    written["test_the_method_equals_momentum_of_the_server_optimizer"]()
