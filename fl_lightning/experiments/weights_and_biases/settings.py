"""Weights & Biases: the settings and the start of a run. Errors of W&B never stop training."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

_INIT_SECONDS = 10.0
# time limit for uploads at the end of a run; wandb sync can upload the rest later
_UPLOAD_SECONDS = 120.0


@dataclass(frozen=True)
class WandbSettings:
    """Weights & Biases settings of a run.

    Args:
        mode: ``"online"``, ``"offline"`` (files in the run directory, for ``wandb sync``),
            ``"disabled"`` or ``"auto"`` (default). ``"auto"`` uses the environment variable
            ``WANDB_MODE``. If this variable is not set, the run is online if W&B finds an API key,
            and offline otherwise. ``wandb login`` stores an API key.
        project: Project of the run. Default: the environment variable ``WANDB_PROJECT``, else
            ``fl_lightning``.
        entity: User or team that owns the project. Default: the environment variable
            ``WANDB_ENTITY``, else W&B's default for the key.
        tags: Further tags of the run. A run always has its methods, data set and model as tags, and
            the tags in the environment variable ``WANDB_TAGS``.
        log_checkpoints: Whether to upload the checkpoints as an artifact at the end of the run.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str | None = None
    entity: str | None = None
    tags: Sequence[str] = ()
    log_checkpoints: bool = False

    @property
    def asked(self) -> str:
        """The configured mode.

        The environment variable ``WANDB_MODE``, if set, replaces the mode ``"auto"``.
        """
        return self.mode if self.mode != "auto" else os.environ.get("WANDB_MODE") or "auto"


def open_run(mode: str, **init: Any) -> Any:
    """Start or resume a run at W&B. If W&B does not work online, try offline.

    Args:
        mode: ``"auto"`` or a mode of ``wandb.init``.
        init: Further arguments of ``wandb.init``.

    Returns:
        The run; None if W&B is disabled or does not even work offline.
    """
    wrong = ""
    for asked in (mode, "offline"):
        try:
            way = session_mode(asked)
            if way == "disabled":
                return None
            import wandb

            settings = wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,  # the run's configuration already contains the Git commit
                disable_code=True,
                init_timeout=_INIT_SECONDS,
                finish_timeout=_UPLOAD_SECONDS,
            )
            run = wandb.init(mode=way, settings=settings, reinit="create_new", **init)
        except Exception as error:  # noqa: BLE001  # an error of W&B must not end training
            wrong = wrong or error_in_one_line(error)
            tear_down()
        else:
            if wrong:
                print(f"W&B does not work online, the run continues offline: {wrong}", file=sys.stderr)
            return run
    print(f"W&B does not work, the run continues without it: {wrong}", file=sys.stderr)
    return None


def session_mode(mode: str) -> Any:
    """Return the mode for W&B on this machine. Without an API key, ``"auto"`` gives ``"offline"``.

    Args:
        mode: ``"auto"`` or a mode of ``wandb.init``.

    Raises:
        wandb.Error: The mode is ``"online"`` without an API key, or W&B refuses the key or an
            environment variable.
    """
    # by default, W&B sends error reports even from offline runs
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    if not os.environ.get("WANDB_MODE", "auto"):
        del os.environ["WANDB_MODE"]  # W&B refuses an empty mode
    import wandb

    session = wandb.setup(settings=wandb.Settings(silent=True)).settings
    way: Any = session.mode if mode == "auto" else mode
    if way == "online" and not wandb.login(prompt=False, verify=False):
        if mode == "online":
            raise wandb.Error("there is no API key; wandb login stores one")
        way = "offline"
    return way


def error_in_one_line(error: Exception) -> str:
    """Return the message of an error as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def tear_down(status: int = 1) -> None:
    """End W&B in this process after an error. Otherwise a run's id would remain in use.

    Args:
        status: Exit status of the runs that are not finished.
    """
    with suppress(Exception):
        sys.modules["wandb"].teardown(status)
