"""Numbers of sixteen tiny runs: digests of what their last checkpoints hold, and the rows of their metrics."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

SHORT = "--trainer.max_epochs 6 --trainer.check_val_every_n_epoch 2 --trainer.enable_progress_bar false"
QUICK = "--config configs/quickstart.yaml --model.local_steps 2"
PLAIN = "--config configs/digits_fedavg_bn.yaml --model.local_steps 2"
STOP = "--trainer.callbacks+ stop.Stop"
STOP_CODE = """
import os, signal
from lightning.pytorch import Callback

class Stop(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        if os.environ.get("STOP_AFTER") == str(trainer.current_epoch + 1):
            os.kill(os.getpid(), signal.SIGTERM)
"""
RUNS = {
    "quickstart": "--config configs/quickstart.yaml",
    "SequentialExecutor": f"{QUICK} --model.executor SequentialExecutor",
    "VectorizedExecutor": f"{QUICK} --model.executor VectorizedExecutor",
    "FBN": "--config configs/digits_fbn.yaml",
    "FedTAN": f"{PLAIN} --trainer.callbacks FedTAN --model.weighting uniform",
    "FedBN + FedAdam": f"{PLAIN} --trainer.callbacks FedBN --model.server_optimizer FedAdam --model.server_optimizer.lr 0.01",
    "SCAFFOLD": f"{PLAIN} --trainer.callbacks SCAFFOLD --model.participation 4",
    "two ranks, FixBN": f"{QUICK} --trainer.devices 2",
    "two ranks, FedBN + Median": f"{PLAIN} --trainer.callbacks FedBN --model.aggregator Median --trainer.devices 2",
    "FedDNA": f"{PLAIN} --trainer.callbacks FedDNA",
    "SiloBN": f"{PLAIN} --trainer.callbacks SiloBN --model.participation 4",
    "FedProx": f"{PLAIN} --trainer.callbacks FedProx --trainer.callbacks.mu 0.1",
    "SlidingWindowFixBN": "--config configs/digits_sliding_window.yaml --trainer.callbacks SlidingWindowFixBN "
    "--trainer.callbacks.window 2 --trainer.callbacks.threshold 1.0",
    "GN": "--config configs/digits_fedavg_gn.yaml --model.local_steps 2",
    "momentum kept": "--config configs/digits_fixbn_momentum_local.yaml --model.participation 0.5",
    "momentum kept, stopped after 2 and resumed": "--config configs/digits_fixbn_momentum_local.yaml "
    f"--model.participation 0.5 {STOP}",
}


def values_of(node: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Tensors and numbers of a state, as bytes, by their place; without times."""
    import torch

    if isinstance(node, dict | list | tuple):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in sorted(pairs, key=lambda pair: str(pair[0])):
            if not any(word in str(key) for word in ("seconds", "time")):
                yield from values_of(value, (*place, str(key)))
    elif isinstance(node, torch.Tensor):
        kind = f"{node.dtype} {tuple(node.shape)} ".encode()
        yield place, kind + node.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif node is not None:
        yield place, repr(node).encode()


def digests(state: Any) -> dict[str, Any]:
    """Two digests of a state: with the names of its values, and of its values in any order."""
    named, alone = hashlib.sha256(), []
    for place, value in values_of(state):
        named.update("/".join(place).encode() + b"\0" + value)
        alone.append(hashlib.sha256(value).hexdigest())
    return {
        "by name": named.hexdigest()[:32],
        "by value": hashlib.sha256("".join(sorted(alone)).encode()).hexdigest()[:32],
        "count": len(alone),
    }


def outcome(folder: Path) -> dict[str, Any]:
    """Return what is recorded of the one run in a folder."""
    import torch

    (path,) = folder.glob("runs/**/last.ckpt")
    checkpoint = torch.load(path, weights_only=True, map_location="cpu")
    rows = [json.loads(line) for line in (path.parents[1] / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row if not name.startswith("time/")}
    result = json.loads((path.parents[1] / "result.json").read_text())
    return {
        "weights": digests(checkpoint["state_dict"]),
        "callbacks": {str(name): digests(state) for name, state in checkpoint["callbacks"].items()},
        "optimizers": digests(checkpoint["optimizer_states"]),
        "metrics": {key: [row.get(key) for row in rows] for key in sorted(names)},
        "result": {key: value for key, value in result.items() if key.startswith(("val/", "test/"))},
    }


def look(only: str, folder: Path) -> dict[str, Any]:
    """Run the runs whose name contains a text."""
    found = {}
    for name, arguments in RUNS.items():
        if only not in name:
            continue
        own = folder / name
        own.mkdir()
        (own / "stop.py").write_text(STOP_CODE)
        words = ["fit", *arguments.split(), *SHORT.split()]
        if STOP in arguments:
            os.environ["STOP_AFTER"] = "2"
            stopped = common.command(words, own)
            del os.environ["STOP_AFTER"]
            assert "stopped" in stopped.err, stopped
            assert not [*own.glob("runs/**/result.json")], stopped
            words += ["--ckpt_path", "last"]
        ended = common.command(words, own)
        found[name] = {"failed": ended.err} if ended.status else outcome(own)
        print(f"{name}: {ended.seconds} s, status {ended.status}", flush=True)
    return found


if __name__ == "__main__":
    common.main(__doc__, look)
