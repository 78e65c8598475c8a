"""Errors of commands, each printed as one line with the setting, its value and a remedy."""

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

import fl_lightning
from fl_lightning.errors import ConfigurationError, missing_module
from fl_lightning.experiments.run.interruption import stoppable
from fl_lightning.experiments.run.training import quiet_host
from fl_lightning.folders import folder_of
from fl_lightning.launched import launched_rank, silence, under_torchrun
from fl_lightning.ranks import is_shared

_PATIENCE = 10.0  # number of seconds for which the other ranks wait for rank 0's message

_OWN = {Path(fl_lightning.__file__).parent, folder_of("callbacks"), folder_of("datamodules")}
"""Folders of the package's code."""

_OF_LIGHTNING = ("conditioned on metric", "more than one stateful callback")
"""Phrases in Lightning's messages about two mistakes of users.

The mistakes are a missing metric and duplicate callbacks.
"""


class Refusal(SystemExit):
    """Exception that ends a command with a one-line message.

    It is no ``ValueError``, because jsonargparse catches these.

    Attributes:
        line: Line to print.
        code: Exit status.
    """

    code: int

    def __init__(self, line: str) -> None:
        super().__init__(ConfigurationError.exit_status)
        self.line = line


def one_line(text: str) -> str:
    """Return a text without line breaks, shortened to 300 characters."""
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
    _end(f"{type(cause).__name__}: {one_line(str(cause))}".rstrip(": ") + f"{module} ({doing})", 1)


def broken_module(error: BaseException | None) -> str:
    """Return the place of a failed import outside fl_lightning, such as `` (methods.py, line 7)``.

    If no such import failed, the text is empty.
    """
    place = ""
    for cause in _causes(error):
        for frame in traceback.extract_tb(cause.__traceback__):
            if frame.name == "<module>" and _OWN.isdisjoint(Path(frame.filename).parents):
                place = f" ({os.path.relpath(frame.filename)}, line {frame.lineno})"
    return place


def _write_traceback(cause: Exception, path: Path) -> str:
    text = "".join(traceback.format_exception(cause))
    try:
        if path.is_file() and not path.read_bytes().startswith(b"Traceback"):
            raise FileExistsError(errno.EEXIST, "a file of another kind is there")
        with open(path, "w", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        print(text, file=_errors())
        return f"the traceback is above, since {path} cannot be written: {error.strerror}"
    return f"the traceback is in {path}"


def told(error: BaseException | None) -> str | None:
    """Return the line to print for an error that a user can fix. For other errors, return None."""
    cause = next((x for x in _causes(error) if isinstance(x, ConfigurationError | ImportError)), None)
    if isinstance(cause, ModuleNotFoundError):
        doing = "".join(f" ({note})" for note in getattr(cause, "__notes__", ())[:1])
        return one_line(str(cause)) + missing_module(cause.name or "") + doing
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
