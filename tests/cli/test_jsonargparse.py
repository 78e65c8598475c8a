"""jsonargparse's messages are no interface of it: what this project reads of them is held here, one raw message each."""

import importlib.metadata
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from fl_lightning.cli.messages import SHAPES


class Own:
    """A class with settings."""

    def __init__(self, size: int = 1) -> None:
        self.size = size


class Kind(ABC):
    """A class that others are of."""

    @abstractmethod
    def work(self): ...


def parser_of():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--number", type=int)
    parser.add_argument("--numbers", type=int | None)
    parser.add_argument("--word", type=Literal["a", "b"])
    parser.add_argument("--thing", type=Own)
    parser.add_argument("--things", type=list[Own] | Own | None)
    parser.add_argument("--nothing", type=Kind | None)
    parser.add_argument("--no_function", type=Callable[[int], float] | None)
    parser.add_argument("--function", type=Callable[[int], int])
    return parser


def of_commands():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    commands = parser.add_subcommands()
    commands.add_subcommand("fit", parser_of())
    return parser


# (shape, what is given, the groups that must be found)
TABLE = [
    ("setting", ["--number", "x"], ["number"]),
    ("unknown setting", ["--thing", f"{__name__}.Own", "--thing.colour", "1"], ["colour"]),
    ("unknown setting", ["--nubmer", "1"], ["nubmer"]),
    ("unknown setting", {"fit": {"nubmer": 1}}, ["nubmer"]),
    ("unknown class", ["--thing", "Nothing"], ["Nothing"]),
    ("unknown class", ["--things", "Nothing"], ["Nothing"]),
    ("unknown class", ["--thing", "torch.nn.ReLU"], ["torch.nn.ReLU"]),
    ("no class", {"thing": 3}, ["3"]),
    ("no class", {"nothing": ["A", "B"]}, ["['A', 'B']"]),
    ("no class", {"function": ["A"]}, ["['A']"]),
    ("setting of no class", ["--nothing.size", "2"], ["size"]),
    ("setting of no class", ["--no_function.size", "2"], ["size"]),
    ("broken class", ["--thing", "torch.nn.Nothing"], ["torch.nn.Nothing", "module 'torch.nn' has no attribute 'Nothing'"]),
    ("broken class", {"things": [{"class_path": "torch.nn.Nothing"}]}, ["torch.nn.Nothing", "module 'torch.nn' has no attribute 'Nothing'"]),
    ("value", ["--number", "x"], ["<class 'int'>", "x"]),
    ("value", ["--word", "c"], ["typing.Literal['a', 'b']", "c"]),
    ("value of several types", ["--numbers", "x"], ["<class 'int'>, <class 'NoneType'>", "x"]),
    ("what a class says", {"things": [{"class_path": "says.Mine"}]}, ["Mine is not finished"]),
    ("what a class says", ["--things+", "says.Mine"], ["Mine is not finished"]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "given", "groups"), TABLE)
def test_message_has_the_shape_that_is_read(shape, given, groups, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "says.py").write_text("raise ValueError('Mine is not finished')\n")
    parser = of_commands() if "fit" in given else parser_of()
    with pytest.raises(ArgumentError) as refused:
        parser.parse_args(given) if isinstance(given, list) else parser.parse_object(given)
    message = refused.value.message
    found = re.search(SHAPES[shape], message)
    version = importlib.metadata.version("jsonargparse")
    assert found, (
        f"jsonargparse {version} words {shape!r} anew; mend SHAPES in fl_lightning/cli/messages.py: {message}"
    )
    assert [group for group in found.groups() if group] == groups


def test_every_shape_is_held():
    assert {shape for shape, *_ in TABLE} == set(SHAPES)


def test_what_jsonargparse_says_itself_is_not_what_a_class_says():
    for given in (
        ["--things", "Nothing"],
        ["--numbers", "x"],
        ["--things", "torch.nn.Nothing"],
        ["--no_function.size", "2"],
    ):
        with pytest.raises(ArgumentError) as refused:
            parser_of().parse_args(given)
        assert not re.search(SHAPES["what a class says"], refused.value.message), refused.value.message
