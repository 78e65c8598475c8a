"""Report rule of a study: it says which evaluations give the value of a run."""

import re
from collections.abc import Iterable

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.directory import Config

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
