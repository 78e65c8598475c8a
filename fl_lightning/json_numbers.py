"""Numbers in JSON, which has no NaN or infinity: they become the strings that Python and JavaScript convert back."""

import math
from typing import Any

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """A value, or a tree of them, as JSON can hold it: tensors as numbers, non-finite floats as strings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def restored(value: Any) -> Any:
    """The value that :func:`plain` was given, tensors aside."""
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
