"""Checks that find mistakes in files before PyTorch is imported."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from fl_lightning.cli.options import study_options
from fl_lightning.cli.user_settings import Given, place_in, read_given, with_shipped_configs
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.files import shipped

SETTINGS = Path(__file__).with_name("settings.json")
"""Names of all settings, and the version of Lightning that has the settings of ``trainer``.

A test compares the list with the parser's settings, and says how to write the list again.
"""


def check_files(arguments: Sequence[str]) -> None:
    """Check that configuration files can be read, and that their settings have known names.

    Values are not checked. For ``study``, the study's file is checked, but not the settings of its
    cells.

    Args:
        arguments: A command and its arguments.

    Raises:
        ConfigurationError: An option of ``study`` is invalid, a file is missing or not YAML, a
            setting of a file is unknown, or the study's file does not hold a study.
    """
    fit_options = list(arguments[1:])
    if arguments[0] == "study":
        # imported late, because pydantic is slow
        from fl_lightning.experiments.studies.reading import read_study

        options, fit_options = study_options(arguments[1:])
        read_study(shipped(options.file) or Path(options.file), options.scale)
    given = read_given(with_shipped_configs(fit_options))
    _check_names([entry for entry in given if entry.file])


def _check_names(given: Sequence[Given]) -> None:
    """Raise an error for the first misspelt section, or for a misspelt setting in a section.

    Names that resemble no known name are left to the parser, which also knows the settings of
    classes.
    """
    known = json.loads(SETTINGS.read_text())
    for entry in given:
        section, _, rest = entry.setting.partition(".")
        inner = known["sections"].get(section)
        if inner is None:
            wrong, names = section, list(known["sections"])
        elif inner and rest and (section != "trainer" or version("lightning") == known["lightning"]):
            wrong = f"{section}.{rest.partition('.')[0].removesuffix('+')}"
            names = [f"{section}.{name}" for name in inner]
        else:
            continue
        if wrong not in names and (near := nearest(wrong, names)):
            place = place_in(entry.file, entry.line)
            raise ConfigurationError(f"there is no setting {wrong!r}{near}{place}")
