"""Result of a finished run: the keys of ``result.json``, and a function that reads the file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import restored
from fl_lightning.round.record import Origin


class Result(TypedDict):
    """Content of ``result.json``, without the metrics and without the entries that reports add.

    Metrics are the entries with a slash in their name, such as ``test/accuracy``, and the entries
    named in ``metrics``.
    """

    method: str
    model: str
    partition: str
    rounds: int
    planned_rounds: int
    samples: int
    diverged: bool
    diverged_round: NotRequired[int | None]
    stopped: NotRequired[str | None]
    upload_bytes: float
    download_bytes: float
    train_seconds: float
    process_seconds: NotRequired[float]
    continued_from: NotRequired[list[Origin]]
    bn_statistics: NotRequired[Sequence[Sequence[int | str]]]
    updates_not_finite: NotRequired[dict[str, int]]
    learning_rates: NotRequired[dict[str, float]]
    executor: NotRequired[str]
    best: NotRequired[dict[str, str]]
    metrics: NotRequired[list[str]]
    arrays: NotRequired[dict[str, list[object]]]
    reports: NotRequired[dict[str, str]]
    seed: NotRequired[int]
    loaded: NotRequired[str | None]
    directory: NotRequired[str | None]
    environment: dict[str, object]
    provenance: NotRequired[list[dict[str, str]]]
    data: NotRequired[dict[str, str]]
    computed_by: NotRequired[dict[str, object]]


def metric_values(result: Result) -> dict[str, float]:
    """Return the metrics in a result.

    Metrics are the entries with a slash, such as ``test/accuracy``, and those listed in ``metrics``.
    """
    listed = result.get("metrics", ())
    return {name: cast("float", value) for name, value in result.items() if "/" in name or name in listed}


def read_result(path: Path) -> Result:
    """Read a ``result.json``.

    Raises:
        ConfigurationError: The file is missing, or is not the result of a finished run.
    """
    reason = "it cannot be read as JSON"
    try:
        content = restored(json.loads(path.read_text()))
        missing = Result.__required_keys__ - content.keys()
        if not missing:
            return cast("Result", content)
        reason = f"it has no {min(missing)}"
    except (OSError, ValueError, AttributeError, RecursionError):
        pass
    raise ConfigurationError(
        f"{path} is not what a finished run writes: {reason}; restore the file or run it again"
    )


def has_named_clients(partition: Path) -> bool:
    """Return whether the clients of a run have names, given its file ``partition.json``."""
    return partition.is_file() and "clients" in json.loads(partition.read_text())
