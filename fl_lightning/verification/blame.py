"""Whose line an exception arose in."""

import sys
import traceback
from pathlib import Path

from fl_lightning.round.callback import FederatedCallback


def origin(error: BaseException, method: type[FederatedCallback]) -> str:
    """Where in the code of a method's class an exception arose.

    Args:
        error: The exception.
        method: The class.

    Returns:
        A text such as ``"on_round_end, methods.py line 12"``; empty where none of its code was running.
    """
    own = {
        getattr(sys.modules.get(cls.__module__), "__file__", None)
        for cls in method.__mro__[: method.__mro__.index(FederatedCallback)]
    }
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    if not frames:
        return ""
    return f"{frames[-1].name}, {Path(frames[-1].filename).name} line {frames[-1].lineno}"


def in_words(error: BaseException, method: type[FederatedCallback]) -> str:
    """An exception in one line: its type, its place in the method's code, its message."""
    place = origin(error, method)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f' in {place}' if place else ''}: {text if len(text) < 200 else text[:197] + '...'}"
