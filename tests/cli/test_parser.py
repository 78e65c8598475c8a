"""The parser on its own, and what it knows of what the user gave."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from torch import nn
from torchmetrics import Metric

import fl_lightning.callbacks  # noqa: F401  # makes their bare names known
from fl_lightning import FederatedCallback
from fl_lightning.cli.parser import ConciseParser, new_lists
from fl_lightning.cli.print_errors import Refusal, command
from fl_lightning.cli.user_settings import given_settings, read_given
from fl_lightning.errors import ConfigurationError
from tests.support.command_line import message_of


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


class Made:
    def __init__(
        self,
        count: int = 1,
        way: Literal["up", "down"] = "up",
        both: int | Literal["auto"] = "auto",
        names: list[str] = (),
        call: Callable[[int], int] = abs,
        may: int | None = 1,
        absent: int = None,  # noqa: RUF013
        thing: Any = 1,
        item: object = 1,
        later: "Unknown" = 1,  # noqa: F821
        known: Annotated[int | None, 1] = 1,
        choice: Literal["on", None] = "on",  # noqa: PYI061
        bare=1,
        **more,
    ):
        self.settings = dict(locals()) | more


def made(*arguments):
    parser = ConciseParser(prog="mine", exit_on_error=False)
    parser.add_subclass_arguments(Made, "made")
    return parser.instantiate(parser.parse_args(["--made", f"{__name__}.Made", *arguments])).made


@pytest.mark.parametrize(
    "name", ["may", "absent", "thing", "item", "later", "known", "choice", "bare", "dict_kwargs.other"]
)
def test_null_is_a_value_where_a_type_takes_it(name):
    assert made(f"--made.{name}", "null").settings[name.rpartition(".")[2]] is None


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("count", "int"),
        ("way", "['up', 'down']"),
        ("both", "int, ['auto']"),
        ("names", "list[str]"),
        ("call", "Callable[[<class 'int'>], int]"),
    ],
)
def test_null_is_refused_where_a_type_takes_none(name, takes):
    with pytest.raises(Exception, match=f"Made.{name}: null is not valid; it takes ") as refused:
        made(f"--made.{name}", "null")
    assert f"it takes {takes}" in str(refused.value)


class Asks:
    def __init__(self, needed):
        pass


def test_a_setting_without_type_and_default_is_asked_for():
    parser = ConciseParser(prog="mine", exit_on_error=False)
    parser.add_subclass_arguments(Asks, "asks", fail_untyped=False)
    with pytest.raises(Exception, match=r"Asks\.needed is missing; give it"):
        parser.instantiate(parser.parse_args(["--asks", f"{__name__}.Asks"]))


class Measured:
    def __init__(self, num_classes: int, size: int):
        pass


class Counted(Metric):
    def __init__(self, num_classes: int, size: int):
        pass


class Known(Metric):
    def __init__(self, num_classes: int = 5):
        pass


@pytest.mark.parametrize(
    ("owner", "arguments", "refused"),
    [
        (Measured, ["--size=1"], "num_classes"),
        (Counted, [], "size"),
        (Known, ["--num_classes=null"], "num_classes"),
        (Counted, ["--size=1"], None),
    ],
)
def test_only_a_metric_may_leave_the_number_of_classes_to_the_data(owner, arguments, refused):
    parser = ConciseParser(prog="mine", exit_on_error=False)
    parser.add_class_arguments(owner)
    if refused:
        with pytest.raises(Refusal) as stop:
            parser.parse_args(arguments)
        assert refused in stop.value.line
    else:
        assert parser.parse_args(arguments).num_classes is None


class Wide:
    def __init__(self, width: int = 3, depth: int = 2):
        pass


class Narrow:
    def __init__(self, width: int = 4, depth: int = 1):
        pass


class Either:
    def __init__(self, wide: bool, count: int = 7, **settings):
        self.made = Wide(**settings) if wide else Narrow(**settings)


def test_only_an_unknown_default_of_a_linked_setting_becomes_none():
    parser = ConciseParser(prog="mine")
    parser.add_class_arguments(Either, linked_targets={"width", "count"})
    defaults = {action.dest: action.default for action in parser._actions}
    assert defaults["width"] is None
    assert defaults["count"] == 7
    assert "2" in str(defaults["depth"])


NULL = "--trainer.callbacks=null"
A, B = "--trainer.callbacks=[A]", "--trainer.callbacks=[B]"


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["fit", A, B], 2),
        (["fit", "--trainer.callbacks", "[A]", "--trainer.callbacks", "[B]"], 3),
        ([A, "--x=1", B], 2),
        ([A, "--trainer.callbacks", "[]"], 1),
        (["-c", "a.yaml", "-c", "b.yaml"], 2),
        (["-c", "a.yaml", "--config=b.yaml"], 2),
        (["--config", "a.yaml", B], 2),
        ([A, "--trainer=both.yaml"], 1),
        ([A], None),
        (["fit", "--trainer.max_epochs", "-1", A, "--print_config"], None),
        ([A, "--trainer.callbacks+=[B]", "--trainer.callbacks+=B"], None),
        ([A, "--trainer.callbacks=B"], None),
        ([A, "--trainer.callbacks.mu=[1]"], None),
        ([A, "--mine.callbacks=[1]"], None),
    ],
)
def test_a_list_of_callbacks_replaces_the_list_before(arguments, place):
    for name in "ab":
        Path(f"{name}.yaml").write_text(f"trainer: {{callbacks: [{name}]}}")
    Path("both.yaml").write_text("{callbacks: [a], callbacks+: b}")
    expected = arguments if place is None else [*arguments[:place], NULL, *arguments[place:]]
    assert new_lists(arguments) == expected
