"""A LightningCLI parser whose errors are one line, and what the user gave before it adds defaults, types and links."""

import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, NamedTuple, NoReturn, get_args, get_type_hints

import yaml
from jsonargparse import Namespace
from jsonargparse._parameter_resolvers import UnknownDefault
from jsonargparse._util import import_object
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from fl_lightning.cli.messages import Refusal, broken_module, explain, setting_of
from fl_lightning.errors import ConfigurationError, doing
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.files import user_path
from fl_lightning.recorded import parameters, record

# an enum that a parameter of another type has by default: Timer(interval: str = Interval.step)
yaml.SafeDumper.add_multi_representer(enum.Enum, lambda dumper, member: dumper.represent_data(member.value))


class ConciseParser(LightningArgumentParser):
    """A parser that prints one line of an error, without pages of usage, and takes no abbreviated settings.

    Attributes:
        owner: The class whose settings it reads, empty if the settings belong to several.
        given: The user's settings: errors name near ones, and the file and line of a wrong one.
    """

    owner = ""
    given: ClassVar[Sequence["Given"]] = ()
    _functions: ClassVar[set[Any]] = set()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation would make a misspelt setting (--model.local_step) pass as another one.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._commands: Any = None

    def add_class_arguments(
        self, class_type: type, nested_key: str | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """Add the settings of a class, and remember whose they are when the parser is for this class alone."""
        if nested_key is None:
            self.owner = class_type.__name__
        names: list[str] = super().add_class_arguments(class_type, nested_key, *args, **kwargs)
        self._let_links_decide(kwargs.get("linked_targets"))
        self._refuse_class_defaults(class_type)
        return names

    def add_function_arguments(
        self, function: Callable[..., Any], *args: Any, linked_targets: object = None, **kwargs: Any
    ) -> list[str]:
        """Add the settings of a function that makes a model; jsonargparse says which are linked, and knows it only of classes."""
        self.owner = function.__name__
        self._functions.add(function)
        names: list[str] = super().add_function_arguments(function, *args, **kwargs)
        self._let_links_decide(linked_targets)
        self._refuse_class_defaults(function)
        parameters, made = inspect.signature(function).parameters.values(), get_type_hints(function)["return"]
        passes_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
        if passes_on and "num_classes" not in names and issubclass(made, nn.Module):
            # a function that looks up another by name, as timm's does, hides what that one takes
            names.append(self.add_argument("--num_classes", type=int | None, default=None).dest)
        return names

    def _let_links_decide(self, targets: Any) -> None:
        """Give linked settings a default where their class has none that is known: a link ignores a setting without a value."""
        for action in self._actions:
            if action.dest in (targets or ()) and isinstance(action.default, UnknownDefault):
                action.default = None

    def _refuse_class_defaults(self, made: Callable[..., Any]) -> None:
        """Refuse a setting whose default is a class that takes arguments, such as ShuffleNetV2's blocks: the parser would ask for them."""
        for action in self._actions:
            if isinstance(action.default, dict) and action.default.keys() == {"class_path"}:
                parameters = inspect.signature(
                    import_object(action.default["class_path"])
                ).parameters.values()
                if any(p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters):
                    raise ConfigurationError(
                        f"{made.__name__}: its setting {action.dest} is a class by default ({action.default['class_path']}), which a "
                        "configuration cannot name; use fl_lightning.models.library_model with "
                        f"function: {made.__module__}.{made.__name__}"
                    )

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Add the place of the subcommands, and remember it."""
        self._commands = super().add_subcommands(*args, **kwargs)
        return self._commands

    def instantiate(self, *args: Any, **kwargs: Any) -> Namespace:
        """Make the classes that the settings name; an exception of theirs notes which one, and with which values."""
        made: Namespace = super().instantiate(*args, instantiators=[(_make, object, True)], **kwargs)
        return made

    def _get_parser_instantiators(self) -> dict[tuple[Any, bool], Any]:
        """Let functions that make models note and record the same; ``instantiate`` takes classes only."""
        return {(function, False): _make for function in self._functions}

    def settings(self) -> list[str]:
        """The names of the settings that the parser and its subcommands take, without ``init_args``."""
        parsers = self._commands.choices.values() if self._commands else [self]
        return list(
            dict.fromkeys(plain_name(name) for parser in parsers for name, _ in parser.get_defaults().items())
        )

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Refuse the settings with a short form of a parser's message."""
        settings = self.settings()
        given = {one.setting: one.value for one in self.given if one.value is not _SECTION}
        place = _place(plain_name(setting_of(message, settings)), bool(self.owner), self.given)
        broken = broken_module(ex) or broken_module(_of_import(message))
        raise Refusal(explain(message, settings, self.owner, given) + (broken or place))


def _of_import(message: str) -> Exception | None:
    """Return the error of importing a class's module: jsonargparse loses it if a setting takes a list of classes."""
    named = re.search(r"Given value: '?(\w+(?:\.\w+)+)'?$", message)
    try:
        if named:
            import_object(named[1])
    except Exception as error:  # noqa: BLE001  # the module's own
        return error
    return None


def _make(class_type: type, *args: Any, **settings: Any) -> Any:
    given = {name: value for name, value in settings.items() if isinstance(value, str | int | float)}
    with doing(
        f"making {class_type.__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
    ):
        _refuse_null(class_type, settings)
        made = class_type(*args, **settings)
        record(made, class_type, args, settings)
        return made


def _refuse_null(class_type: type, settings: Config) -> None:
    """Raise an error for a setting without a value whose type has no null: jsonargparse lets it pass."""
    for name in [name for name, value in settings.items() if value is None]:
        known = parameters(class_type).get(name)
        if known is None or known.default is None:
            continue
        if known.annotation is known.empty:
            if known.default is known.empty:  # jsonargparse requires only what has a type
                raise ConfigurationError(f"{class_type.__name__}.{name} is missing; give it")
            continue
        kinds = get_args(known.annotation) or (known.annotation,)
        if NoneType not in kinds and all(isinstance(kind, type) for kind in kinds):
            takes = ", ".join(kind.__name__ for kind in kinds)
            raise ConfigurationError(f"{class_type.__name__}.{name}: null is not valid; it takes {takes}")


class Given(NamedTuple):
    """A setting that the user gave.

    Attributes:
        name: Its dotted name, as the user wrote it.
        value: Its value.
        file: The file that gives it, empty for the command line.
        line: The line of its key there.
    """

    name: str
    value: Any
    file: str = ""
    line: int = 0

    @property
    def setting(self) -> str:
        """Its plain name (:func:`plain_name`)."""
        return plain_name(self.name).removesuffix("+")


_SECTION = object()
"""The value of a key that is a section: each setting in it has its own line."""


def read_given(arguments: Sequence[str]) -> list[Given]:
    """Return the settings that the files and the arguments give, and the sections of files.

    Args:
        arguments: The command line without the program's name.

    Raises:
        ConfigurationError: A file is not YAML, or it holds no settings.
    """
    given: list[Given] = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, value = argument.partition("=")
        if option == "-c" or option.startswith("--"):
            name = "" if option in ("-c", "--config") else option.removeprefix("--")
            given += _walk(Given(name, _value(value if equals else following)), Path())
    return given


def given_settings(given: Sequence[Given]) -> Config:
    """Return the values of given settings by plain name (:func:`plain_name`); later ones win."""
    return {one.setting: one.value for one in given if one.value is not _SECTION}


def _place(setting: str, of_a_class: bool, given: Sequence[Given]) -> str:
    """Return the file and line of a setting, such as `` (mine.yaml, line 7)``; empty if several could be meant."""
    found = [
        one
        for one in given
        if setting and (one.setting == setting or (of_a_class and one.setting.endswith(f".{setting}")))
    ]
    outermost = min((one.name for one in found), key=len, default="")
    places = {(one.file, one.line) for one in found if one.name == outermost or not one.file}
    is_clear = len({one.setting for one in found}) == len(places) == 1
    return _at(*places.pop()) if is_clear else ""


def new_lists(arguments: Sequence[str]) -> list[str]:
    """Let a list of callbacks replace an earlier one: jsonargparse would fill its entries in with settings of the earlier list's."""
    found, is_given = [], False
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        words = [argument] if "=" in argument else [argument, following]
        if argument == "-c" or argument.startswith("--"):
            lists = [one for one in read_given(words[:2]) if one.setting.endswith("trainer.callbacks")]
            if is_given and any(isinstance(one.value, list) and not one.name.endswith("+") for one in lists):
                found.append("--trainer.callbacks=null")
            is_given = is_given or bool(lists)
        found.append(argument)
    return found


def one_milestone_each(arguments: Sequence[str], given: Config) -> list[str]:
    """Let ``--trainer.callbacks.freeze_round 2`` replace the ``freeze_fraction`` that a file gives, and the other way round."""
    options, found = [argument.partition("=")[0] for argument in arguments], []
    for option, argument in zip(options, arguments, strict=True):
        name, _, unit = option.rpartition("_")
        other = f"{name}_{ {'round': 'fraction', 'fraction': 'round'}.get(unit) }"
        if other.removeprefix("--") in given and not {other, name.rpartition(".")[0]} & {*options}:
            found.append(f"{other}=null")
        found.append(argument)
    return found


def plain_name(setting: str) -> str:
    """A dotted name without ``init_args`` and ``class_path``, which the command line lets out as well."""
    return ".".join(part for part in setting.split(".") if part not in ("init_args", "class_path"))


def _walk(given: Given, folder: Path) -> Iterator[Given]:
    name, tree, file, _ = given
    may_be_file = isinstance(tree, str) and (not name or tree.endswith((".yaml", ".yml")))
    if may_be_file and (path := folder / user_path("config", tree)).is_file():
        folder, tree, file = path.parent, _read(path), str(path)
    if not isinstance(tree, dict):
        yield given
        for item in tree if isinstance(tree, list) else ():
            if isinstance(item, dict):
                yield from _walk(Given(name, item, file), folder)
        return
    if "class_path" in tree:
        _check_class(tree, plain_name(name), _at(file, getattr(tree, "lines", {}).get("class_path", 0)))
    if given.line:
        yield given._replace(value=_SECTION)
    for key, value in tree.items():
        line = getattr(tree, "lines", {}).get(key, 0)
        yield from _walk(Given(f"{name}.{key}".lstrip("."), value, file, line), folder)


def _at(file: str, line: int) -> str:
    return f" ({file}, line {line})" if file and line else ""


def _check_class(tree: Config, name: str, place: str) -> None:
    """Refuse what jsonargparse takes for a mistake in its own words: a class without a name, settings beside it or without names."""
    kind, settings = tree["class_path"], tree.get("init_args") or {}
    if not isinstance(kind, str):
        raise ConfigurationError(f"{name}: class_path: {kind} must be the name of one class{place}")
    if not isinstance(settings, dict | str):
        raise ConfigurationError(
            f"{name}: init_args of {kind}: {settings} must be settings with names, such as {{name: value}}{place}"
        )
    if beside := tree.keys() - {"class_path", "init_args", "dict_kwargs"}:
        raise ConfigurationError(
            f"{name}: {', '.join(sorted(beside))} beside class_path: {kind}; settings of a class go below its init_args{place}"
        )


def _read(path: Path) -> Config:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), _OnceEach)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        said = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else error
        raise ConfigurationError(f"config {path} is not YAML: {said}") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"config {path} holds no settings such as 'model: ...': {settings}")
    return settings


class _Lined(dict[Any, Any]):
    """A mapping of a file, with the line of each key."""

    lines: Mapping[Any, int]


class _OnceEach(yaml.SafeLoader):
    """Reads the lines of keys, and refuses a key that is given twice: the last one would win in silence."""

    def lined(self, node: yaml.MappingNode) -> Iterator[_Lined]:
        """Read a mapping, empty at first, as an alias may be within it."""
        found = _Lined()
        yield found
        keys: dict[Any, int] = {}
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in keys:
                problem = f"{key.value!r} is given twice; keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys[key.value] = key.start_mark.line + 1
        found.update(self.construct_mapping(node))
        found.lines = keys


_OnceEach.add_constructor("tag:yaml.org,2002:map", _OnceEach.lined)


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # a date that no calendar has
        return text
