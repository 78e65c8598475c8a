"""The parser on its own, and what it knows of what the user gave."""

from pathlib import Path

import pytest
from command_line import message_of
from torch import nn

import fl_lightning.callbacks  # noqa: F401  # makes their bare names known
from fl_lightning import FederatedCallback
from fl_lightning.cli.messages import command
from fl_lightning.cli.parser import ConciseParser
from fl_lightning.cli.user_settings import given_settings, read_given
from fl_lightning.errors import ConfigurationError


def alone():
    parser = ConciseParser(prog="verify")
    parser.add_subclass_arguments(FederatedCallback, "callback")
    parser.add_argument("--rounds", type=int, default=1)
    return parser


def test_parser_without_subcommands_reads_the_settings_of_a_class():
    read = alone().parse_args(["--callback", "FixBN", "--callback.freeze_round", "3"])
    made = alone().instantiate(read)
    assert (type(made.callback).__name__, made.callback.freeze_round) == ("FixBN", 3)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--callback FixBNN", "callback: there is no class 'FixBNN'; did you mean FixBN or "),
        ("--callback FixBN --callback.freeze_rond 3", "FixBN: there is no setting 'freeze_rond' among freeze_round, "),
        ("--round 3", "there is no setting 'round'; did you mean rounds?"),
        ("--rounds x", "rounds: x is not valid; it takes int"),
    ],
)  # fmt: skip
def test_parser_without_subcommands_words_its_errors_as_fit_does(arguments, line, capsys):
    read = command()(alone().parse_args)
    assert message_of(capsys, lambda: read(arguments.split())).startswith(f"error: {line}")


WIDTH, CLASSES = 4, 3


class Hidden(nn.Module):
    """Takes settings whose defaults the parser cannot read in its text."""

    def __init__(self, **settings):
        super().__init__()
        self.layer = nn.Linear(settings.pop("width", WIDTH), settings.pop("num_classes", CLASSES))


def test_a_setting_of_unknown_default_is_null_where_a_link_gives_it_and_left_out_elsewhere():
    parser = ConciseParser()
    parser.add_class_arguments(Hidden, linked_targets={"num_classes"})
    assert parser.get_defaults().as_dict() == {"num_classes": None}


def test_given_settings_have_plain_names_and_the_last_one_wins():
    Path("net.yaml").write_text("class_path: LeNet\ninit_args: {norm: gn}\n")
    Path("run.yaml").write_text("seed_everything: 1\nmodel: {model: net.yaml, local_steps: 2}\n")
    Path("out.json").write_text("[1]")
    arguments = [
        "fit",
        "--json",
        "out.json",
        "-c",
        "run.yaml",
        "--model.model.init_args.norm=bn",
        "--print_config",
        "--seed",
        "-1",
    ]
    assert given_settings(read_given(arguments)) == {
        "json": "out.json",
        "seed_everything": 1,
        "model.model": "LeNet",
        "model.model.norm": "bn",
        "model.local_steps": 2,
        "print_config": "--seed",
        "seed": -1,
    }


@pytest.mark.parametrize("text", ["2025-02-30", "[1, ", "0x_"])
def test_text_that_is_no_yaml_stays_text(text):
    assert given_settings(read_given(["fit", "--name", text])) == {"name": text}


def test_a_file_below_the_home_is_found_where_the_shell_leaves_the_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.yaml").write_text("model:\n  seed: 5\n")
    assert given_settings(read_given(["fit", "--config=~/x.yaml"])) == {"model.seed": 5}
    (tmp_path / "x.yaml").write_text("date: [2025\n")
    with pytest.raises(ConfigurationError, match=r"x\.yaml is not YAML"):
        given_settings(read_given(["fit", "--config=~/x.yaml"]))
