"""Ctrl-C, SIGTERM and SIGHUP end nothing untold: they finish the round of a run."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

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
def stoppable() -> Iterator[None]:
    """Let a signal end the block with one line, by :class:`Stopped`."""
    previous = _listen(_stop)
    try:
        yield
    except Stopped as stopped:
        if stopped.kept:
            print(f"stopped by {stopped.way}; {stopped.kept}", file=sys.stderr)
        stopped.kept = ""
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class FinishRound(L.Callback):
    """Within :func:`stoppable`, turns the first signal into a stop at the end of the round; a second one stops at once.

    Attributes:
        signal: The signal that asked for the stop, None where there was none.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the signals."""

        def note(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:
                raise Stopped(number)
            self.signal = signal.Signals(number)
            trainer.should_stop = True
            print(f"\nstopping after this round; {_WAYS[self.signal]} again stops at once", file=sys.stderr)

        _listen(note)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Every rank ends with the first one."""
        self.signal, trainer.should_stop = trainer.strategy.broadcast((self.signal, trainer.should_stop))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let a signal stop at once again."""
        _listen(_stop)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _listen(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Let a handler hear the signals, but those that are ignored, as SIGHUP under nohup; returns the handlers before."""
    if threading.current_thread() is not threading.main_thread():  # others cannot set signal handlers
        return {}
    heard = [number for number in _WAYS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}
