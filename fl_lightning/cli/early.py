"""Checks that find mistakes in files before PyTorch is imported."""

import ast
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fl_lightning.cli.given import Given, place_in, read_given, with_shipped_configs
from fl_lightning.cli.options import Refusal, study_options
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.files import shipped

SECTIONS = (
    *(
        "accept_data",
        "checkpoint",
        "ckpt_path",
        "config",
        "data",
        "datamodule",
        "dataloaders",
        "model",
        "name",
    ),
    *(
        "print_config",
        "return_predictions",
        "run_root",
        "seed_everything",
        "threads",
        "trainer",
        "verbose",
        "wandb",
    ),
    "weights_only",
)
"""First parts of the names of all settings."""

_CLASSES = {
    "trainer": ("lightning", "pytorch/trainer/trainer.py", "Trainer"),
    "model": ("fl_lightning", "round/module.py", "FederatedModule"),
}
"""Package, file and class whose arguments are the settings of a section."""


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

        try:
            options, fit_options = study_options(arguments[1:])
        except Refusal as refusal:
            raise ConfigurationError(refusal.line) from None
        read_study(shipped(options.file) or Path(options.file), options.scale)
    given = read_given(with_shipped_configs(fit_options))
    _check_names([entry for entry in given if entry.file])


def _check_names(given: Sequence[Given]) -> None:
    """Raise an error for the first misspelt section or argument.

    Names that resemble no section and no argument of their section are left to the parser, which
    knows all settings.
    """
    known = {"": SECTIONS, **{f"{section}.": arguments_of(section) for section in _CLASSES}}
    for entry in given:
        section, dot, rest = entry.setting.partition(".")
        prefix = f"{section}." if dot and section in _CLASSES else ""
        name = rest.partition(".")[0].removesuffix("+") if prefix else section
        if name not in known[prefix] and nearest(name, known[prefix]):
            near = nearest(prefix + name, [prefix + other for other in known[prefix]])
            place = place_in(entry.file, entry.line)
            raise ConfigurationError(f"there is no setting {prefix + name!r}{near}{place}")


def arguments_of(section: str) -> Sequence[str]:
    """Return the names of a class's arguments, without ``self``. The class is not imported."""
    package, file, name = _CLASSES[section]
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).parent.joinpath(file).read_text(encoding="utf-8"))
    (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (start,) = (node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return [argument.arg for argument in (*start.args.args[1:], *start.args.kwonlyargs)]
