"""What this project and Lightning use of jsonargparse, so that a new version breaks here first."""

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import cli
from packaging.requirements import Requirement

VERSION = version("jsonargparse")


@pytest.mark.parametrize("name", ["add_instantiator", "instantiate_classes"])
def test_jsonargparse_has_the_methods_that_lightnings_command_line_calls(name):
    assert hasattr(ArgumentParser, name), (
        f"jsonargparse {VERSION} has no ArgumentParser.{name}, which lightning.pytorch.cli calls; keep jsonargparse<5 "
        "in pyproject.toml until Lightning does not call it"
    )


def test_jsonargparse_stays_below_5_while_lightning_calls_what_5_removes():
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (bound,) = (line for line in settings["project"]["dependencies"] if line.startswith("jsonargparse"))
    calls = [name for name in ("instantiate_classes", "skip_none") if name in inspect.getsource(cli)]
    assert calls, (
        "Lightning no longer calls what jsonargparse 5 removes: try jsonargparse 5, then change this test"
    )
    assert not Requirement(bound).specifier.contains("5.0")


def test_settings_have_types_and_classes_have_an_option_for_help():
    """``fl_lightning.cli.mistakes`` reads both from the parser's actions."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--number", type=int | None)
    parser.add_argument("--parser", type=ArgumentParser)
    actions = {action.dest: action for action in parser._actions}
    words = f"jsonargparse {VERSION}: mend _Settings in fl_lightning/cli/mistakes.py"
    assert getattr(actions["number"], "_typehint", None) == int | None, words
    assert "parser.help" in actions, words
    assert "number.help" not in actions, words


def test_a_value_of_another_type_is_an_argument_error():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--number", type=int)
    for read in (lambda: parser.parse_object({"number": "x"}), lambda: parser.parse_args(["--number=x"])):
        with pytest.raises(ArgumentError):
            read()
