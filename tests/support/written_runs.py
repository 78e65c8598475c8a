"""Run directories and studies that were written, not computed."""

import json

import yaml

from fl_lightning.files import write_json, write_text
from tests.support.study_frames import study_frame


def write_run(place, *, name="bn", seed=0, norm="bn", accuracy=0.5, finished=True, callback=None):
    config = {
        "name": name,
        "seed_everything": seed,
        "trainer": {"max_epochs": 2, "callbacks": [{"class_path": callback}] if callback else None},
        "model": {
            "model": {"class_path": "fl_lightning.models.LeNet", "init_args": {"norm": norm}},
            "client_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.25}},
            "local_steps": 7,
            "participation": 1.0,
        },
        "data": {"class_path": "fl_lightning.datamodules.Digits", "init_args": {"batch_size": 20}},
    }
    write_text(place / "config.yaml", yaml.safe_dump(config))
    rows = [{"round": r, "val/accuracy": accuracy * r / 2, "comm/upload_bytes": 5e5} for r in range(3)]
    write_text(place / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        write_json(place / "result.json", result(accuracy, callback))
    return place


def study_of(places):
    """Written runs as a study whose rows are their names."""
    rows = {}
    for place in places:
        config, found = (
            yaml.safe_load((place / "config.yaml").read_text()),
            json.loads((place / "result.json").read_text()),
        )
        empty = {"labels": {"run": config["name"]}, "values": {"test/accuracy": {}}, "runs": []}
        row, seed = rows.setdefault(config["name"], empty), config["seed_everything"]
        row["values"]["test/accuracy"][seed] = found["test/accuracy"]
        kept = {
            name: x
            for name, x in found.items()
            if "/" not in name and name not in ("method", "model", "partition")
        }
        row["runs"].append({"seed": seed, "phase": "done", "why": "", "directory": str(place), **kept})
    return study_frame([*rows.values()], {"run": [*rows]}, {"test/accuracy": "test accuracy"})


def result(accuracy, callback):
    return {
        "method": f"FedAvg + {callback}()" if callback else "FedAvg",
        "model": "LeNet",
        "partition": "Shards(class_fraction=0.1), 10 clients",
        "rounds": 2,
        "planned_rounds": 2,
        "samples": 2800,
        "test/loss": 1.75,
        "test/accuracy": accuracy,
        "diverged": False,
        "upload_bytes": 1_500_000,
        "download_bytes": 1_500_000,
        "train_seconds": 12.5,
        "computed_by": {"device": "cpu", "threads": 1, "executor": "SequentialExecutor()"},
        "environment": {"python": "3.11.7", "torch": "2.11.0", "git_commit": "abcdef12"},
        "provenance": [{"fl_lightning": "0.3.0 78871f7d", "torch": "2.11.0"}],
        "data": {"training": "468d2b204465bea7"},
    }


def write_study(root, label="GN"):
    """A study of two methods, two numbers of local steps and two seeds, of which one cell has failed."""
    means = {("BN", "1"): 0.125, ("BN", "10"): 0.25, (label, "1"): 0.375, (label, "10"): 0.625}
    cells, values = [], []
    for number, ((method, steps), mean) in enumerate(means.items()):
        for seed in (0, 1):
            place = write_run(root / "cells/2" / f"{number}{number}-s{seed}", seed=seed)
            labels = {"method": method, "model.E": steps}
            cells.append({"labels": labels, "seed": seed, "phase": "done", "why": "", "learning_rate": 0.25})
            cells[-1] |= {"published": 0.4512} if steps == "10" else {}
            if (method, steps, seed) == (label, "10", 1):
                cells[-1] |= {"phase": "failed", "why": "the disk is full", "directory": "cells/2/none-s1"}
                continue
            kept = {name: x for name, x in result(0.5, None).items() if "/" not in name}
            cells[-1] |= {**kept, "exchanges": 2, "directory": f"elsewhere/cells/2/{place.name}"}
            value = {"labels": labels, "seed": seed, "metric": "test/accuracy", "value": mean + seed / 16}
            values.append(value)
    axes = {"method": ["BN", label], "model.E": ["1", "10"]}
    choice = {"axis": "lr", "by": {"method": "BN"}, "at": {}, "metric": "val/accuracy", "chosen": "0.25"}
    choice |= {"values": {"0.25": 0.8765, "0.5": 0.4321}, "seed": 1000, "settings": [], "extended": []}
    results = {
        "name": "table9",
        "title": "Layers and local steps",
        "paper": "A paper, Table 9",
        "scale": "quick",
        "axes": axes,
        "known": axes,
        "spread": "model.E",
        "metrics": {"test/accuracy": "test accuracy"},
        "cells": cells,
        "values": values,
        "choices": [choice],
        "claims": [{"claim": f"{label} > BN", "verdict": "undecided", "words": "2 undecided"}],
    }
    write_json(root / "studies" / "table9-quick" / "study.json", results)
    return root / "studies" / "table9-quick"
