"""Whether and where runs are logged to Weights & Biases."""

import os
import re
from collections.abc import Sequence
from typing import Literal

from fl_lightning.errors import ConfigurationError

_PROJECT = "fl_lightning"
_MODES = ("online", "offline", "disabled", "shared", "run", "dryrun")


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

    Raises:
        ConfigurationError: W&B refuses such a mode, project, entity or tag.
    """

    def __init__(
        self,
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        project: str | None = None,
        entity: str | None = None,
        tags: Sequence[str] = (),
        log_checkpoints: bool = False,
    ) -> None:
        named = os.environ.get("WANDB_MODE")
        if named and named not in _MODES:
            raise ConfigurationError(
                f"the environment variable WANDB_MODE: {named!r} is none of {', '.join(_MODES)}; set one, or unset it"
            )
        source = "wandb.project" if project is not None else "the environment variable WANDB_PROJECT"
        project = (os.environ.get("WANDB_PROJECT") or _PROJECT) if project is None else project
        if not re.fullmatch(r"[^/\\#?%:]{1,128}", project):
            raise ConfigurationError(
                f"{source}: {project!r} must have 1 to 128 characters other than / \\ # ? % :"
            )
        if entity is not None and not entity.strip():
            raise ConfigurationError(
                f"wandb.entity: {entity!r} names no user or team; leave it out for the default of the key"
            )
        tags = [*tags, *filter(None, os.environ.get("WANDB_TAGS", "").split(","))]
        wrong = next((tag for tag in tags if not 1 <= len(tag) <= 64), None)
        if wrong is not None:
            raise ConfigurationError(f"wandb.tags: {wrong!r} must have 1 to 64 characters")
        self.mode = mode
        self.project = project
        self.entity = entity
        self.tags = tags
        self.log_checkpoints = log_checkpoints
