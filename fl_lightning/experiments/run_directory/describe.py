"""Short descriptions of a run and its environment for titles and tables."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fl_lightning import __version__
from fl_lightning.aggregation import WeightedMean
from fl_lightning.clients.tasks import Task
from fl_lightning.models.convolutions import (
    ScaledStandardizedConv2d,
    SmallStandardizedConv2d,
    StandardizedConv2d,
    WeightNormConv2d,
)
from fl_lightning.models.fixup import FixupBlock
from fl_lightning.models.norm import FeatureNormLinear
from fl_lightning.recorded import describe
from fl_lightning.round.declarations import Declarations
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.record import Origin

_LAYERS: dict[str, type[nn.Module]] = {
    "BN": _BatchNorm,
    "GN": nn.GroupNorm,
    "LN": nn.LayerNorm,
    "IN": _InstanceNorm,
    "small WS": SmallStandardizedConv2d,
    "WS": StandardizedConv2d,
    "scaled WS": ScaledStandardizedConv2d,
    "weight norm": WeightNormConv2d,
    "FixUp": FixupBlock,
    "FN": FeatureNormLinear,
}


def method_name(module: FederatedModule, callbacks: Sequence[Declarations]) -> str:
    """Describe server optimizer and callbacks, such as ``FedAvg + FixBN(freeze_round=9)``."""
    optimizer = module.server_optimizer([torch.zeros(1, 1)])
    settings = optimizer.param_groups[0]
    base = f"server {type(optimizer).__name__}(lr={settings['lr']:g})"
    if isinstance(optimizer, torch.optim.SGD):
        momentum = settings["momentum"]
        base = f"FedAvgM(lr={settings['lr']:g}, momentum={momentum:g})" if momentum else base
        base = "FedAvg" if settings["lr"] == 1 and not momentum else base
    if not isinstance(module.aggregator, WeightedMean):
        base += f", {describe(module.aggregator)}"
    if module.statistics.rule is not module.aggregator or module.statistics.domain is not None:
        rule, domain = module.statistics.rule, module.statistics.domain
        base += f", statistics by {describe(rule)}" + (f" of {domain}" if domain else "")
    base = f"centralised twin of {base}" if module.centralised else base
    return " + ".join([base, *(", ".join(filter(None, (describe(x), x.remark(module)))) for x in callbacks)])


def identity(module: FederatedModule) -> dict[str, object]:
    """Return the content of a run's ``run.json``: name, tags, metrics and other facts."""
    methods, data = module.federated_callbacks, type(module.data).__name__
    base = method_name(module, []).partition("(")[0]
    partition = module.data.describe_partition()
    steps = f"E{module.local_steps}" if module.local_steps is not None else f"E{module.local_epochs}epochs"
    rate = f"lr{module.client.optimizer([torch.zeros(1, 1)]).defaults['lr']:g}"
    method = "+".join([base, *map(describe, methods)])
    return {
        "name": "-".join([method, data, partition.partition("(")[0], steps, rate, f"s{module.seed}"]),
        "tags": [base, *(type(method).__name__ for method in methods), data, model_name(module)],
        "git_commit": describe_environment()["git_commit"],
        "seed": module.seed,
        "method": method_name(module, methods),
        "partition": partition,
        "planned_rounds": module.planned_rounds,
        "continued_from": origin_in_words(module.record.continued_from),
        "metrics": shown_metrics(module.task),
    }


def shown_metrics(task: Task) -> dict[str, dict[str, str]]:
    """Return a dict with ``label`` and ``best`` for each metric of a task.

    The main metric comes first. ``best`` is ``"max"`` if large values are better, else ``"min"``.
    """
    return {
        name: {"label": task.shown.get(name, name.replace("_", " ")), "best": best}
        for name, best in task.best.items()
    }


def clients_table(module: FederatedModule) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the rows of a table with one row per client.

    The columns are the client's name if clients have names, the numbers of samples, local steps and rounds, the last training loss, and the
    number of samples of each class. The loss is the mean over the local steps of the client's last
    round, or None before the first round.
    """
    data = module.data
    histogram = data.partition_record().get("class_histogram") or [[]] * data.num_clients
    names = data.class_names or range(len(histogram[0]))
    named = ["name"] if data.client_names else []
    columns = ["client", *named, "training examples", "local steps", "rounds", "last training loss"]
    rows = []
    for client in range(data.num_clients):
        rounds, steps, loss = module.record.clients.get(client, (0, 0, None))
        name = data.client_names[client : client + 1]
        rows.append([client, *name, data.num_examples(client), steps, rounds, loss, *histogram[client]])
    return [*columns, *(f"class {name}" for name in names if histogram[0])], rows


def model_name(module: FederatedModule) -> str:
    """Return the class name of a model, or of the original model if the model is compiled."""
    return type(getattr(module.model, "_orig_mod", module.model)).__name__


def run_title(module: FederatedModule) -> list[str]:
    """Return the lines of a picture's title.

    The first line names the method. The second line names model, data and seed. A further line is
    added for each checkpoint from which the run continued.
    """
    norms = norm_names(module.model)
    model = model_name(module) + (f" ({', '.join(norms)})" if norms else "")
    data = f"{type(module.data).__name__}: {module.data.describe_partition()}"
    lines = [method_name(module, module.federated_callbacks), f"{model}; {data}; seed {module.seed}"]
    return [*lines, *origin_in_words(module.record.continued_from)]


def norm_names(model: nn.Module) -> list[str]:
    """Return the kinds of a model's normalization layers and of their replacements.

    An example is ``["GN", "WS"]``: Group Normalization and weight standardization.
    """
    kinds = {_name(module) for module in model.modules()}
    return [name for name in _LAYERS if name in kinds]


def _name(module: nn.Module) -> str:
    if isinstance(module, nn.GroupNorm) and module.num_groups in (1, module.num_channels):
        return "LN" if module.num_groups == 1 else "IN"
    return next((name for name, kind in _LAYERS.items() if isinstance(module, kind)), "")


def origin_in_words(continued_from: Sequence[Origin]) -> list[str]:
    """Describe the checkpoints from which a run continued: run, round and changed settings."""
    lines = []
    for entry in continued_from:
        path = Path(entry["checkpoint"])
        place = path.parent.parent.name or path.name
        differs = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in entry["differs"].items())
        words = f"continued from round {entry['round']} of {place}: {differs}".removesuffix(": ")
        lines.append(" ".join(words.split()))
    return lines


def describe_computing(module: FederatedModule) -> dict[str, object]:
    """Return the executor, the device and other facts that affect rounding errors.

    ``block_size`` is the number of clients that the executor computes at once, or None if the
    executor computes one client after the other.
    """
    clients = 1 if module.centralised else module.plan.cohort_size
    device = module.device
    return {
        "executor": describe(module.executor),
        "block_size": module.executor.clients_together(clients),
        "compiled": module.executor.compilation.compiled,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def describe_environment() -> dict[str, str | None]:
    """Return the versions of the software, the platform and the git commit of a run.

    The commit ends in ``-dirty`` if files have changed since the commit. Without git, the commit is
    None.
    """
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": L.__version__,
        "fl_lightning": __version__,
        "platform": platform.platform(),
        "git_commit": _git_commit(),
    }


def process_seconds() -> float | None:
    """Return the age of this process in seconds; None on a system without ``/proc``."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _git_commit() -> str | None:
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
