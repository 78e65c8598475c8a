"""End of a run: final evaluation, ``result.json`` and the printed table."""

import re
from collections.abc import Mapping
from typing import cast

from fl_lightning.clients.tasks import best_is
from fl_lightning.console import format_bytes, print_table
from fl_lightning.experiments.run_directory.describe import (
    describe_environment,
    method_name,
    model_name,
    origin_in_words,
    process_seconds,
)
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.drawings import draw_pictures
from fl_lightning.experiments.run_directory.result import Result, metric_values
from fl_lightning.files import write_json
from fl_lightning.methods.run_report import Report
from fl_lightning.pictures.style import PERSONAL
from fl_lightning.recorded import describe
from fl_lightning.round.final_evaluation import final_classes, final_metrics
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import policy_table, stages_in_words

_RATES = ("client/lr", "server/lr")
_MOST_ROWS = 15  # of the printed table, unless observers alone fill it
_FEWEST_METRICS = 3
_WHOSE = {
    "own_": "own model, own data",
    "personal_": "own model, the server's data",
    "client_": "the server's model, own data",
    "pooled_": "own model, own data of all clients together",
}
"""Whose model is evaluated on whose data, by the start of a metric's name."""


def finish_run(
    module: FederatedModule, attempt: Attempt | None, stopped: str | None = None, verbose: bool = False
) -> Result:
    """Evaluate the final server model; print, write and draw the result.

    Args:
        module: The trained module.
        attempt: The run's folder; None with ``fast_dev_run``.
        stopped: Reason why a callback stopped the run before its last round; None if all rounds
            were trained.
        verbose: Whether to print all values; otherwise at most 15 rows, test values first
            and losses last.

    Returns:
        The content of ``result.json``.
    """
    metrics = final_metrics(module)
    result = _collect(module, attempt, metrics, stopped)
    if attempt is not None:
        write_json(attempt.result, result)
    _print(result, verbose)
    draw_pictures(attempt, module)
    return result


def _collect(
    module: FederatedModule, attempt: Attempt | None, metrics: Mapping[str, float], stopped: str | None
) -> Result:
    """Return the content of ``result.json``.

    The metrics of the clients' own models come first.
    """
    record = module.record
    kinds = [*([f"{prefix}_{module.task.quality}"] for prefix in PERSONAL), module.evaluation.metrics]
    order = sorted(metrics, key=lambda x: (x[:4] == "test", *(x.partition("/")[2] not in y for y in kinds)))
    reports = [cb for cb in module.federated_callbacks if isinstance(cb, Report)]
    rounds = module.trainer.global_step
    treated = policy_table(module.model, module.federated_callbacks, module.planned_rounds)
    stages = treated.get("mean", [])
    if stages != (of_variance := treated.get("var", stages)):
        words = f"mean {stages_in_words(stages)}, variance {stages_in_words(of_variance)}"
        stages = [(1, words)]
    result: Result = {
        "method": method_name(module, module.federated_callbacks),
        "model": model_name(module),
        "partition": module.data.describe_partition(),
        "rounds": rounds,
        "planned_rounds": module.planned_rounds,
        "bn_statistics": [[*stage] for stage in stages if isinstance(stage[0], int) and stage[0] <= rounds],
        "samples": record.samples,
        "diverged": record.diverged,
        "upload_bytes": record.upload_bytes,
        "download_bytes": record.download_bytes,
        "train_seconds": record.seconds,
        "executor": describe(module.executor),
        "computed_by": record.computed_by,
        "continued_from": record.continued_from,
        "reports": {name: text for report in reports for name, text in report.result_lines().items()},
        "seed": module.seed,
        "directory": str(attempt.path) if attempt is not None else None,
        "environment": {**describe_environment()},
        "provenance": record.provenance,
        "data": record.data,
        "stopped": stopped,
        "diverged_round": record.diverged_round,
        "updates_not_finite": {str(client): count for client, count in record.not_finite.items()},
        "learning_rates": {x: rate for x, rate in record.metrics.items() if x.startswith(_RATES)},
        "metrics": [name for name in metrics if "/" not in name],
        "arrays": module.evaluation.arrays,
        "loaded": module.data.loaded,
    }
    if (seconds := process_seconds()) is not None:
        result["process_seconds"] = seconds
    if any(best_is(name) != best for name, best in module.task.best.items()):
        result["best"] = module.task.best
    named: dict[str, object] = {name: metrics[name] for name in order}
    named[f"class_{module.task.by_class}"] = final_classes(module, metrics)
    for report in reports:
        named |= report.result()
    return cast("Result", {**result, **named})


def _print(result: Result, verbose: bool) -> None:
    origin = origin_in_words(result["continued_from"])
    rows = {
        "method": result["method"],
        "model": result["model"],
        "partition": result["partition"],
        "rounds": f"{result['rounds']:,}{_extended(result)}{_diverged(result)}",
        **({"not finite": _not_finite(updates)} if (updates := result.get("updates_not_finite")) else {}),
        **(
            {"BN statistics": stages_in_words((start, str(words)) for start, words in stages)}
            if (stages := result["bn_statistics"])
            else {}
        ),
        "samples seen": f"{result['samples']:,}",
    }
    below = {
        "sent by clients": format_bytes(result["upload_bytes"]),
        "sent to clients": format_bytes(result["download_bytes"]),
        **result["reports"],
        **({"continued": origin[-1].removeprefix("continued ")} if origin else {}),
        "training time": f"{result['train_seconds']:.1f} s without evaluations",
        "files": result["directory"] or "none (fast_dev_run)",
    }
    metrics = {name: f"{value:.4f}{_whose(name)}" for name, value in metric_values(result).items()}
    if not verbose and len(rows) + len(metrics) + len(below) > _MOST_ROWS:
        room = max(_MOST_ROWS - len(rows) - len(below) - 1, _FEWEST_METRICS)
        words = {name: re.split("[/_]", name) for name in metrics}  # a LightningModule logs test_acc
        order = sorted(metrics, key=lambda name: ("test" not in words[name], words[name][-1] == "loss"))
        if hidden := order[room:]:
            metrics = {name: text for name, text in metrics.items() if name not in hidden}
            metrics["further values"] = (
                f"{len(hidden)} in result.json; --verbose (in Python verbose=True) prints them"
            )
    print_table("Result", rows | metrics | below)


def _whose(name: str) -> str:
    start = next((x for x in _WHOSE if name.removeprefix("val/").removeprefix("test/").startswith(x)), "")
    return f"  ({_WHOSE[start]})" if start else ""


def _extended(result: Result) -> str:
    planned = result["planned_rounds"]
    return f"  (planned: {planned:,})" if result["rounds"] > planned else ""


def _diverged(result: Result) -> str:
    return f"  (diverged, first in round {result['diverged_round']})" if result["diverged"] else ""


def _not_finite(updates: Mapping[str, int]) -> str:
    count, clients = sum(updates.values()), len(updates)
    return f"{count:,} update{'s' * (count > 1)} of {clients:,} client{'s' * (clients > 1)}"
