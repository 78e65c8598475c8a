"""Ctrl-C and SIGTERM: finish the communication round, so that nothing of the run is lost."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

_WAYS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class FinishRound(L.Callback):
    """Turns the first Ctrl-C or SIGTERM into a stop at the end of the round; a second one stops at once.

    Attributes:
        signal: The signal that asked for the stop, None where there was none.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._trainer: L.Trainer | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over Ctrl-C and SIGTERM, whose handler of Lightning leaves with status 0, as if all were done."""
        self._trainer = trainer
        if trainer.received_sigterm:
            raise SIGTERMException  # it came before the first round, when nothing was there to be finished
        if threading.current_thread() is threading.main_thread():  # others cannot set signal handlers
            self._previous = {number: signal.signal(number, self._note) for number in _WAYS}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the signals back."""
        self._give_back()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Give the signals back."""
        self._give_back()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        number = signal.Signals(signum)
        if self.signal is not None or self._trainer is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SIGTERMException
        self.signal = number
        self._trainer.should_stop = True
        print(f"\nstopping after this round; {_WAYS[number]} again stops at once", file=sys.stderr)

    def _give_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
