"""Errors of commands, each printed as one line with the setting, its value and a remedy."""

import errno
import inspect
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch.nn import Module
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer

import fl_lightning
from fl_lightning import models
from fl_lightning.aggregation import Aggregator, PreAggregator
from fl_lightning.attacks import Attack
from fl_lightning.cli.options import Refusal
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError, missing_module, nearest
from fl_lightning.execution.base import Executor
from fl_lightning.experiments.run.interruption import stoppable
from fl_lightning.experiments.run.training import quiet_host
from fl_lightning.files import no_link
from fl_lightning.launched import launched_rank, silence, under_torchrun
from fl_lightning.methods.callback import FederatedCallback
from fl_lightning.optimizers.schedules import LRSchedule
from fl_lightning.ranks import is_shared
from fl_lightning.round.tasks import Task

_PATIENCE = 10.0  # number of seconds for which the other ranks wait for rank 0's message

_PACKAGE = Path(fl_lightning.__file__).parent

_SHIPPED = ("fl_lightning", "torch", "torchvision", "lightning")
"""Packages with classes that a configuration can name without a dotted path."""

_OF_LIGHTNING = ("conditioned on metric", "more than one stateful callback")
"""Phrases in Lightning's messages about two mistakes of users.

The mistakes are a missing metric and duplicate callbacks.
"""

SHAPES = {
    "setting": r'Parser key "(.+?)":',
    "unknown setting": r"(?:[Oo]ption '(?P<name>[^']+)' is not accepted|does not accept option '(?P<of_command>[^']+)'"
    r"|unrecognized arguments: --(?P<argument>[\w.]+))",
    "unknown class": r"(?:dot import path string: |Import path |Unable to import .*?)'?([\w.,]+)'?",
    "no class": r"(?s)(?:Not a valid subclass of|expects a function or a callable class).*(?:Got|Given) value: (.*?)(?:\n|$)",
    "broken class": r"class_path '([^']+)':\s*(.*)",
    "value": r"Expected a (<class '[\w.]+'>|typing\.Literal\[.*\])\. Got value: (.*)",
    "value of several types": r"(?s)Subtypes: \[(.*?)\]\n.*Given value: (.*)",
    "setting of no class": r"Given value: NestedArg\(key='(.+?)'",
    "what a class says": r"(?m)^ +- (?!Expected |Type |Import path |Not a|Not of|Problem with |Does not |a class path|a dict |invalid literal)(.+)",
}
"""Regular expressions for jsonargparse's messages.

The tests are in ``tests/cli/test_jsonargparse.py``."""


