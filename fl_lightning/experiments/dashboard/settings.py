"""Whether and where runs are logged to Weights & Biases, and starting one so that it is never in the way of training."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

_INIT_SECONDS = 10.0
_UPLOAD_SECONDS = 120.0  # at the end of a run; what is not uploaded by then is left to wandb sync


@dataclass(frozen=True)
class WandbSettings:
    """Whether and where runs are logged to Weights & Biases.

    Args:
        mode: ``"online"``, ``"offline"`` (files in the run directory, which ``wandb sync`` uploads), ``"disabled"``, or
            ``"auto"``: the environment variable ``WANDB_MODE`` where it is set, else online where W&B finds an API key
            (``wandb login`` stores one), else offline.
        project: Project of the run; None: the environment variable ``WANDB_PROJECT``, else ``fl_lightning``.
        entity: User or team that owns the project; None: the environment variable ``WANDB_ENTITY``, else W&B's default
            for the key.
        tags: Tags of the run, beside those of its methods, data set and model and of the environment variable
            ``WANDB_TAGS``.
        log_checkpoints: Whether ``last.ckpt`` and ``best.ckpt`` become an artifact of the run when it ends.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")  # for upload, which reads them from a file
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str | None = None
    entity: str | None = None
    tags: Sequence[str] = ()
    log_checkpoints: bool = False

    @property
    def asked(self) -> str:
        """The mode, that of the environment where it is ``"auto"``."""
        return self.mode if self.mode != "auto" else os.environ.get("WANDB_MODE") or "auto"


def open_run(mode: str, init: dict[str, Any]) -> Any:
    """Start a run, or continue one: in its mode, where that fails offline.

    Args:
        mode: ``"auto"`` or a mode of ``wandb.init``.
        init: Arguments of ``wandb.init``.

    Returns:
        The run, None where there is none: W&B is disabled by its own settings, or does not work.
    """
    wrong = ""
    for way in (mode, "offline"):
        try:
            run = _start(way, init)
        except Exception as error:  # noqa: BLE001  # whatever it is, it must not end the training
            wrong = wrong or " ".join(str(error).split()) or type(error).__name__
            with suppress(Exception):
                sys.modules["wandb"].teardown()  # else the id stays taken
        else:
            if wrong:
                print(f"W&B does not work online, the run goes on offline: {wrong}", file=sys.stderr)
            return run
    print(f"W&B does not work, the run goes on without it: {wrong}", file=sys.stderr)
    return None


def session_mode(mode: str) -> Any:
    """The mode in which W&B works here: online asks for a key.

    Args:
        mode: ``"auto"`` or a mode of ``wandb.init``.

    Raises:
        wandb.Error: Online without a key, a key or a variable that it refuses.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would be sent from an offline run, too
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
