"""Starting a run at Weights & Biases so that nothing it meets, a missing key or network, is in the way of training."""

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from fl_lightning.errors import ConfigurationError

Mode = Literal["online", "offline", "disabled"]

_INIT_SECONDS = 10.0
_UPLOAD_SECONDS = 120.0  # at the end of a run; what is not uploaded by then is left to wandb sync


def resolve_mode(mode: Literal["auto", "online", "offline", "disabled"]) -> Mode:
    """What ``"auto"`` means here: nothing is asked from the user or sent over the network to find out.

    Args:
        mode: As for :class:`~fl_lightning.dashboard.settings.WandbSettings`.

    Raises:
        ConfigurationError: W&B refuses what the environment or its settings file says.
    """
    if mode != "auto":
        return mode
    asked = os.environ.get("WANDB_MODE")
    if asked == "disabled":
        return "disabled"  # W&B is not even imported
    import wandb

    found = asked or _mode_in_files()
    if found in ("offline", "dryrun"):
        return "offline"
    if found == "disabled":
        return "disabled"
    if asked:
        return "online"
    _quiet_session(mode="online")  # login finds no key in a session that an earlier run left offline
    try:
        return "online" if wandb.login(prompt=False, verify=False) else "offline"
    except wandb.Error:
        return "online"  # a key that cannot be one: the start of the run says so


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
            _quiet_session(mode=way)
            if way == "online" and not wandb.login(prompt=False, verify=False):
                raise wandb.Error("there is no API key; wandb login stores one")
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
    if mode == "disabled":
        _quiet_session(mode="offline")
    return wandb.init(mode="disabled", reinit="create_new"), "disabled"


def _folders(init: dict[str, Any]) -> set[Path]:
    return set(Path(init["dir"] or ".").glob(f"wandb/*run-*-{init['id']}"))


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return str(error).partition("\n")[0] or type(error).__name__


def _mode_in_files() -> str:
    """The mode in W&B's settings files, which ``wandb offline`` writes, whatever an earlier run of this process had."""
    settings = _quiet_session().model_copy()
    settings.mode = "online"
    settings.update_from_system_settings()
    return str(settings.mode)


def _quiet_session(**settings: Any) -> Any:
    """The settings that W&B has found in the environment and its files, in a session that prints nothing by itself.

    Args:
        settings: What the session has instead: W&B's telemetry goes by the mode of the session, not that of a run.

    Raises:
        ConfigurationError: W&B refuses a value that it has found.
    """
    import wandb

    if not os.environ.get("WANDB_MODE", "unset"):
        del os.environ["WANDB_MODE"]  # to W&B an empty one is a wrong one
    if "WANDB_CACHE_DIR" not in os.environ:
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            (cache / "wandb").mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # W&B's process would print its log instead
            os.environ["WANDB_CACHE_DIR"] = str(Path(tempfile.gettempdir(), f"wandb-cache-{os.getuid()}"))
    try:
        return wandb.setup(settings=wandb.Settings(silent=True, **settings)).settings
    except ValueError as error:  # pydantic's: a title, the setting and, indented, what is wrong with it
        _, setting, wrong, *_ = [*str(error).splitlines(), "", ""]
        raise ConfigurationError(
            f"W&B, setting {setting!r} of the environment or of its settings file: {wrong.strip()}"
        ) from error
