"""What the agent of a sweep at W&B starts, without a server: its own functions render the command."""

from itertools import product
from pathlib import Path

import yaml

import fl_lightning

ROOT = Path(fl_lightning.__file__).parents[1]
FILES = [*sorted(ROOT.glob("configs/sweeps/*.yaml")), *sorted(ROOT.glob("examples/*/*_sweep.yaml"))]
SWEEPS = {path.name: yaml.safe_load(path.read_text()) for path in FILES}
"""The shipped sweeps by the names of their files."""


def grid(name):
    """The values of the parameters of every run."""
    parameters = SWEEPS[name]["parameters"]
    return [
        dict(zip(parameters, values, strict=True))
        for values in product(*(known["values"] for known in parameters.values()))
    ]


def command_line(name, values):
    """The command of a run, in words, as ``wandb agent`` puts it together."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    arguments = {parameter: {"value": value} for parameter, value in values.items()}
    known = create_sweep_command_args({"args": arguments}) | {"env": ["/usr/bin/env"]}
    words = []
    for word in create_sweep_command([*SWEEPS[name]["command"]]):
        is_macro = word.startswith("${") and word.endswith("}")
        words += known[word[2:-1]] if is_macro else [word]
    return words
