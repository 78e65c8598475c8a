"""A tiny federation as a user starts it: a YAML in the working directory and the command line's own ``main``."""

import json
import os
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

# Lightning 2.6 asks jsonargparse 4.49 in the old way to instantiate; harmless, and not ours to change.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

from fl_lightning.cli.command_line import FederatedCLI, main

TINY = {
    "seed_everything": 0,
    "trainer": {
        "max_epochs": 4,
        "check_val_every_n_epoch": 2,
        "accelerator": "cpu",
        "callbacks": [{"class_path": "fl_lightning.callbacks.FixBN", "init_args": {"freeze_round": 2}}],
    },
    "model": {
        "model": {"class_path": "fl_lightning.models.LeNet"},
        "client_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}},
        "local_steps": 2,
    },
    "data": {
        "class_path": "fl_lightning.datamodules.Digits",
        "init_args": {
            "num_clients": 3,
            "batch_size": 10,
            "partition": {
                "class_path": "fl_lightning.datamodules.Shards",
                "init_args": {"class_fraction": 0.4},
            },
            "val_fraction": 0.2,
            "max_examples": 300,
        },
    },
}


def write_config(changes=None, path="tiny.yaml"):
    """Write :data:`TINY` with settings changed by dotted name; a value of None removes the setting."""
    config = deepcopy(TINY)
    for name, value in (changes or {}).items():
        *parents, key = name.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        if value is None:
            del node[key]
        else:
            node[key] = value
    Path(path).write_text(yaml.safe_dump(config))
    return str(path)


def run(*args, command="fit", config="tiny.yaml") -> FederatedCLI:
    """Run a command in this process; the tiny configuration is written where there is none."""
    if config == "tiny.yaml" and not Path(config).exists():
        write_config()
    return main([command, "--config", config, *map(str, args)])


def rows(attempt):
    """The rows of ``metrics.jsonl`` without what a clock says."""
    lines = attempt.metrics.read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
        for line in lines
    ]


def attempts(root="runs"):
    """Names of all run directories below ``runs``."""
    return sorted(path.name for path in Path(root).glob("*/*"))


def message_of(capsys, call, status=2):
    """What a failing command says: one line, no traceback, a status that is not zero."""
    with pytest.raises(SystemExit) as stop:
        call()
    assert stop.value.code == status
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message
