"""What a run leaves behind: the files of its directory and the table that ``fit`` ends with."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from fl_lightning.aggregation import WeightedMean
from fl_lightning.batch_norm.kinds import KIND_LABELS
from fl_lightning.console import format_bytes, print_table
from fl_lightning.errors import ConfigurationError
from fl_lightning.models.describe import norm_names
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import policy_table
from fl_lightning.run_directory.directory import Attempt, environment_record, write_json, write_text
from fl_lightning.run_directory.drawings import draw_partition, draw_reports, draw_results
from fl_lightning.run_directory.metrics import cut_back
from fl_lightning.run_directory.report import reports_of


class RunFiles(L.Callback):
    """Writes what identifies a run into its directory and prints the policy in force.

    Args:
        attempt: The run's folder.
        config: The resolved configuration as YAML.
        rows_are_known: Whether a resumed run has the metrics of the rounds before, which are then checked.
    """

    def __init__(self, attempt: Attempt | None, config: str, rows_are_known: bool = True) -> None:
        self.attempt = attempt
        self.config = config
        self.rows_are_known = rows_are_known

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``config.yaml``, ``partition.json`` and ``policy.json``, draw the partition; on resume cut ``metrics.jsonl`` back."""
        assert isinstance(pl_module, FederatedModule)
        table = policy_table(pl_module.model, pl_module.federated_callbacks, pl_module.planned_rounds)
        if not trainer.global_step:
            print_policy(table)
            choice = pl_module.executor_choice
            if choice is not None:
                reason = f"{choice.reason}; model.executor sets another"
                print_table("Executor", {type(choice.executor).__name__: reason})
        if self.attempt is not None:
            if trainer.global_step and self.rows_are_known:
                cut_back(self.attempt.metrics, trainer.global_step)
            for path in (self.attempt.result, self.attempt.class_accuracy):
                path.unlink(missing_ok=True)  # of a shorter run that this one takes further
            write_text(self.attempt.config, self.config)
            write_json(self.attempt.partition, pl_module.data.partition_record())
            write_json(self.attempt.policy, table)
            draw_partition(self.attempt, pl_module.data.class_names, run_title(pl_module))


def print_policy(table: Mapping[str, str]) -> None:
    """Print what happens to each kind of state in a round."""
    print_table("State of the model", {KIND_LABELS[kind]: treatment for kind, treatment in table.items()})


def method_name(module: FederatedModule, callbacks: Sequence[L.Callback]) -> str:
    """The method of a run in the field's words, such as ``"FedAvg + FixBN(freeze_fraction=0.5)"``."""
    optimizer = module.server_optimizer([torch.zeros(1)])
    settings = optimizer.param_groups[0]
    base = f"server {type(optimizer).__name__}(lr={settings['lr']:g})"
    if isinstance(optimizer, torch.optim.SGD):
        momentum = settings["momentum"]
        base = f"FedAvgM(lr={settings['lr']:g}, momentum={momentum:g})" if momentum else base
        base = "FedAvg" if settings["lr"] == 1 and not momentum else base
    if not isinstance(module.aggregator, WeightedMean):
        base += f", {describe(module.aggregator)}"
    base = f"centralised twin of {base}" if module.centralised else base
    return " + ".join([base, *map(describe, callbacks)])


def describe(thing: object) -> str:
    """An object as it could be written: its class and the constructor arguments that are not the defaults."""
    parameters = list(inspect.signature(type(thing)).parameters.values())
    settings = {p.name: getattr(thing, p.name) for p in parameters if hasattr(thing, p.name)}
    changed = [
        f"{p.name}={settings[p.name]}"
        for p in parameters
        if p.name in settings and settings[p.name] != p.default
    ]
    return f"{type(thing).__name__}({', '.join(changed)})"


def run_title(module: FederatedModule) -> list[str]:
    """What a picture of a run says about it: a line with its method, one with model, data, partition and seed."""
    norms = norm_names(module.model)
    model = type(module.model).__name__ + (f" ({', '.join(norms)})" if norms else "")
    data = f"{type(module.data).__name__}: {module.data.describe_partition()}"
    return [method_name(module, module.federated_callbacks), f"{model}; {data}; seed {module.seed}"]


