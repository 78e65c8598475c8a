"""The result of a finished run (``result.json``), read back and checked."""

import json
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import restored


class Result(TypedDict):
    """What others read of a result, beside its metrics: the names with a slash."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]  # pydantic's way to configure a TypedDict
    method: str
    model: str
    partition: str
    rounds: int
    planned_rounds: int
    samples: int
    diverged: bool
    diverged_round: NotRequired[int]
    upload_bytes: FiniteFloat
    download_bytes: FiniteFloat
    train_seconds: FiniteFloat
    continued_from: NotRequired[list[dict[str, Any]]]
    environment: dict[str, Any]
    provenance: NotRequired[list[dict[str, Any]]]
    data: NotRequired[dict[str, Any]]
    computed_by: NotRequired[dict[str, Any]]


def read_result(path: Path) -> dict[str, Any]:
    """Read a ``result.json``.

    Args:
        path: The file.

    Raises:
        ConfigurationError: There is no such file, or it is not what a finished run writes.
    """
    try:
        content = restored(json.loads(path.read_text()))
        numbers = {name: value for name, value in dict(content).items() if "/" in name}
        TypeAdapter(Result).validate_python(content)
        TypeAdapter(dict[str, float]).validate_python(numbers, strict=True)
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
    return dict(content)
