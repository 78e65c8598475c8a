"""Runs of three rounds, and what their models make of new files."""

import csv
import re
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.func import functional_call

from fl_lightning.__main__ import main as command
from fl_lightning.batch_norm.swapping import evaluating
from tests.support.command_line import main

SITES = ["Bergen", "Bonn", "Lund", "Oslo"]


def write_table(name, rows, seed, targets=True):
    draws = np.random.default_rng(seed)
    lines = ["site,age,outcome,dose" if targets else "site,age,dose"]
    for number in range(rows):
        age, dose = draws.normal(60, 9) + number % 4, draws.normal(2, 0.5)
        outcome = f" {'ill' if age / 9 + dose > 9 else 'well'}," if targets else ""
        lines.append(f"{SITES[number % 4]},{age:.3f},{outcome}{dose:.4f}")
    Path(name).write_text("\n".join(lines) + "\n")


def write_test_rows(data, path="new.csv"):
    """Write the run's test samples, as they are in its table, to a new table without targets."""
    features = data._split()["test_features"].double().tolist()
    lines = ["name,dose,age", *(f"P{number},{dose},{age}" for number, (age, dose) in enumerate(features))]
    Path(path).write_text("\n".join(lines) + "\n")


def fit(
    data="TensorData",
    callbacks=(),
    model="TabularMLP",
    task=None,
    metrics=None,
    participation=1.0,
    lr=0.05,
    **arguments,
):
    """Train for three rounds, and return the command line object and the run directory."""
    if data == "TensorData" and "features" not in arguments:
        arguments = {
            "features": "patients.csv",
            "targets": "outcome",
            "groups": "site",
            "standardize": True,
            "batch_size": 8,
            **arguments,
        }
    network = model if isinstance(model, dict) else {"class_path": model}
    config = {
        "seed_everything": 0,
        "wandb": {"mode": "disabled"},
        "trainer": {
            "max_epochs": 3,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "callbacks": [{"class_path": name} for name in callbacks],
        },
        "model": {
            "model": network,
            "local_steps": 2,
            "participation": participation,
            "task": task,
            "metrics": metrics,
        },
        "data": {"class_path": data, "init_args": arguments},
    }
    if model != {"class_path": "methods.Lit"}:
        config["model"]["client_optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": lr}}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    cli = main(["fit", "--config", "run.yaml"])
    return cli, str(cli.attempt.path)


def table_of(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def predicted(capsys, *arguments):
    """Predict, and return the rows of the file that the last line of the output names."""
    capsys.readouterr()
    command(["predict", *arguments])
    return table_of(capsys.readouterr().out.splitlines()[-1].partition(" written to ")[2])


def accuracy_on(capsys, *arguments):
    """Evaluate a new file, and return the printed accuracy."""
    capsys.readouterr()
    command(["test", *arguments])
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    return float(re.search(r"test/accuracy\W+([\d.]+)", plain)[1])


def probabilities(rows):
    return torch.tensor([[float(value) for value in row[2:]] for row in rows[1:]])


@torch.no_grad()
def outputs_on_test_data(cli, state=None):
    (batch,) = cli.datamodule.test_dataloader()
    with evaluating(cli.model.model):
        return functional_call(cli.model.model, state or {}, (batch[0],))
