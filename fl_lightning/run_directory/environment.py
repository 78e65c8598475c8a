"""The environment that a run was made in."""

import importlib.metadata
import platform
import subprocess

from fl_lightning import __version__


def describe_environment() -> dict[str, str | None]:
    """Versions, platform and git commit (None outside a checkout; ``-dirty``: with uncommitted changes)."""
    versions = {package: _version(package) for package in ("torch", "lightning")} | {
        "fl_lightning": __version__
    }
    return {
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "git_commit": _git_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
