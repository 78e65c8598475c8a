"""Exceptions for mistakes that a user can correct."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from difflib import get_close_matches
from pathlib import Path
from traceback import extract_tb
from types import TracebackType


class ConfigurationError(ValueError):
    """An invalid setting, data set or checkpoint.

    The message is one line with the setting, its value and a remedy. The command line prints the
    message without a traceback, and exits with ``exit_status``.

    Example:
        >>> from fl_lightning.callbacks import FedProx
        >>> FedProx(mu=-1)
        Traceback (most recent call last):
        fl_lightning.errors.ConfigurationError: FedProx.mu: -1 must be at least 0 (0 is FedAvg)
    """

    exit_status = 2


class Diverged(ConfigurationError):
    """Divergence: training on finite data has produced non-finite numbers."""

    exit_status = 3


class OtherData(ConfigurationError):
    """Mismatch: the checkpoint was trained on different data than the current run."""

    exit_status = 4


class CannotVectorize(ConfigurationError):
    """A model or batches that ``torch.func.vmap`` does not support.

    The clients must be computed one after the other.
    """


_EXTRAS = {
    "datasets": "hf",
    "pyarrow": "hf",
    "ray": "ray",
    "segmentation_models_pytorch": "segmentation",
    "submitit": "slurm",
    "timm": "timm",
    "wandb_workspaces": "dashboard",
}
"""Optional packages, each with the extra that installs it (``fl_lightning[EXTRA]``)."""


_COMPARISONS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""Words and comparison of each bound of :func:`check_number`."""


def missing_module(name: str, owner: str = "") -> str:
    """Return a clause such as ``"; pip install numpy"`` for a missing module.

    The clause is empty if the module may belong to the user, for example if its name has a dot.

    Args:
        name: The missing module.
        owner: The importing module. The clause is empty if both modules are in the same package,
            because the name is then probably misspelt.
    """
    package = name.partition(".")[0]
    if package in _EXTRAS:
        return f"; pip install 'fl_lightning[{_EXTRAS[package]}]'"
    return "" if not name or "." in name or owner.partition(".")[0] == package else f"; pip install {package}"


class doing(AbstractContextManager[None]):  # a function for its users
    """Context that adds a note to an exception, which the command line prints.

    ``StopIteration`` leaves the block as ``RuntimeError``. Otherwise, a loop around the block would
    end without an error.

    Args:
        what: Activity of the block, such as ``"drawing the batch of client 3"``, or a function that
            returns this text. Pass a function if the text is slow to make.
    """

    def __init__(self, what: str | Callable[[], str]) -> None:
        self._what = what

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        told = stopped(error) if isinstance(error, StopIteration) else error
        told.add_note(self._what if isinstance(self._what, str) else self._what())
        if told is not error:
            raise told from error


def stopped(error: StopIteration) -> RuntimeError:
    """Return the exception to raise for a ``StopIteration`` that no loop has caught."""
    place = extract_tb(error.__traceback__)[-1]
    words = f" ({str(error).strip().splitlines()[-1]})" if str(error).strip() else ""
    return RuntimeError(
        f"StopIteration{words} was raised in {Path(place.filename).name}, line {place.lineno}, where no loop catches it; iterate with "
        "for, or give next() a default"
    )


def check_choice(setting: str, value: object, choices: Iterable[str]) -> None:
    """Raise a ``ConfigurationError`` if a value is not one of the choices.

    Args:
        setting: Name of the setting, such as ``"FixBN.freeze"``.
        value: Value of the setting.
        choices: Allowed values.
    """
    names = list(choices)
    if value not in names:
        raise ConfigurationError(f"{setting}: {value!r} must be one of {', '.join(names)}")


def check_at_least(least: int, **settings: int) -> None:
    """Raise a ``ConfigurationError`` for the first setting that is no whole number, or below ``least``."""
    for name, value in settings.items():
        whole = "" if hasattr(value, "__index__") else " and a whole number"
        if whole or value < least:
            raise ConfigurationError(f"{name} must be at least {least}{whole}, found {value}")


def check_number(setting: str, value: float, note: str = "", **bounds: float) -> None:
    """Raise a ``ConfigurationError`` if a number is out of range or NaN.

    Args:
        setting: Name of the setting, such as ``"FedProx.mu"``.
        value: Value of the setting.
        note: End of the message, such as ``" (0 is FedAvg)"``.
        bounds: Bounds of the range: ``least``, ``above``, ``most`` or ``below``.

    Example:
        >>> check_number("FedEx.discount", 2.0, least=0, most=1)
        Traceback (most recent call last):
        fl_lightning.errors.ConfigurationError: FedEx.discount: 2.0 must be at least 0 and at most 1
    """
    if not all(_COMPARISONS[name][1](value, bound) for name, bound in bounds.items()):
        words = [
            "finite" if bound == math.inf else f"{_COMPARISONS[name][0]} {bound}"
            for name, bound in bounds.items()
        ]
        raise ConfigurationError(f"{setting}: {value} must be {' and '.join(words)}{note}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a clause such as ``"; did you mean FixBN?"``; empty if no known name is similar.

    Args:
        name: The unknown name.
        known: Known names. Case is ignored. Names that begin with ``name`` are preferred.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = [match for match in by_lower if match.startswith(name.lower())][:3]
    matches = matches or get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(by_lower[match] for match in matches)}?" if matches else ""


def counted(numbers: Mapping[str, int]) -> str:
    """Return names with their numbers, such as ``"Oslo: 3, Bergen: 1"``; at most ten names."""
    words = [f"{name}: {number}" for name, number in numbers.items()]
    return ", ".join(words[:10]) + (f" and {len(words) - 10} more" if len(words) > 10 else "")
