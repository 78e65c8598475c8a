"""Whether and where runs are logged to Weights & Biases, and starting one so that it is never in the way of training."""

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.round.module import FederatedModule
from fl_lightning.run_directory.describe import describe, method_name

Mode = Literal["online", "offline", "disabled"]

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

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str | None = None
    entity: str | None = None
    tags: Sequence[str] = ()
    log_checkpoints: bool = False

    def resolve_mode(self) -> Mode:
        """What ``"auto"`` means here: nothing is asked from the user or sent over the network to find out.

        Raises:
            ConfigurationError: W&B refuses what the environment or its settings file says.
        """
        asked = os.environ.get("WANDB_MODE") if self.mode == "auto" else self.mode
        if asked == "disabled":
            return "disabled"  # W&B is not even imported
        import wandb

        settings = _quiet_session().model_copy()
        if not asked:  # the mode that ``wandb offline`` writes, whatever an earlier run of this process had
            settings.mode = "online"
            settings.update_from_system_settings()
            asked = settings.mode if settings.mode != "online" else None
        if asked:
            known: dict[str, Mode] = {"offline": "offline", "dryrun": "offline", "disabled": "disabled"}
            return known.get(asked, "online")
        _quiet_session(mode="online")  # login finds no key in a session that an earlier run left offline
        try:
            return "online" if wandb.login(prompt=False, verify=False) else "offline"
        except wandb.Error:
            return "online"  # a key that cannot be one: the start of the run says so


def names_of_run(
    settings: WandbSettings,
    group: str,
    module: FederatedModule,
    data: FederatedDataModule,
    callbacks: Sequence[L.Callback],
) -> dict[str, Any]:
    """As what a run appears, such as ``FedAvg+FixBN(freeze_round=9)-Digits-Shards-E1-lr0.1-s0`` with the tags ``[FedAvg, FixBN, Digits, LeNet]``.

    The environment variables ``WANDB_NAME``, ``WANDB_RUN_GROUP``, ``WANDB_JOB_TYPE`` and ``WANDB_PROJECT`` come before what
    is made up here.

    Returns:
        Arguments of ``wandb.init``.
    """
    methods = [callback for callback in callbacks if isinstance(callback, FederatedCallback)]
    base = method_name(module, []).partition("(")[0]
    known = re.match(r"[A-Za-z_]\w*", data.describe_partition())
    partition = known[0] if known else type(data).__name__
    steps = f"E{module.local_steps}" if module.local_steps is not None else f"E{module.local_epochs}epochs"
    rate = f"lr{module.client_optimizer([torch.zeros(1)]).defaults['lr']:g}"
    names = dict.fromkeys([type(data).__name__, partition])
    name = "-".join(["+".join([base, *map(describe, methods)]), *names, steps, rate, f"s{module.seed}"])
    tags = [
        base,
        *(type(method).__name__ for method in methods),
        type(data).__name__,
        type(module.model).__name__,
        *settings.tags,
    ]
    return {
        "project": settings.project or os.environ.get("WANDB_PROJECT") or "fl_lightning",
        "entity": settings.entity,
        "name": os.environ.get("WANDB_NAME") or name,
        "group": os.environ.get("WANDB_RUN_GROUP") or group,
        "job_type": os.environ.get("WANDB_JOB_TYPE") or "fit",
        "tags": [*tags, *filter(None, os.environ.get("WANDB_TAGS", "").split(","))],
    }


def open_run(mode: Mode, init: dict[str, Any]) -> tuple[Any, Mode]:
    """Start a run, or continue one: online, where that fails offline, and where that fails too one that ignores all.

    Args:
        mode: ``"online"`` or ``"offline"``.
        init: Arguments of ``wandb.init``; ``id`` must be set.

    Returns:
        The run and the mode that worked.
    """
    import wandb

    ways: tuple[Mode, ...] = ("online", "offline") if mode == "online" else ("offline",)
    wrong = ""
    for way in ways:
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
            run = wandb.init(**{"settings": settings, "mode": way, "reinit": "create_new", **init})
        except Exception as error:  # noqa: BLE001  # whatever it is, it must not end the training
            wrong = wrong or in_a_line(error)
            with suppress(Exception):
                wandb.teardown()  # else the id stays taken
        else:
            if wrong:
                print(f"W&B does not work online, the run goes on offline: {wrong}", file=sys.stderr)
            return run, way
    print(f"W&B does not work, the run goes on without it: {wrong}", file=sys.stderr)
    return wandb.init(mode="disabled", reinit="create_new"), "disabled"


def in_a_line(error: Exception) -> str:
    """What an exception says, in one line."""
    lines = str(error).splitlines() or [type(error).__name__]
    # pydantic's have a title, the setting and, indented, what is wrong with it
    return f"{lines[1]}: {lines[2].strip()}" if isinstance(error, ValueError) and len(lines) > 2 else lines[0]


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
    except (ValueError, wandb.Error) as error:
        found = "an environment variable WANDB_... or W&B's settings file"
        raise ConfigurationError(f"{found} has a value that W&B refuses: {in_a_line(error)}") from error