def explain(
    message: str, settings: Sequence[str] = (), owner: str = "", given: Mapping[str, object] | None = None
) -> str:
    """Shorten a parser's message to one line.

    Args:
        message: Message of the parser.
        settings: Names of all settings that the parser knows.
        owner: Name of the class whose settings the parser reads. The name is empty if the parser
            reads the settings of several classes.
        given: Settings of the user, keyed by plain name.

    Returns:
        One line with the setting and its value. If a name is unknown, the line suggests similar
        names.
    """
    # jsonargparse leaves out the path of a class if the setting also takes a list
    message = re.sub(r"(?s)(Import path)(?= does not .*?Given value: (\S+))", r"\1 \2", message)
    matches = {shape: re.search(pattern, message) for shape, pattern in SHAPES.items()}
    key = matches["setting"][1] if matches["setting"] else ""
    name = ".".join(filter(None, (owner, key)))
    setting = f"{name}: " if name else ""
    if matches["unknown setting"]:
        option = setting_of(message, settings)
        if owner:
            among = ", ".join(settings) or "none, or its class_path is missing"
            near = nearest(option, settings) or _classes_with(option, owner)
            return f"{setting}there is no setting {option!r} among {among}{near}"
        return f"{setting}there is no setting {option!r}{_alike(option, settings, given or {})}"
    if words := matches["what a class says"]:
        return setting + words[1]
    if inner := matches["setting of no class"]:
        classes = ", ".join(sorted(_classes(kinds_of_settings().get(key.rpartition(".")[2], type(None)))))
        return f"{name}.{inner[1]}: {name} is null; give its class first, --{name} CLASS ({classes})"
    if broken := matches["broken class"]:
        lacks = re.search(r"No module named '([\w.]+)'", broken[2])
        package = broken[1].partition(".")[0]
        remedy = missing_module(lacks[1], broken[1]) if lacks else ""
        shadowed = package in ("callbacks", "datamodules", "configs")
        if shadowed and Path(package).is_dir() and not Path(package, "__init__.py").is_file():
            remedy = f"; your folder {package} needs an __init__.py"
        return f"{setting}class {broken[1]!r} cannot be imported: {broken[2]}{remedy}"
    value = matches["value of several types"] or matches["value"]
    of_a_number = value and re.search(r"<class '(int|float|bool)'>", value[1])
    missing, no_class = matches["unknown class"], matches["no class"]
    if value and (of_a_number or not (missing or no_class)):
        types = re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.Literal|\b[a-z_]\w*\.(?:\w+\.)*", r"\1", value[1])
        return f"{setting}{_one_line(value[2])} is not valid; it takes {types.replace('NoneType', 'null')}"
    kinds = kinds_of_settings()
    known = set(_classes(kinds[last])) if (last := key.rpartition(".")[2]) in kinds else set()
    known -= {base.__name__ for base in base_classes()}
    remedy = "give one that this setting takes, or the dotted path of your own"
    remedy = f"there are {', '.join(sorted(known))}" if 0 < len(known) <= 17 else remedy
    if no_class and not missing:
        if unread := re.search(r"'(\w+)': \{'class_path': '([\w.]+)'", no_class[1]):
            return f"{name}.{unread[1]}: {_not_importable(unread[2])}"
        what = "a list, not one class" if no_class[1][0] == "[" and "list[" not in message else "no class"
        return f"{setting}{_one_line(no_class[1])} is {what}; {remedy}"
    if missing:
        if other := re.search(
            rf"{re.escape(missing[1])} does not correspond to a subclass of (\w+)", message
        ):
            return f"{setting}{missing[1]} is no {other[1]}, nor a function annotated to return one; {remedy}"
        if any(missing[1] in _classes(kind) for kind in kinds.values()):
            return f"{setting}the class {missing[1]!r} is of another kind; {remedy}"
        near = nearest(missing[1].rpartition(".")[2], known)
        # a configuration must name a function by its dotted path
        if last == "model" and missing[1] in models.__all__:
            near = f"; did you mean {models.__name__}.{missing[1]}?"
        near = f"; give one class, or for a list [{missing[1]}]" if "," in missing[1] else near
        return f"{setting}there is no class {missing[1]!r}{near or '; ' + remedy}"
    text = message.partition(f'"{key}":')[2] if key else message
    # remove the command's name, because users write settings without a command
    return setting + _one_line(re.sub(r"(required:|,) (?:fit|validate|test|predict)\.", r"\1 ", text))


def _not_importable(path: str) -> str:
    """Return the reason why a class in a dict of objects cannot be instantiated."""
    module, _, name = path.rpartition(".")
    try:
        known = [other for other in dir(import_module(module)) if other[:1].isupper()]
    except (ImportError, ValueError) as error:
        return f"class {path!r} cannot be imported: {error}"
    if name not in known:
        return f"class {path!r} cannot be imported: {module} has no {name}{nearest(name, known)}"
    return f"class {path!r} does not accept these init_args, or is of another kind"


def setting_of(message: str, settings: Sequence[str]) -> str:
    """Return the name of the setting that a parser's message reports.

    If a part of a dotted name is unknown, all parts after this part are cut off.

    Args:
        message: Message of the parser.
        settings: Names of all settings that the parser knows.
    """
    unknown = re.search(SHAPES["unknown setting"], message)
    if not unknown:
        key = re.search(SHAPES["setting"], message)
        return key[1] if key else ""
    option = str(unknown[unknown.lastgroup or 0])
    for end in (match.start() for match in re.finditer(r"\.", option)):
        # the value of this setting is a class, whose arguments are missing in the list of settings
        if option[:end] in settings:
            break
        if not any(known.startswith(option[: end + 1]) for known in settings):
            return option[:end]
    return option


