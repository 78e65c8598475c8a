"""Columns of a study's tables: their names, and those of methods whose clients keep state."""

from collections.abc import Iterable, Mapping, Sequence

from fl_lightning.errors import ConfigurationError, nearest

UNITS = {"sent by clients": (1e6, "MB"), "training": (1.0, "s")}
"""Size and name of the unit of columns whose numbers share one unit in LaTeX."""

TEXTS = ("learning rate", "seeds", "remarks")
"""Columns that are no numbers."""

COSTS = ("samples", "sent by clients", "exchanges", "training")
"""Columns of costs, means over the seeds."""

FURTHER = ("published", "ours - published", "learning rate", "seeds", *COSTS, "remarks")
"""Columns beside labels and metrics, in order."""

SERVER = "server/"
"""Prefix of the first metric of the server's model, if a combination's own metric replaces it."""

COLUMNS = "columns of the tables after the labels, such as 'test accuracy, seeds, training'"
"""Help of ``--columns``."""

TITLES = "titles in the pictures beside the tables; their captions are text files (default: no titles)"
"""Help of ``--titles``."""

_MODELS = {"personal": "clients' models", "own": "clients' models on own data"}
"""Models that a metric measures, by the first word of its name."""


def local_metrics(metrics: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of methods whose clients keep state, by metric.

    >>> [*local_metrics({"test/accuracy": "accuracy"}).values()]
    ["clients' models", "clients' models on own data", "server's model"]

    Args:
        metrics: Columns of the study's table by metric; further columns of the first are named by
            their models alone.
    """
    columns: dict[str, str] = {}
    for number, (metric, words) in enumerate(metrics.items()):
        split, _, name = metric.partition("/")
        of = f"{words} of " if number else ""
        columns |= {f"{split}/{kind}_{name}": of + models for kind, models in _MODELS.items()}
        if number == 0:
            columns[f"{SERVER}{metric}"] = "server's model"
    return {name: words for name, words in columns.items() if name not in metrics}


def models_of(metric: str) -> str:
    """Return the clients' models that a metric measures, in words; ``""`` for the server's model."""
    kind, _, rest = metric.rpartition("/")[2].partition("_")
    return _MODELS.get(kind, "") if rest else ""


def of_any_model(metric: str) -> str:
    """Return the metric of the server's model that is computed as a metric of clients' models is."""
    split, _, name = metric.removeprefix(SERVER).rpartition("/")
    return f"{split}/{name.partition('_')[2] if models_of(metric) else name}"


def split_columns(text: str) -> list[str]:
    """Return the columns of ``--columns``, such as ``"test accuracy, seeds"``."""
    return [column for part in text.split(",") if (column := part.strip())]


def check_columns(columns: Sequence[str], metrics: Mapping[str, str]) -> None:
    """Check the columns that a user chooses.

    Args:
        columns: Names of columns, or of metrics.
        metrics: Columns of the study's table by metric.

    Raises:
        ConfigurationError: A study has no such column.
    """
    every = {**metrics, **local_metrics(metrics)}
    for column in columns:
        if column not in (*every, *every.values(), *FURTHER):
            names = [*metrics.values(), *FURTHER]
            raise ConfigurationError(
                f"--columns: there is no column {column!r}{nearest(column, names)}; there are {', '.join(names)}"
            )


def chosen_columns(header: Sequence[str], metrics: Mapping[str, str], columns: Iterable[str]) -> list[int]:
    """Return the places of chosen columns, in the order of choice; absent columns are left out."""
    names = [metrics.get(column, column) for column in columns]
    return [header.index(name) for name in dict.fromkeys(names) if name in header]
