"""Where a run trains: in a folder of its own, or resumed in that of its checkpoint, or forked from it into a new one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import write_bytes, write_text
from fl_lightning.run_directory.checkpoint_io import load_run
from fl_lightning.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.run_directory.directory import Attempt, RunDirectory, attempt_of
from fl_lightning.run_directory.metrics import lines_until, read_metrics


@dataclass(frozen=True)
class Start:
    """Where a fit begins.

    Attributes:
        attempt: The folder that it trains in, None where nothing is written (``fast_dev_run``).
        round: The round that it goes on from; 0 for a run from the start.
        is_new: Whether the folder was made for it.
        own_settings: Whether the checkpoint is of a run with other settings.
    """

    attempt: Attempt | None = None
    round: int = 0
    is_new: bool = True
    own_settings: bool = False

    def has_trained(self) -> bool:
        """Whether the fit has finished a round."""
        if self.attempt is None or not self.attempt.metrics.exists():
            return False
        return any(row["round"] > self.round for row in read_metrics(self.attempt.metrics))

    def discard_untrained(self) -> None:
        """Remove a folder that was made for a fit without a finished round."""
        if self.attempt is not None and self.is_new and not self.has_trained():
            self.attempt.discard()


def find_start(
    directory: RunDirectory,
    ckpt_path: Path,
    checkpoint: dict[str, Any],
    max_rounds: int | None,
    config: str,
    keeper: RoundCheckpoint,
) -> Start:
    """Find the folder in which a run goes on: that of its checkpoint only where it goes on at its end.

    A run of other settings or another seed, and one that goes back behind its last checkpoint, gets a new
    attempt, so that what another run has computed is never cut or mixed with what it did not compute.

    Args:
        directory: All attempts of the run.
        ckpt_path: The checkpoint that it goes on from.
        checkpoint: What it holds.
        max_rounds: The number of rounds, None or -1 where only the data tell it.
        config: The run's resolved configuration as YAML.
        keeper: The run's own checkpoints; none is copied where they lie in another folder.

    Raises:
        ConfigurationError: A new attempt would have nothing to train, or metrics of the rounds before are missing.
    """
    resumed, source = int(checkpoint["global_step"]), attempt_of(ckpt_path)
    owned = source is not None and directory.owns(source)
    if source is not None and owned and not _is_behind(source, resumed):
        lines_until(source.metrics, resumed)  # refuses a file without the metrics of a round
        return Start(source, resumed, is_new=False)
    if max_rounds is not None and 0 <= max_rounds <= resumed:
        raise ConfigurationError(
            f"trainer.max_epochs: {max_rounds}, but {ckpt_path} is of round {resumed}: nothing is left to train; "
            f"use at least {resumed + 1}, or python -m fl_lightning test --ckpt_path {ckpt_path}"
        )
    if source is None:
        new = directory.new_attempt()
        print(
            f"new attempt {new.path} starts at round {resumed + 1}, and so does its metrics.jsonl: {ckpt_path} lies in no "
            "run directory",
            flush=True,
        )
        return Start(new, resumed, own_settings=True)
    best_round = checkpoint.get("callbacks", {}).get(keeper.state_key, {}).get("best_round")
    new = fork(source, resumed, directory, config, ckpt_path if keeper.dirpath is None else None, best_round)
    print(
        f"new attempt {new.path} goes on from round {resumed} of {source.path}, which stays as it is: "
        f"{'the checkpoint is older than its last.ckpt' if owned else 'it has other settings or another seed'}",
        flush=True,
    )
    return Start(new, resumed, own_settings=not owned)


def fork(
    source: Attempt,
    round_number: int,
    directory: RunDirectory,
    config: str,
    last: Path | None,
    best_round: int | None = None,
) -> Attempt:
    """Make a new attempt with what another one had computed until a round.

    Args:
        source: The attempt, which is left as it is.
        round_number: The round.
        directory: Where the new attempt belongs.
        config: The new attempt's resolved configuration as YAML.
        last: The checkpoint of the round, None where no checkpoint shall be copied.
        best_round: The round of ``best.ckpt`` at that time, None where there was none.

    Raises:
        ConfigurationError: The metrics of a round are missing, or a file cannot be written.
    """
    # read before there is a folder: lines that are missing leave nothing behind
    lines = lines_until(source.metrics, round_number)
    new, best = directory.new_attempt(), source.checkpoints / "best.ckpt"
    try:
        write_bytes(new.metrics, b"".join(lines))
        write_text(new.config, config)
        if last is not None and best_round is not None and best.is_file():
            content = best.read_bytes()
            if _round_of(best) == best_round:  # the source may have found a better one since
                write_bytes(new.checkpoints / best.name, content)
        if last is not None:
            write_bytes(new.checkpoints / "last.ckpt", last.read_bytes())
    except BaseException:
        new.discard()
        raise
    return new


def _is_behind(source: Attempt, round_number: int) -> bool:
    """Whether an attempt's last checkpoint is of a later round than ``round_number``, or cannot be read."""
    last = source.checkpoints / "last.ckpt"
    try:
        return last.is_file() and _round_of(last) > round_number
    except ConfigurationError:
        return True


def _round_of(checkpoint: Path) -> int:
    return int(load_run(checkpoint, None)["global_step"])


class OwnServerSettings(Callback):
    """Gives the server optimizer back its configured settings, which those of the checkpoint replaced."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set learning rate, momentum and the like, and keep the optimizer's state."""
        configured = pl_module.configure_optimizers()
        if isinstance(configured, torch.optim.Optimizer):
            for group, own in zip(trainer.optimizers[0].param_groups, configured.param_groups, strict=True):
                group.update({name: value for name, value in own.items() if name != "params"})
