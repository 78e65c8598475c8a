"""Result of a finished run: the keys of ``result.json``, and a function that reads the file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, cast

from pydantic import FiniteFloat, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import restored
from fl_lightning.round.record import Origin


@with_config(extra="allow", strict=True)
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
    diverged_round: NotRequired[int]
    stopped: NotRequired[str]
    upload_bytes: FiniteFloat
    download_bytes: FiniteFloat
    train_seconds: FiniteFloat
    process_seconds: NotRequired[FiniteFloat]
    continued_from: NotRequired[list[Origin]]
    bn_statistics: NotRequired[Sequence[Sequence[int | str]]]
    updates_not_finite: NotRequired[dict[str, int]]
    learning_rates: NotRequired[dict[str, FiniteFloat]]
    executor: NotRequired[str]
    best: NotRequired[dict[str, str]]
    metrics: NotRequired[list[str]]
    arrays: NotRequired[dict[str, list[object]]]
    reports: NotRequired[dict[str, str]]
    seed: NotRequired[int]
    loaded: NotRequired[str]
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
    try:
        content = restored(json.loads(path.read_text()))
        TypeAdapter(Result).validate_python(content)
        result = cast("Result", content)
        TypeAdapter(dict[str, float]).validate_python(metric_values(result), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(
            f"{path} is not what a finished run writes: {where}: {first['msg'].lower()}; restore the file or run it again"
        ) from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not what a finished run writes: it cannot be read as JSON; restore the file or run it again"
        ) from error
    return result
