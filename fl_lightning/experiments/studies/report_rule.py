"""Report rule of a study: it says which evaluations give the value of a run."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.directory import Config

if TYPE_CHECKING:
    from fl_lightning.experiments.run_directory.finished import Result

LAST, BEST, MEAN = "last", "best", r"mean of the last ([1-9]\d*)"
"""Report rules. ``MEAN`` is a regular expression with a group for the number of evaluations."""


def rule_in_words(rule: str) -> str:
    """Return a report rule in words, for tables.

    >>> rule_in_words("mean of the last 5")
    'mean of the last 5 evaluations'
    """
    words = {LAST: "after the last round", BEST: "best on test data: optimistic"}
    return words.get(rule, f"{rule} evaluations")


def check_rule(rule: str, metrics: Iterable[str], config: Config) -> None:
    """Check, before training, that a run will have enough evaluations for its report rule.

    Args:
        rule: Report rule.
        metrics: Metrics of the study's table.
        config: Resolved configuration of a cell.

    Raises:
        ConfigurationError: Test data are evaluated only once, or training evaluates too rarely.
    """
    trainer, data = config["trainer"], (config.get("data") or {}).get("init_args") or {}
    rounds, every = trainer.get("max_epochs"), trainer.get("check_val_every_n_epoch")
    mean = re.fullmatch(MEAN, rule)
    wanted = 1 if rule == LAST else int(mean[1]) if mean else 2
    if wanted > 1 and data.get("val_fraction") and any(metric.startswith("test/") for metric in metrics):
        raise ConfigurationError(
            f"report: {rule!r} needs evaluations of test data in training, but data.val_fraction is {data['val_fraction']}; "
            "set data.val_fraction to 0, or write 'last'"
        )
    if rounds and every and -(-rounds // every) < wanted:
        raise ConfigurationError(
            f"report: {rule!r} needs {wanted} evaluations in a run, but trainer.check_val_every_n_epoch {every} gives "
            f"{-(-rounds // every)} in {rounds} rounds; reduce trainer.check_val_every_n_epoch, or write 'last'"
        )


def reported(rule: str, name: str, result: "Result", rows: Sequence[Mapping[str, float]]) -> float:
    """Return a metric of a finished run, computed by a report rule.

    Args:
        rule: Report rule: ``"last"``, ``"best"``, or for example ``"mean of the last 5"``.
        name: Name of a metric in the result.
        result: Result of the run.
        rows: Rows of ``metrics.jsonl``.

    Raises:
        ConfigurationError: Training has evaluated the metric too rarely, or the rule is ``"best"``
            and the metric's direction is unknown.
    """
    # imported late, so that mistakes in a study's file are reported before PyTorch is imported
    from fl_lightning.experiments.run_directory.finished import metric_values
    from fl_lightning.round.tasks import best_is

    last = metric_values(result)[name]
    if rule == LAST:
        return last
    by_round = {row["round"]: row[name] for row in rows if name in row and row["round"] > 0}
    # the value of the last evaluation is in the result
    values = [*{**by_round, result["rounds"]: last}.values()]
    mean = re.fullmatch(MEAN, rule)
    wanted = int(mean[1]) if mean else 2
    if len(values) < wanted:
        raise ConfigurationError(
            f"report: {rule!r} needs {wanted} evaluations of {name} in a run, but a run has only {len(values)}; reduce "
            "trainer.check_val_every_n_epoch and set data.val_fraction to 0, or write 'last'"
        )
    if mean:
        return statistics.mean(values[-wanted:])
    direction = best_is(name, known=result.get("best", {}))
    if direction is None:
        raise ConfigurationError(
            f"report: {name} has no best value, as it is not known whether large values are good; write 'last' or 'mean of the last 5'"
        )
    finite = [value for value in values if isfinite(value)]
    return (min if direction == "min" else max)(finite or values)
