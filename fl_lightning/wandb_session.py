"""Starting a run at Weights & Biases so that nothing it meets, a missing key or network, is in the way of training."""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

Mode = Literal["online", "offline", "disabled"]

_INIT_SECONDS = 30.0
_UPLOAD_SECONDS = 120.0  # at the end of a run; what is not uploaded by then is left to wandb sync


def resolve_mode(mode: Literal["auto", "online", "offline", "disabled"]) -> Mode:
    """What ``"auto"`` means here: nothing is asked from the user or sent over the network to find out.

    Args:
        mode: As for :class:`WandbSettings`.
    """
    if mode != "auto":
        return mode
    if os.environ.get("WANDB_MODE") == "disabled":
        return "disabled"  # W&B is not even imported
    import wandb

    found = os.environ.get("WANDB_MODE") or _quiet_session().mode
    if found in ("offline", "dryrun"):
        return "offline"
    if found == "disabled":
        return "disabled"
    try:
        return "online" if wandb.login(prompt=False, verify=False) else "offline"
    except wandb.Error:  # a key that cannot be one: the run itself will be told so when it is uploaded
        return "offline"


def open_run(mode: Mode, init: dict[str, Any]) -> tuple[Any, Mode]:
    """Start a run, or continue one: online, where that fails offline, and where that fails too one that ignores all.

    Args:
        mode: How to start it.
        init: Arguments of ``wandb.init``; ``id`` must be set.

    Returns:
        The run and the mode that worked.
    """
    import wandb

    ways: list[Mode] = ["online", "offline"] if mode == "online" else ["offline"] if mode == "offline" else []
    for way in ways:
        earlier = _folders(init)
        try:
            _quiet_session()
            settings = wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,  # the commit is in the configuration
                disable_code=True,
                init_timeout=_INIT_SECONDS,
                finish_timeout=_UPLOAD_SECONDS,
            )
            return wandb.init(**{"settings": settings, "mode": way, "reinit": "create_new", **init}), way
        except Exception as error:  # noqa: BLE001  # whatever it is, it must not end the training
            instead = "goes on offline" if way == "online" else "goes on without it"
            print(f"W&B does not work {way}, the run {instead}: {first_line(error)}", file=sys.stderr)
            with suppress(Exception):
                wandb.teardown()  # else the id stays taken
            for folder in _folders(init) - earlier:
                shutil.rmtree(folder, ignore_errors=True)
    return wandb.init(mode="disabled", reinit="create_new"), "disabled"


def _folders(init: dict[str, Any]) -> set[Path]:
    return set(Path(init["dir"] or ".").glob(f"wandb/*run-*-{init['id']}"))


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return str(error).partition("\n")[0] or type(error).__name__


def _quiet_session() -> Any:
    """The settings that W&B has found in the environment and its files, in a session that prints nothing by itself."""
    import wandb

    return wandb.setup(settings=wandb.Settings(silent=True)).settings