def _alike(option: str, settings: Sequence[str], given: Mapping[str, object]) -> str:
    """Return a clause that suggests similar names of settings.

    The suggestions include arguments of the classes that the user has configured.
    """
    kinds, last = kinds_of_settings(), option.rpartition(".")[2]
    known = [*settings, *given]
    for name, value in given.items():
        kind = kinds.get(name.rpartition(".")[2])
        if kind is not None and (made := _classes(kind).get(str(value))) is not None:
            known += [f"{name}.{parameter}" for parameter in inspect.signature(made).parameters]
    same = [name for name in dict.fromkeys(known) if name.endswith(f".{last}") and name != option]
    sections = (name.partition(".")[0] for name in settings)
    return f"; did you mean {' or '.join(same[:3])}?" if same else nearest(option, [*settings, *sections])


def _classes_with(option: str, owner: str) -> str:
    """Return a clause that names classes with the setting ``option``, which ``owner`` lacks.

    The classes are of the same kind as ``owner``, such as aggregators. The clause is empty if there
    is no such class, or if there are more than four.
    """
    for classes in map(_classes, kinds_of_settings().values()):
        others = [name for name, kind in classes.items() if option in inspect.signature(kind).parameters]
        if owner in classes and 0 < len(others) < 5:
            return f"; {', '.join(sorted(others))} {'has' if len(others) == 1 else 'have'} it"
    return ""


def kinds_of_settings() -> dict[str, type]:
    """Return the base class for each setting whose value is a class.

    The keys are the last parts of the settings' names, such as ``aggregator``.
    """
    from fl_lightning.datamodules.partitions import Partition  # imported late, because it is rarely needed

    return {
        "aggregator": Aggregator,
        "attack": Attack,
        "callback": FederatedCallback,
        "callbacks": Callback,
        "client_lr_schedule": LRSchedule,
        "client_optimizer": Optimizer,
        "data": FederatedDataModule,
        "executor": Executor,
        "loss": _Loss,
        "model": Module,
        "partition": Partition,
        "pre": PreAggregator,
        "server_optimizer": Optimizer,
        "statistics_aggregator": Aggregator,
        "task": Task,
    }


def base_classes() -> tuple[type, ...]:
    """Return the shipped base classes. A configuration cannot name a base class itself."""
    from fl_lightning import attacks, datamodules  # imported late, because it is rarely needed

    return (
        datamodules.PartitionedDataModule,
        datamodules.InMemoryDataModule,
        datamodules.InMemorySamples,
        datamodules.ImageFiles,
        datamodules.Partition,
        attacks.Attack,
    )


def _classes(base: type) -> dict[str, type]:
    """Return the subclasses of a class, keyed by name. Omit classes that need a dotted path."""
    classes, subclasses = dict[str, type](), list[type](type.__subclasses__(base))
    for kind in subclasses:
        classes |= _classes(kind)
        if kind.__module__.partition(".")[0] in _SHIPPED and not kind.__name__.startswith("_"):
            classes[kind.__name__] = kind
    return classes


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) < 300 else line[:297] + "..."


@contextmanager
def command() -> Iterator[None]:
    """Run a command. An error or a signal ends the command with a one-line message.

    If an output stream is closed, or its disk is full, the command continues.
    """
    quiet_host()
    if under_torchrun() and launched_rank():
        silence()
    shown = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        outputs: Any = [_Output(stream or nowhere, nowhere) for stream in shown]
        sys.stdout, sys.stderr = outputs
        try:
            with stoppable():
                yield
        except Refusal as refusal:
            _end(refusal.line, refusal.code)
        except Exception as error:  # noqa: BLE001  # users see one line, whatever the error
            fail(error)
        finally:
            for output in outputs:
                output.flush()
            sys.stdout, sys.stderr = shown


