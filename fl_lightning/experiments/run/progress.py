"""Progress line of a run: rounds, local steps, loss, accuracy, speed and remaining time."""

import time
from datetime import timedelta

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fl_lightning.errors import ConfigurationError
from fl_lightning.recorded import Recorded

_REFRESH_SECONDS = 0.1


class RoundProgress(Recorded, ProgressBar):
    """Progress bar that counts communication rounds.

    A terminal shows one line, which is refreshed at most ten times a second. A pipe or a log file
    gets new lines without control characters.

    The line shows the metrics of the newest complete round. The total number of rounds is the
    trainer's ``max_epochs``. The module calls :meth:`local_step` after each local step.

    The remaining time is computed from the mean time of a round with its evaluation. The first round
    of a process does not count, because it may include compilation.

    Args:
        every_n_seconds: Minimum time in seconds between two lines of a pipe or log file, at least 0
            (default 5).

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> bar = RoundProgress(every_n_seconds=60)
        >>> state = train(
        ...     small_cnn(), blobs(), rounds=2, callbacks=[bar], trainer={"enable_progress_bar": True}
        ... )
        round 2/2  loss ...
    """

    def __init__(self, every_n_seconds: float = 5.0) -> None:
        super().__init__()
        if not every_n_seconds >= 0:
            raise ConfigurationError(f"every_n_seconds must be >= 0, found {every_n_seconds}")
        self.every_n_seconds = every_n_seconds
        self.is_enabled = True  # Lightning's method LightningModule.print reads this attribute
        self._live: Live | None = None
        self._next_time = self._started_at = self._second_round_at = 0.0
        self._first_round = 0
        # newest value of each metric, as some rounds have no evaluation
        self._metrics: dict[str, float] = {}

    def disable(self) -> None:
        """Hide the progress line on this rank.

        Lightning calls this method on all ranks except the first.
        """
        self.is_enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the progress line. In a resumed run, it starts at the checkpoint's round."""
        self._metrics, self._first_round, self._started_at = {}, trainer.current_epoch, time.monotonic()
        console = Console()
        if console.is_interactive and self.is_enabled:
            # no auto_refresh: its thread could hold a lock while a data worker is forked
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
        self._next_time = self._started_at + (0.0 if self._live else self.every_n_seconds)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the metrics of the previous round.

        The metrics of a round are complete only after the hook ``on_train_epoch_end``.
        """
        self._metrics |= getattr(pl_module, "metrics", {})
        if trainer.current_epoch == self._first_round + 1:
            self._second_round_at = time.monotonic()
        if self._live or trainer.current_epoch > self._first_round:
            self._show()

    def local_step(self, step: int, of: int) -> None:
        """Show the number of local steps in the current round.

        Args:
            step: Number of the local step, from 1.
            of: Number of local steps in the round.
        """
        if self._live:
            self._show(f"step {step}/{of}", step / max(of, 1))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the metrics of the last round, and leave the progress line on the terminal."""
        self._metrics |= getattr(pl_module, "metrics", {})
        self._show(at_once=True)
        self._close()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Close the progress line, so that the error is printed below the line."""
        self._close()

    def _close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _show(self, steps: str = "", fraction: float = 0.0, at_once: bool = False) -> None:
        now = time.monotonic()
        if not self.is_enabled or (now < self._next_time and not at_once):
            return
        self._next_time = now + (_REFRESH_SECONDS if self._live else self.every_n_seconds)
        done, total = self.trainer.current_epoch, self.trainer.max_epochs or 0
        quality = getattr(getattr(self.trainer.lightning_module, "task", None), "quality", "accuracy")
        shown = {"train/loss": "loss {:.4g}"}
        shown |= {f"{split}/{quality}": f"{split}/{quality} {{:.4g}}" for split in ("val", "test")}
        if getattr(getattr(self.trainer.lightning_module, "client", None), "logs_itself", False):
            names = self.trainer.progress_bar_metrics.keys() - shown.keys()
            shown |= {name: f"{name} {{:.4g}}" for name in sorted(names)}
        shown["time/samples_per_s"] = "{:,.0f} samples/s"
        values = [(text, self._metrics[name]) for name, text in shown.items() if name in self._metrics]
        texts = [
            f"round {done:{len(str(total))}}/{total}",
            *(text.format(float(value)) for text, value in values),
            self._clock(now, done + fraction, total),
            steps,
        ]
        line = "  ".join(filter(None, texts))
        if self._live:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            print(line, flush=True)

    def _clock(self, now: float, done: float, total: int) -> str:
        if done >= total:
            return f"in {timedelta(seconds=round(now - self._started_at))}"
        measured = done - self._first_round - 1
        if measured <= 0:
            return ""
        seconds = (now - self._second_round_at) / measured * (total - done)
        return f"ETA {timedelta(seconds=round(seconds))}"
