"""The exceptions for input that a user can mend."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class ConfigurationError(ValueError):
    """A setting, a data set or a checkpoint that cannot be used.

    The message is one line that names the setting, the value that was found and what would work. The command line
    prints it without a traceback and exits with ``exit_status``.
    """

    exit_status = 2


class Diverged(ConfigurationError):
    """Training left the finite numbers, though its data are such."""

    exit_status = 3


class OtherData(ConfigurationError):
    """A checkpoint was trained on other data."""

    exit_status = 4


class CannotVectorize(ConfigurationError):
    """A model or batches that cannot be computed for all clients at once; one after the other they can."""


_EXTRAS = {
    "datasets": "hf",
    "pyarrow": "hf",
    "ray": "ray",
    "segmentation_models_pytorch": "segmentation",
    "submitit": "slurm",
    "timm": "timm",
    "wandb_workspaces": "dashboard",
}
"""This project's extras by the package that they bring."""


def missing_module(name: str, owner: str = "") -> str:
    """Return how to install a missing module; empty if the module may be the user's.

    Args:
        name: The module.
        owner: The module that needs the missing one; if both are one, a name may be misspelt.
    """
    package = name.partition(".")[0]
    if package in _EXTRAS:
        return f"; pip install 'fl_lightning[{_EXTRAS[package]}]'"
    return "" if not name or "." in name or owner.partition(".")[0] == package else f"; pip install {package}"


@contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[None]:
    """Note on an exception that leaves the block what was being done: the command line's line of it says so.

    Args:
        what: What the block does, such as ``"drawing the batch of client 3"``; a function where the words cost time.
    """
    try:
        yield
    except Exception as error:
        error.add_note(what if isinstance(what, str) else what())
        raise


def check_choice(setting: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is none of the choices.

    Args:
        setting: Name of the setting, such as ``"FixBN.freeze"``.
        value: The value found.
        choices: What it may be.

    Raises:
        ConfigurationError: The value is none of them.
    """
    names = list(choices)
    if value not in names:
        raise ConfigurationError(f"{setting}: {value!r} must be one of {', '.join(names)}")


def check_at_least(least: int, **settings: int) -> None:
    """Refuse settings below their least value.

    Raises:
        ConfigurationError: A setting is below ``least``.
    """
    for name, value in settings.items():
        if value < least:
            raise ConfigurationError(f"{name} must be at least {least}, found {value}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause such as ``"; did you mean FixBN?"``, empty where nothing known begins so or comes near.

    Args:
        name: The name that was found.
        known: The names that exist. Upper and lower case are taken as equal.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = [match for match in by_lower if match.startswith(name.lower())][:3]
    found = found or get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(by_lower[match] for match in found)}?" if found else ""
