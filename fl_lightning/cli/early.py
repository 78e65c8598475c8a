"""Checks that find mistakes in files before PyTorch is imported."""

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.cli.given import read_given, with_shipped_configs
from fl_lightning.cli.options import Refusal, study_options
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import shipped


def check_files(arguments: Sequence[str]) -> None:
    """Check that configuration files can be read; for ``study``, also check the study's file.

    The settings of a study's cells are not checked here.

    Args:
        arguments: A command and its arguments.

    Raises:
        ConfigurationError: An option of ``study`` is not valid, or a file is missing, is not YAML,
            or is not a study.
    """
    fit_options = list(arguments[1:])
    if arguments[0] == "study":
        from fl_lightning.experiments.studies.reading import read_study  # late: pydantic is slow

        try:
            options, fit_options = study_options(arguments[1:])
        except Refusal as refusal:
            raise ConfigurationError(refusal.line) from None
        read_study(shipped(options.file) or Path(options.file), options.scale)
    read_given(with_shipped_configs(fit_options))
