"""Ctrl-C: finish the communication round, so that nothing of the run is lost."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

import lightning as L


class FinishRound(L.Callback):
    """Turns the first Ctrl-C into a stop at the end of the round; a second one stops at once.

    Attributes:
        requested: Whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._trainer: L.Trainer | None = None
        self._previous: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over Ctrl-C."""
        self._trainer = trainer
        if threading.current_thread() is threading.main_thread():  # others cannot set signal handlers
            self._previous = signal.signal(signal.SIGINT, self._note)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give Ctrl-C back."""
        self._give_back()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Give Ctrl-C back."""
        self._give_back()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.requested or self._trainer is None:
            raise KeyboardInterrupt
        self.requested = self._trainer.should_stop = True
        print("\nstopping after this round; Ctrl-C again stops at once", file=sys.stderr)

    def _give_back(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
