"""Configuration of a run, read from its run directory."""

import json
from contextlib import suppress

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.directory import Attempt, Config


def resolved(attempt: Attempt) -> Config:
    """Return a run's configuration, with its planned number of rounds.

    If a Python script has started the run, the configuration lacks this number. The number is then
    read from the run's other files.

    Raises:
        ConfigurationError: The configuration cannot be read.
    """
    try:
        config = attempt.read_config()
        config["name"], config["seed_everything"], config["data"]["class_path"], config["model"].items()
        config["trainer"].setdefault("max_epochs", _planned_rounds(attempt))
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{attempt.config} is no resolved configuration of a run; restore the file or leave its folder out"
        ) from error
    return config


def _planned_rounds(attempt: Attempt) -> int | None:
    for path in (attempt.result, attempt.identity):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(path.read_text())["planned_rounds"])
    return None
