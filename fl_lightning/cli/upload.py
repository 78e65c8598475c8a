"""``python -m fl_lightning upload``: runs at Weights & Biases from their folders, without training."""

from collections.abc import Sequence

import yaml

from fl_lightning.cli.messages import CommandParser, command
from fl_lightning.dashboard.logger import RoundWandbLogger
from fl_lightning.dashboard.settings import WandbSettings
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import user_path
from fl_lightning.run_directory.directory import Attempt


@command()
def main(args: Sequence[str]) -> None:
    """Make a run at W&B of each folder, or complete the one of its id: online, or offline as ``WANDB_MODE`` says.

    Args:
        args: Arguments after ``upload``.
    """
    parser = CommandParser(
        "upload",
        "Upload the runs of folders to Weights & Biases: online where there is a key, else as files for wandb sync; WANDB_MODE decides otherwise.",
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
    for attempt in attempts:
        given = yaml.safe_load(attempt.config.read_text()).get("wandb") or {}
        logger = RoundWandbLogger(attempt, WandbSettings(**{**given, "mode": "auto"}))
        with attempt.lock():
            logger.start()
            logger.close()
        if logger.place is None:
            raise ConfigurationError(
                f"upload: {attempt.path} is not at W&B, which failed or is disabled; see WANDB_MODE and the lines above"
            )
        print(logger.place, flush=True)