def draw_pictures(attempt: Attempt | None, module: FederatedModule) -> None:
    """Draw what a run has found into its folder, where it has one (see ``fl_lightning.run_directory.drawings``)."""
    if attempt is not None:
        draw_results(attempt, run_title(module))
        draw_reports(attempt, reports_of(module.federated_callbacks), run_title(module))


def collect_result(
    trainer: L.Trainer, module: FederatedModule, attempt: Attempt | None, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """What ``result.json`` holds.

    Args:
        trainer: The trainer after ``fit``.
        module: The trained module.
        attempt: The run's folder, None where nothing is written (``fast_dev_run``).
        metrics: Evaluation metrics of the final server model and its variants, by name; the server's come first.
    """
    record = module.record
    order = sorted(
        metrics,
        key=lambda name: (name.startswith("test/"), name.partition("/")[2] not in module.evaluation.metrics),
    )
    reports = reports_of(module.federated_callbacks)
    return {
        "method": method_name(module, module.federated_callbacks),
        "model": type(module.model).__name__,
        "partition": module.data.describe_partition(),
        "rounds": trainer.global_step,
        "planned_rounds": module.planned_rounds,
        "samples": record.samples,
        **{name: metrics[name] for name in order},
        "class_accuracy": _class_accuracy(module, metrics),
        "diverged": record.diverged,
        "upload_bytes": record.upload_bytes,
        "download_bytes": record.download_bytes,
        "train_seconds": record.seconds,
        "executor": describe(module.executor),
        **{name: value for report in reports for name, value in report.result().items()},
        "reports": {name: text for report in reports for name, text in report.result_lines().items()},
        "seed": module.seed,
        "directory": _shown(attempt.path) if attempt is not None else None,
        "environment": environment_record(),
    }


def print_result(result: Mapping[str, Any]) -> None:
    """Print a result as a table."""
    rows = {
        "method": result["method"],
        "model": result["model"],
        "partition": result["partition"],
        "rounds": f"{result['rounds']:,}" + ("  (diverged)" if result["diverged"] else ""),
        "samples seen": f"{result['samples']:,}",
        **{name: f"{value:.4f}" for name, value in result.items() if "/" in name},
        "sent by clients": format_bytes(result["upload_bytes"]),
        "sent to clients": format_bytes(result["download_bytes"]),
        **result["reports"],
        "training time": f"{result['train_seconds']:.1f} s",
        "files": result["directory"] or "none (fast_dev_run)",
    }
    print_table("Result", rows)


def write_predictions(path: Path, outputs: Sequence[Tensor], batches: Iterable[Any]) -> int:
    """Write class predictions as CSV: index, target, prediction and its probability.

    Args:
        path: The file.
        outputs: Class scores ``[b, classes]`` of each batch.
        batches: The batches ``(inputs, targets)`` that they belong to.

    Returns:
        The number of predictions.
    """
    lines = ["index,target,prediction,probability"]
    for scores, (_, targets) in zip(outputs, batches, strict=True):
        if scores.ndim != 2 or targets.shape != scores.shape[:1] or targets.is_floating_point():
            raise ConfigurationError(
                f"predict writes class predictions, but outputs {tuple(scores.shape)} and targets {tuple(targets.shape)} "
                f"({targets.dtype}) are not those of a classifier; use Trainer.predict from Python"
            )
        probability, prediction = scores.float().softmax(1).max(1)
        for target, guess, chance in zip(
            targets.tolist(), prediction.tolist(), probability.tolist(), strict=True
        ):
            lines.append(f"{len(lines) - 1},{target},{guess},{chance:.6g}")
    write_text(path, "\n".join(lines) + "\n")
    return len(lines) - 1


def _class_accuracy(module: FederatedModule, metrics: Mapping[str, float]) -> dict[str, Any] | None:
    """Accuracy by class of the final server model in the last evaluation, that of the test data where there are any."""
    split = next((split for split in ("test", "val") if f"{split}/accuracy" in metrics), None)
    if split is None:
        return None
    evaluation, names = module.evaluation, module.data.class_names
    count = len(evaluation.class_accuracy)
    return {
        "split": split,
        "classes": list(names) if names is not None and len(names) == count else list(map(str, range(count))),
        "accuracy": evaluation.class_accuracy,
        "samples": evaluation.class_samples,
    }


def _shown(directory: Path) -> str:
    path, here = directory.resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
