"""The content of finished runs, and its comparison bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch

from fl_lightning.experiments.run_directory.checkpoint_io import load_checkpoint
from fl_lightning.experiments.run_directory.metrics_log import read_metrics


def contents(attempt: Path) -> dict[str, Any]:
    """Return the content of a finished run's directory, without times."""
    checkpoint = load_checkpoint(attempt / "checkpoints/last.ckpt")
    record = checkpoint["fl_lightning"]["record"]
    del record["seconds"]
    record["metrics"] = _without_times(record["metrics"])
    for origin in record["continued_from"]:  # keep only the path below runs/: folders may differ
        origin["checkpoint"] = origin["checkpoint"].rpartition("/runs/")[2]
    result = json.loads((attempt / "result.json").read_text())
    names = ("state_dict", "callbacks", "optimizer_states", "fl_lightning", "global_step")
    return {name: checkpoint[name] for name in names} | {
        "metrics": [_without_times(line) for line in read_metrics(attempt / "metrics.jsonl")],
        "result": {
            name: result[name] for name in ("samples", "val/accuracy", "test/accuracy", "class_accuracy")
        },
    }


def _without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith("time/")}


def same(first: Any, second: Any) -> bool:
    """Return whether two trees of tensors and plain values are equal bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
