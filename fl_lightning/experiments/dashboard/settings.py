"""Weights & Biases: settings of a run, and its start there, which never stops training."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

_INIT_SECONDS = 10.0
_UPLOAD_SECONDS = 120.0  # at the end of a run; wandb sync can upload the rest


@dataclass(frozen=True)
class WandbSettings:
    """Weights & Biases settings of a run.

    Args:
        mode: ``"online"``, ``"offline"`` (files in the run directory, which ``wandb sync``
            uploads), ``"disabled"`` or ``"auto"``. ``"auto"`` takes the environment variable
            ``WANDB_MODE``. Without the variable, it is online if W&B finds an API key (``wandb
            login`` stores one), otherwise offline.
        project: Project of the run. Default: the environment variable ``WANDB_PROJECT``, else
            ``fl_lightning``.
        entity: User or team that owns the project. Default: the environment variable
            ``WANDB_ENTITY``, else W&B's default for the key.
        tags: Additional tags beside the methods, the data set, the model and the environment
            variable ``WANDB_TAGS``.
        log_checkpoints: Whether to upload ``last.ckpt`` and ``best.ckpt`` as an artifact at the end
            of the run.
    """

    __pydantic_config__: ClassVar = ConfigDict(
        extra="forbid"
    )  # the upload command reads the settings from a file
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str | None = None
    entity: str | None = None
    tags: Sequence[str] = ()
    log_checkpoints: bool = False

    @property
    def asked(self) -> str:
        """The configured mode; for ``"auto"`` the environment variable ``WANDB_MODE`` if set."""
        return self.mode if self.mode != "auto" else os.environ.get("WANDB_MODE") or "auto"


def open_run(mode: str, init: dict[str, Any]) -> Any:
    """Start or resume a run at W&B; if its mode fails, try offline.

    Args:
        mode: ``"auto"`` or a mode of ``wandb.init``.
        init: Arguments of ``wandb.init``.

    Returns:
        The run; None if W&B's own settings disable it or W&B does not work.
    """
    wrong = ""
    for way in (mode, "offline"):
        try:
            run = _start(way, init)
        except Exception as error:  # noqa: BLE001  # no error of W&B may end the training
            wrong = wrong or " ".join(str(error).split()) or type(error).__name__
            with suppress(Exception):
                sys.modules["wandb"].teardown()  # otherwise the id stays taken
        else:
            if wrong:
                print(f"W&B does not work online, the run goes on offline: {wrong}", file=sys.stderr)
            return run
    print(f"W&B does not work, the run goes on without it: {wrong}", file=sys.stderr)
    return None


def session_mode(mode: str) -> Any:
    """Return the mode in which W&B works on this machine; ``"auto"`` without an API key is offline.

    Args:
        mode: ``"auto"`` or a mode of ``wandb.init``.

    Raises:
        wandb.Error: The mode is online without an API key, or W&B refuses the key or a variable.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # W&B would report from an offline run, too
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
        disable_git=True,  # the commit is in the configuration
        disable_code=True,
        init_timeout=_INIT_SECONDS,
        finish_timeout=_UPLOAD_SECONDS,
    )
    return wandb.init(mode=way, settings=settings, reinit="create_new", **init)
