"""Names of the columns of a study's tables."""

from collections.abc import Collection, Mapping, Sequence

from fl_lightning.errors import ConfigurationError, nearest

UNITS = {"sent by clients": (1e6, "MB"), "training": (1.0, "s")}
"""Divisor and unit of a column's numbers in LaTeX tables, keyed by column."""

TEXTS = ("learning rate", "seeds", "remarks")
"""Columns whose cells are text."""

COST_COLUMNS = ("samples", "sent by clients", "exchanges", "training")
"""Columns of costs. Each cost is the mean over the seeds."""

FURTHER = ("published", "ours - published", "learning rate", "seeds", *COST_COLUMNS, "remarks")
"""Columns to the right of the labels and metrics, in the order of the table."""

SERVER_PREFIX = "server/"
"""Prefix of the metric in the column ``server's model``.

A table has this column if another column shows the same metric for the clients' models."""

_MODELS = {
    "personal": "clients' models",
    "own": "clients' models on own data",
    "pooled": "clients' models on pooled own data",
}
"""Names of the models that a metric evaluates.

A key is a prefix, as in ``test/personal_accuracy``."""


def local_metrics(metrics: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the columns for clients' models, keyed by metric.

    Methods whose clients keep state have these columns.

    >>> [*local_metrics({"test_f1": "F1"})][:3]
    ['personal_test_f1', 'own_test_f1', 'pooled_test_f1']

    Args:
        metrics: Names of the table's columns, keyed by metric. New columns also name the metric, as
            in ``loss of clients' models``, except for the first metric.
    """
    columns: dict[str, str] = {}
    for number, (metric, words) in enumerate(metrics.items()):
        split, slash, name = metric.rpartition("/")  # a LightningModule may log test_f1
        of = f"{words} of " if number else ""
        columns |= {f"{split}{slash}{kind}_{name}": of + models for kind, models in _MODELS.items()}
        if number == 0:
            columns[f"{SERVER_PREFIX}{metric}"] = "server's model"
    return {name: words for name, words in columns.items() if name not in metrics}


def models_of(metric: str) -> str:
    """Return the name of the clients' models that a metric evaluates.

    The name is ``""`` if the metric evaluates the server's model.
    """
    kind, _, rest = metric.rpartition("/")[2].partition("_")
    return _MODELS.get(kind, "") if rest else ""


def begins_with(metric: str, *prefixes: str) -> bool:
    """Return whether a metric has one of these prefixes, as in ``test/own_acc`` or ``own_test/acc``."""
    return any(part.startswith(prefixes) for part in metric.split("/"))


def on_own_data(metric: str) -> bool:
    """Return whether a metric is measured on the clients' own data, and not on the server's."""
    return begins_with(metric, "own_", "pooled_", "client_")


def of_same_models(metric: str, like: str, first: str, known: Collection[str] = ()) -> str:
    """Return ``metric`` for the models that ``like`` evaluates.

    If ``metric`` names the clients' models already, it is returned unchanged.

    >>> of_same_models("test/auroc", like="test/personal_accuracy", first="test/accuracy")
    'test/personal_auroc'
    >>> known = ["test/accuracy_silobn", "test/loss_silobn"]
    >>> of_same_models("test/auroc", like="test/accuracy_silobn", first="test/accuracy", known=known)
    'test/auroc_silobn'
    >>> of_same_models("test_f1", like="own_test_acc", first="test_acc")  # of a LightningModule
    'own_test_f1'

    Args:
        metric: Name of a further metric of the table.
        like: Metric that replaces the table's first metric.
        first: Name of the table's first metric.
        known: Metrics of the run. If ``like`` evaluates a variant of the server's model, the run
            also has the variant's loss.
    """
    split, slash, name = metric.rpartition("/")
    variant = like.removeprefix(first) if like.startswith(f"{first}_") else ""
    if variant and f"{split}/loss{variant}" in known:
        return metric + variant
    return (
        f"{split}{slash}{like.rpartition('/')[2].partition('_')[0]}_{name}"
        if models_of(like) and not models_of(metric)
        else metric
    )


def of_any_model(metric: str) -> str:
    """Return the server model's metric. For ``test/personal_accuracy``, it is ``test/accuracy``."""
    split, slash, name = metric.removeprefix(SERVER_PREFIX).rpartition("/")
    return f"{split}{slash}{name.partition('_')[2] if models_of(metric) else name}"


def split_columns(text: str) -> list[str]:
    """Split the value of ``--columns``, such as ``"test accuracy, seeds"``, into columns."""
    return [column for part in text.split(",") if (column := part.strip())]


def check_columns(columns: Sequence[str], metrics: Mapping[str, str]) -> None:
    """Check the columns that a user chooses.

    Args:
        columns: Names of columns, or of metrics.
        metrics: Names of the table's columns, keyed by metric.

    Raises:
        ConfigurationError: A column does not exist.
    """
    every = {**metrics, **local_metrics(metrics)}
    for column in columns:
        if column not in (*every, *every.values(), *FURTHER):
            names = [*metrics.values(), *FURTHER]
            raise ConfigurationError(
                f"--columns: there is no column {column!r}{nearest(column, names)}; there are {', '.join(names)}"
            )
