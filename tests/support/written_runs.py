"""Run directories and studies that were written, not computed."""

import json

import yaml

from fl_lightning.files import write_json, write_text


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
        "provenance": [{"source": "78871f7d", "torch": "2.11.0"}],
        "data": {"training": "468d2b204465bea7"},
    }


def run_of(place, seed):
    kept = result(0.5, None)
    for name in ("planned_rounds", "test/loss", "test/accuracy"):
        del kept[name]
    found = {"seed": seed, "phase": "done", "why": "", "directory": f"elsewhere/cells/2/{place.name}"}
    return {**found, "exchanges": 2, **kept}


def write_study(root, label="GN"):
    """A study of two methods, two numbers of local steps and two seeds, of which one cell has failed."""
    values = {("BN", "1"): 0.125, ("BN", "10"): 0.25, (label, "1"): 0.375, (label, "10"): 0.625}
    groups = []
    for number, ((method, steps), value) in enumerate(values.items()):
        places = [write_run(root / "cells/2" / f"{number}{number}-s{seed}", seed=seed) for seed in (0, 1)]
        runs = [run_of(place, seed) for seed, place in enumerate(places)]
        accuracies = {"0": value, "1": value + 0.0625}
        if (method, steps) == (label, "10"):
            del accuracies["1"]
            runs[1] = {
                "seed": 1,
                "phase": "failed",
                "why": "the disk is full",
                "directory": "cells/2/none-s1",
            }
        groups.append(
            {
                "labels": {"method": method, "model.E": steps},
                "published": 0.4512 if steps == "10" else None,
                "learning_rate": 0.25,
                "values": {"test/accuracy": accuracies},
                "runs": runs,
            }
        )
    axes = {"method": ["BN", label], "model.E": ["1", "10"]}
    choice = {"axis": "lr", "for": {"method": "BN"}, "metric": "val/accuracy", "chosen": "0.25"}
    found = {
        "name": "table9",
        "title": "Layers and local steps",
        "paper": "A paper, Table 9",
        "scale": "quick",
        "seeds": [0, 1],
        "axes": axes,
        "choose": [],
        "spread": "model.E",
        "metrics": {"test/accuracy": "test accuracy"},
        "groups": groups,
        "choices": [{**choice, "values": {"0.25": 0.8765, "0.5": 0.4321}}],
        "known": axes,
        "claims": [{"claim": f"{label} > BN", "verdict": "undecided", "words": "2 undecided"}],
    }
    write_json(root / "studies" / "table9-quick" / "study.json", found)
    return root / "studies" / "table9-quick"
