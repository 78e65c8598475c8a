"""Cells that are never trained: what finished runs leave, written by hand."""

import json
from pathlib import Path

import yaml

from fl_lightning.cli.command_line import resolve
from fl_lightning.cli.study import cells_of
from fl_lightning.experiments.studies.cells import Cell
from fl_lightning.experiments.studies.reading import read_study

ROOT = Path(__file__).parents[2]
BASE = ["--config", str(ROOT / "configs/digits_fedavg_bn.yaml"), "--name=cells", "--trainer.max_epochs=40"]
LR = "--model.client_optimizer.lr"
STUDY = {
    "title": "A study",
    "axes": {"method": {"BN": {}, "GN": {"model.model.norm": "gn"}}, "model.client_optimizer.lr": [0.1, 0.2, 0.4]},
    "choose": [{"axis": "model.client_optimizer.lr", "by": ["method"]}],
    "scales": {"quick": {"base": str(ROOT / "configs/digits_fedavg_bn.yaml"), "settings": {"trainer.max_epochs": 40}, "seeds": [0, 1]}},
}  # fmt: skip


def cell(*options, seed=0, **labels):
    return Cell(labels, seed, resolve([*BASE, *options, f"--seed_everything={seed}"]))


def finish(one, attempt="", **result):
    """Write what a finished run leaves."""
    folder = Path(f"{one.key}{attempt}")
    folder.mkdir(parents=True)
    found = {
        "method": "FedAvg",
        "model": "LeNet",
        "partition": "IID",
        "samples": 2800,
        "upload_bytes": 1000,
        "download_bytes": 1000,
        "train_seconds": 12.5,
        "environment": {},
        "rounds": 40,
        "planned_rounds": 40,
        "provenance": [one.now],
        "diverged": False,
        "val/accuracy": 0.5,
    }
    (folder / "result.json").write_text(json.dumps({**found, **result}))
    return folder


def study_cells(options=(), **changes):
    Path("s.yaml").write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return cells_of(read_study(Path("s.yaml"), "quick"), options)
