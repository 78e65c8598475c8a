"""Nothing around a run ends it untold: Ctrl-C, SIGTERM and SIGHUP finish the round, and a lost output costs no round."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

import lightning as L

_WAYS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Stopped(SystemExit):
    """A signal ends the command, with 128 and its number as exit status.

    Attributes:
        kept: What is left of the work, for the one line that is printed; empty once it is printed.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.way = _WAYS[signal.Signals(number)]
        self.kept = "nothing is kept"


@contextmanager
def command() -> Iterator[None]:
    """Run a command such that a signal ends it with one line, and an output that is closed or full ends nothing."""
    shown = sys.stdout, sys.stderr
    previous = _listen(_stop)
    with open(os.devnull, "w") as nowhere:
        outputs: Any = _Output(sys.stdout, nowhere, "standard output"), _Output(sys.stderr, nowhere)
        sys.stdout, sys.stderr = outputs
        try:
            yield
        except Stopped as stopped:
            if stopped.kept:
                print(f"stopped by {stopped.way}; {stopped.kept}", file=sys.stderr)
            stopped.kept = ""
            raise
        finally:
            _give_back(previous)
            for output in outputs:
                output.flush()
            sys.stdout, sys.stderr = shown


class _Output:
    """A stream whose text goes nowhere from the moment on at which nobody takes it any more.

    Args:
        stream: The stream, None where it was closed before the command began.
        nowhere: What takes the text then.
        name: What to call it on standard error, empty to say nothing.
    """

    def __init__(self, stream: TextIO | None, nowhere: TextIO, name: str = "") -> None:
        self._stream, self._nowhere, self._name = stream or nowhere, nowhere, name

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., object], *arguments: str) -> None:
        try:
            act(*arguments)
        except OSError as error:
            os.dup2(self._nowhere.fileno(), self._stream.fileno())  # with what is still in the buffer
            if self._name:
                print(f"{self._name}: {error.strerror}; the command goes on without it", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class FinishRound(L.Callback):
    """Turns the first Ctrl-C, SIGTERM or SIGHUP into a stop at the end of the round; a second one stops at once.

    Attributes:
        signal: The signal that asked for the stop, None where there was none.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._trainer: L.Trainer | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the signals."""
        self._trainer = trainer
        self._previous = _listen(self._note)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the signals back."""
        _give_back(self._previous)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Give the signals back."""
        _give_back(self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None or self._trainer is None:
            raise Stopped(number)
        self.signal = signal.Signals(number)
        self._trainer.should_stop = True
        print(f"\nstopping after this round; {_WAYS[self.signal]} again stops at once", file=sys.stderr)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _listen(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Let a handler hear the signals, but those that are ignored, as SIGHUP under nohup; returns the handlers before."""
    if threading.current_thread() is not threading.main_thread():  # others cannot set signal handlers
        return {}
    heard = [number for number in _WAYS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _give_back(previous: dict[signal.Signals, Any]) -> None:
    for number in list(previous):
        signal.signal(number, previous.pop(number))
