"""Handling of Ctrl-C, SIGTERM and SIGHUP: a run stops after its current round."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning as L

from fl_lightning.launched import under_torchrun
from fl_lightning.ranks import LostRank, Ranks

_WAYS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_ECHO = 2.0  # seconds within which torchrun may repeat a signal from the terminal


class Stopped(SystemExit):
    """Exception that ends the command after a signal, with exit status 128 + signal number.

    Attributes:
        kept: Message about the saved round; empty once it is printed.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.way = _WAYS[self.signal]
        self.kept = "nothing new is kept"


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise :class:`Stopped` if a signal arrives within the ``with`` block.

    If blocks are nested, only the outermost block prints a message.
    """
    previous = _listen(_stop)
    try:
        yield
    except Stopped as stopped:
        if stopped.kept and _stop not in previous.values():
            lost = f" after: {stopped.__context__}" if isinstance(stopped.__context__, LostRank) else ""
            print(f"stopped by {stopped.way}{lost}; {stopped.kept}", file=sys.stderr)
            stopped.kept = ""
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class FinishRound(L.Callback):
    """Callback for a fit in a :func:`stoppable` block.

    The first signal stops the run after the current round. A second signal stops it at once.

    Attributes:
        signal: The first signal, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._heard_at = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the signal handler that stops the run after the current round."""

        def note(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:
                if under_torchrun() and time.monotonic() - self._heard_at < _ECHO:
                    return
                raise Stopped(number)
            self.signal, self._heard_at = signal.Signals(number), time.monotonic()
            print(f"\nstopping after this round; {_WAYS[self.signal]} again stops at once", file=sys.stderr)

        _listen(note)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop all ranks at the end of a round if one of them has received a signal.

        A stop inside the round would skip a batch.
        """
        ranks: Ranks = pl_module.ranks  # type: ignore[assignment]  # of FederatedModule
        if ranks.size > 1:
            asked = ranks.exchange(lambda: (self.signal, trainer.should_stop))
            self.signal = next((number for number, _ in asked if number is not None), None)
            trainer.should_stop = any(stop for _, stop in asked)
        if self.signal is not None:
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the signal handler that stops the run at once."""
        _listen(_stop)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _listen(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Install a handler for the signals, and return the old handlers.

    A signal that the process ignores stays ignored, such as SIGHUP under ``nohup``.
    """
    if threading.current_thread() is not threading.main_thread():
        # only the main thread can set signal handlers
        return {}
    heard = [number for number in _WAYS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}
