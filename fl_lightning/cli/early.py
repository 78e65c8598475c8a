"""Checks that find mistakes in files before PyTorch is imported."""

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.cli.given import read_given, with_shipped_configs
from fl_lightning.cli.options import Refusal, study_options
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import shipped


def check_files(arguments: Sequence[str]) -> None:
    """Check that configuration files can be read. For ``study``, also check the study's file.

    This function does not check the settings of a study's cells.

    Args:
        arguments: A command and its arguments.

    Raises:
        ConfigurationError: An option of ``study`` is invalid, a file is missing or not YAML, or the
            study's file does not hold a study.
    """
    fit_options = list(arguments[1:])
    if arguments[0] == "study":
        # imported late, because pydantic is slow
        from fl_lightning.experiments.studies.reading import read_study

        try:
            options, fit_options = study_options(arguments[1:])
        except Refusal as refusal:
            raise ConfigurationError(refusal.line) from None
        read_study(shipped(options.file) or Path(options.file), options.scale)
    read_given(with_shipped_configs(fit_options))
