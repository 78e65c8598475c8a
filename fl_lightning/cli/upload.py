"""``python -m fl_lightning upload``: upload run directories to Weights & Biases."""

from collections.abc import Sequence
from dataclasses import fields, replace

from pydantic import TypeAdapter, ValidationError

from fl_lightning.cli.messages import command
from fl_lightning.cli.options import CommandParser
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.dashboard.logger import RoundWandbLogger
from fl_lightning.experiments.dashboard.settings import WandbSettings
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.resolved_config import resolved
from fl_lightning.files import user_path


@command()
def main(args: Sequence[str]) -> None:
    """Create a W&B run for each folder. If the W&B run exists, complete it.

    The environment variable ``WANDB_MODE`` says whether W&B is used online or offline.

    Args:
        args: Arguments after ``upload``.
    """
    parser = CommandParser(
        "upload",
        "Upload runs to Weights & Biases, or without a key write files for wandb sync. WANDB_MODE overrides this choice.",
    )
    parser.add_argument("folders", metavar="DIR", nargs="+", help="such as runs/quickstart/8858b953-s0")
    attempts = [Attempt(user_path("upload", folder)) for folder in parser.parse_args(args).folders]
    for attempt in attempts:
        files = (attempt.config, attempt.identity, attempt.policy, attempt.metrics)
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise ConfigurationError(
                f"upload: {attempt.path} is no run: it has no {', '.join(missing)}; give folders such as runs/NAME/HASH-s0"
            )
    for attempt, settings in [(attempt, _settings(attempt)) for attempt in attempts]:
        logger = RoundWandbLogger(attempt, settings)
        with attempt.lock():
            logger.start()
            logger.close()
        if logger.place is None:
            raise ConfigurationError(
                f"upload: {attempt.path} was not uploaded: W&B failed or is disabled; see WANDB_MODE and the lines above"
            )
        print(logger.place, flush=True)


def _settings(attempt: Attempt) -> WandbSettings:
    """Return the W&B settings in a run's configuration, but with the mode ``auto``."""
    given = resolved(attempt).get("wandb") or {}
    try:
        return replace(TypeAdapter(WandbSettings).validate_python(given), mode="auto")
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(map(str, ("wandb", *first["loc"])))
        raise ConfigurationError(
            f"upload: {attempt.config}: {setting}: {first['input']!r} is not valid; there are "
            f"{', '.join(f'wandb.{field.name}' for field in fields(WandbSettings))}, as in fit"
        ) from error
