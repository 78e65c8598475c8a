"""Weights & Biases: settings of a run, and its start. Errors of W&B never stop training."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

_INIT_SECONDS = 10.0
_UPLOAD_SECONDS = 120.0  # limit at the end of a run; wandb sync can upload the rest later


@dataclass(frozen=True)
class WandbSettings:
    """Weights & Biases settings of a run.

    Args:
        mode: ``"online"``, ``"offline"`` (files in the run directory, for ``wandb sync``),
            ``"disabled"`` or ``"auto"`` (default). ``"auto"`` uses the environment variable
            ``WANDB_MODE``. Without the variable, the run is online if W&B finds an API key, else
            offline. ``wandb login`` stores an API key.
        project: Project of the run. Default: the environment variable ``WANDB_PROJECT``, else
            ``fl_lightning``.
        entity: User or team that owns the project. Default: the environment variable
            ``WANDB_ENTITY``, else W&B's default for the key.
        tags: Tags in addition to the methods, the data set, the model and the environment variable
            ``WANDB_TAGS``.
        log_checkpoints: Whether to upload the checkpoints as an artifact at the end of the run.
    """

    # the upload command reads the settings from a file
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str | None = None
    entity: str | None = None
    tags: Sequence[str] = ()
    log_checkpoints: bool = False

    @property
    def asked(self) -> str:
        """The configured mode. For ``"auto"``, the environment variable ``WANDB_MODE`` if set."""
        return self.mode if self.mode != "auto" else os.environ.get("WANDB_MODE") or "auto"


def open_run(mode: str, init: dict[str, Any]) -> Any:
    """Start or resume a run at W&B; if that fails, try offline.

    Args:
        mode: ``"auto"`` or a mode of ``wandb.init``.
        init: Arguments of ``wandb.init``.

    Returns:
        The run; None if W&B is disabled, or if it does not work even offline.
    """
    wrong = ""
    for way in (mode, "offline"):
        try:
            run = _start(way, init)
        except Exception as error:  # noqa: BLE001  # an error of W&B must not end training
            wrong = wrong or " ".join(str(error).split()) or type(error).__name__
            with suppress(Exception):
                sys.modules["wandb"].teardown()  # otherwise the run's id remains in use
        else:
            if wrong:
                print(f"W&B does not work online, the run continues offline: {wrong}", file=sys.stderr)
            return run
    print(f"W&B does not work, the run continues without it: {wrong}", file=sys.stderr)
    return None


def session_mode(mode: str) -> Any:
    """Return W&B's mode on this machine. Without an API key, ``"auto"`` gives ``"offline"``.

    Args:
        mode: ``"auto"`` or a mode of ``wandb.init``.

    Raises:
        wandb.Error: The mode is ``"online"`` without an API key, or W&B refuses the key or an
            environment variable.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else W&B reports even offline runs
    import wandb

    session = wandb.setup(settings=wandb.Settings(silent=True)).settings
    way: Any = session.mode if mode == "auto" else mode
    if way == "online" and not wandb.login(prompt=False, verify=False):
        if mode == "online":
            raise wandb.Error("there is no API key; wandb login stores one")
        way = "offline"
    return way


def _start(mode: str, init: dict[str, Any]) -> Any:
    way = session_mode(mode)
    import wandb

    if way == "disabled":
        return None
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,  # the configuration has the commit
        disable_code=True,
        init_timeout=_INIT_SECONDS,
        finish_timeout=_UPLOAD_SECONDS,
    )
    return wandb.init(mode=way, settings=settings, reinit="create_new", **init)
