"""Five studies at small scales: the cells value by value, the tables and the verdicts.

They are shipped studies in a copy of ``configs``, made shorter, and some with more that can happen: published values, labels
that diverge, cells that fail, and street scenes that the tests draw.
"""

import csv
import re
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import common
import yaml

SHORT = "--trainer.max_epochs 6 --trainer.check_val_every_n_epoch 2"
UNLIKE = re.compile(
    "second|training|directory|^files|left$"
)  # columns and lines with times, paths and names of runs
Study = dict[str, Any]


def with_published(study: Study) -> None:
    """Headline and claims, with the paper's values, a label that diverges, and one that raises."""
    quick = study["scales"]["quick"]
    quick["published"] = study["scales"]["full"]["published"][:2]
    more = {
        "diverges": {"model.client_optimizer.lr": 1e30, "model.on_divergence": "record"},
        "raises": {"trainer.callbacks": ["raising.Raises"]},
    }
    study["axes"]["method"] |= more
    study["axes"] = {"method": {name: study["axes"]["method"][name] for name in ("BN", "GN", "FixBN", *more)}}
    quick["settings"]["model.client_optimizer.lr"] = 0.1
    quick["axes"] = {}
    quick["seeds"] = [0, 1]
    study["choose"] = []
    study["claims"] = ["GN ~ BN within 0.5", "FixBN > diverges"]


def with_two_rates(study: Study) -> None:
    """Choice of a learning rate on validation data, with a wider grid, and a heat map of differences."""
    study["scales"]["quick"]["axes"] = {}
    study["axes"]["partition"] = {"Shards": {}}
    study["axes"]["E"] = {E: {"model.local_steps": E} for E in (1, 2)}
    study["choose"] = [{"axis": "model.client_optimizer.lr", "by": ["method"]}]
    study["claims"] = ["GN > BN at E=1"]


def with_scenes(study: Study) -> None:
    """Segmentation of the street scenes that the tests draw."""
    study["scales"]["quick"] = scale = study["scales"]["reduced"]
    scale["seeds"] = [0]
    small = {"data.batch_size": 2, "data.image_size": [16, 24], "data.crop_size": [16, 16]}
    scale["settings"] |= {**small, "model.model.width": 4, "model.local_steps": 2}


def as_it_is(study: Study) -> None:
    """No change."""


STUDIES: dict[str, tuple[Callable[[Study], None], str]] = {
    "fixbn_table4": (with_published, f"{SHORT} --model.local_steps 2"),
    "fixbn_figure2": (with_two_rates, SHORT),
    "freeze_search": (as_it_is, "--trainer.max_epochs 8 --trainer.check_val_every_n_epoch 2"),
    "tabular": (as_it_is, SHORT),
    "fixbn_table3": (
        with_scenes,
        "--trainer.max_epochs 2 --trainer.check_val_every_n_epoch 1 --data.data_dir scenes",
    ),
}
RAISING = """
from fl_lightning import FederatedCallback

class Raises(FederatedCallback):
    def on_round_end(self, trainer, pl_module, cohort):
        raise ValueError("out of order")
"""


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file without times and paths."""
    with path.open(newline="") as file:
        found = [*csv.DictReader(file)]
    return [{k: v for k, v in row.items() if v != "" and not UNLIKE.search(k)} for row in found]


def look(only: str, folder: Path) -> dict[str, Any]:
    """Run the studies whose name contains a text."""
    found = {}
    code = Path(sys.path[0])
    for name, (change, options) in STUDIES.items():
        if only not in name:
            continue
        own = folder / name
        shutil.copytree(code / "configs", own / "configs")
        path = own / "configs/studies" / f"{name}.yaml"
        study = yaml.safe_load(path.read_text())
        change(study)
        study["scales"] = {"quick": study["scales"]["quick"]}
        path.write_text(yaml.safe_dump(study, sort_keys=False))
        (own / "raising.py").write_text(RAISING)
        if "scenes" in options:
            cities = {"train/0016e5": 6, "train/0001tp": 4, "train/seq05vd": 3}
            import_module("tests.support.street_scenes").write_scenes(own / "scenes", cities)
        words = f"study configs/studies/{name}.yaml --jobs 1 {options} --trainer.enable_progress_bar false"
        ended = common.command_of_its_own(words.split(), own)
        result = own / "runs/studies" / f"{name}-quick"
        tables = result.exists()
        out = re.sub(r"; its output: .*", "", ended.out)
        text = [line.rstrip() for line in out.splitlines() if line.strip() and not UNLIKE.search(line)]
        found[name] = {
            "status": ended.status,
            "cells": rows(result / "cells.csv") if tables else [],
            "table": rows(result / "table.csv") if tables else [],
            # the printed title, remarks, choices and verdicts, without the lines of cells as they end
            "told": [line for line in text if not re.match(r"\[\d+/\d+\]", line)],
        }
        print(f"{name}: {ended.seconds} s, status {ended.status}\n{ended.err}", flush=True)
    return found


if __name__ == "__main__":
    common.main(__doc__, look)