class _Output:
    """Output stream that discards all further output after a failed write."""

    def __init__(self, stream: TextIO, nowhere: TextIO) -> None:
        self._stream, self._nowhere = stream, nowhere

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., object], *arguments: str) -> None:
        try:
            act(*arguments)
        except OSError:
            # dup2 also discards the text in the stream's buffer
            os.dup2(self._nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def refusals() -> Iterator[None]:
    """Convert an error that a user can fix to a ``ConfigurationError``.

    The message is the line that :func:`command` would print.
    """
    quiet_host()
    try:
        yield
    except Refusal as refusal:
        raise ConfigurationError(refusal.line) from None
    except Exception as error:
        line, status = told(error), getattr(error, "exit_status", ConfigurationError.exit_status)
        if line is None or status != ConfigurationError.exit_status:
            raise
        raise ConfigurationError(line + broken_module(error)) from error


def _end(line: str, status: int) -> NoReturn:
    rank = launched_rank() if under_torchrun() else 0
    if rank:
        _let_the_first_rank_speak()
    print(f"error: rank {rank}: {line}" if rank else f"error: {line}", file=_errors())
    sys.exit(status)


def _let_the_first_rank_speak() -> None:
    """Wait until ``torchrun`` ends this rank, because rank 0 probably prints the same error."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_PATIENCE)


def _errors() -> TextIO:
    """Return the stream for errors. On ranks other than 0, ``sys.stderr`` discards all output."""
    return (sys.__stderr__ if launched_rank() else None) or sys.stderr


def fail(error: Exception, traceback_file: Path | None = None) -> NoReturn:
    """Print one line about an error and exit.

    An unforeseen error gives exit status 1, and its traceback is written to a file. Any other error
    gives the exit status in its attribute ``exit_status`` (default 2). If the environment variable
    ``FL_LIGHTNING_TRACEBACK`` is set, the traceback is also printed.

    Args:
        error: Error that ends the command.
        traceback_file: File for the traceback; default: ``error.txt`` in the working directory.
    """
    line, module = told(error), broken_module(error)
    if is_shared(error) and dist.is_initialized() and dist.get_rank():
        _let_the_first_rank_speak()
        sys.exit(1)
    if os.environ.get("FL_LIGHTNING_TRACEBACK"):
        traceback.print_exception(error, file=_errors())
    if line is not None:
        _end(line + module, getattr(error, "exit_status", 2))
    place = _write_traceback(error, traceback_file or Path("error.txt"))
    # jsonargparse wraps an error that a class raises, and only the inner error has notes
    cause = next((cause for cause in _causes(error) if hasattr(cause, "__notes__")), error)
    doing = "; ".join([*getattr(cause, "__notes__", ()), place])
    _end(f"{type(cause).__name__}: {_one_line(str(cause))}".rstrip(": ") + f"{module} ({doing})", 1)


def broken_module(error: BaseException | None) -> str:
    """Return the place of a failed import outside fl_lightning, such as `` (methods.py, line 7)``.

    If no such import failed, the text is empty.
    """
    place = ""
    for cause in _causes(error):
        for frame in traceback.extract_tb(cause.__traceback__):
            if frame.name == "<module>" and _PACKAGE not in Path(frame.filename).parents:
                place = f" ({os.path.relpath(frame.filename)}, line {frame.lineno})"
    return place


def _write_traceback(error: Exception, path: Path) -> str:
    text = "".join(traceback.format_exception(error))
    try:
        if path.is_file() and not path.read_bytes().startswith(b"Traceback"):
            raise FileExistsError(errno.EEXIST, "a file of another kind is there")
        with open(path, "w", opener=no_link, errors="backslashreplace") as file:
            file.write(text)
    except (OSError, ConfigurationError) as unwritable:
        print(text, file=_errors())
        why = f"cannot be written: {unwritable.strerror}" if isinstance(unwritable, OSError) else "is a link"
        return f"the traceback is above, since {path} {why}"
    return f"the traceback is in {path}"


def told(error: BaseException | None) -> str | None:
    """Return the line to print for an error that a user can fix. For other errors, return None."""
    cause = next((x for x in _causes(error) if isinstance(x, ConfigurationError | ImportError)), None)
    if isinstance(cause, ModuleNotFoundError):
        doing = "".join(f" ({note})" for note in getattr(cause, "__notes__", ())[:1])
        return _one_line(str(cause)) + missing_module(cause.name or "") + doing
    while error is not None:
        if isinstance(error, ConfigurationError | MisconfigurationException):
            return " ".join(str(error).split())
        if any(words in str(error) for words in _OF_LIGHTNING):
            return " ".join(str(error).split())
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
