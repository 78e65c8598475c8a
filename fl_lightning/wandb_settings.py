"""Whether and where runs are logged to Weights & Biases."""

import os
import re
from collections.abc import Sequence
from typing import Literal

from fl_lightning.errors import ConfigurationError

_PROJECT = "fl_lightning"


class WandbSettings:
    """Whether and where runs are logged to Weights & Biases.

    Args:
        mode: ``"online"``, ``"offline"`` (files in the run directory, which ``wandb sync`` uploads), ``"disabled"``, or
            ``"auto"``: the environment variable ``WANDB_MODE`` where it is set, else online where W&B finds an API key
            (``wandb login`` stores one), else offline.
        project: Project of the run; None: the environment variable ``WANDB_PROJECT``, else ``fl_lightning``.
        entity: User or team that owns the project; None: W&B's default for the key.
        tags: Tags of the run, beside those of its methods, data set and model.
        log_checkpoints: Whether ``last.ckpt`` and ``best.ckpt`` become an artifact of the run when it ends.

    Raises:
        ConfigurationError: W&B refuses such a project name or tag.
    """

    def __init__(
        self,
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        project: str | None = None,
        entity: str | None = None,
        tags: Sequence[str] = (),
        log_checkpoints: bool = False,
    ) -> None:
        if project is not None and not re.fullmatch(r"[^/\\#?%:]{1,128}", project):
            raise ConfigurationError(
                f"wandb.project: {project!r} must have 1 to 128 characters other than / \\ # ? % :"
            )
        wrong = next((tag for tag in tags if not 1 <= len(tag) <= 64), None)
        if wrong is not None:
            raise ConfigurationError(f"wandb.tags: {wrong!r} must have 1 to 64 characters")
        self.mode = mode
        self.project = project or os.environ.get("WANDB_PROJECT", _PROJECT)
        self.entity = entity
        self.tags = list(tags)
        self.log_checkpoints = log_checkpoints
