"""Where a run trains: in a folder of its own, or resumed in that of its checkpoint, or forked from it into a new one."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import write_bytes, write_text
from fl_lightning.run_directory.checkpoint_io import load_run
from fl_lightning.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.run_directory.directory import Attempt, RunDirectory, class_name, inside_the_hash
from fl_lightning.run_directory.metrics import lines_until, read_metrics


@dataclass(frozen=True)
class Start:
    """Where a fit begins.

    Attributes:
        attempt: The folder that it trains in, None where nothing is written (``fast_dev_run``).
        round: The round that it goes on from; 0 for a run from the start.
        is_new: Whether the folder was made for it.
        own_settings: Whether the checkpoint is of a run with other settings.
        checkpoint: Path of the checkpoint.
        differs: The old and the new value of each setting that decides results, by dotted name; None where the run goes on
            as it was.
    """

    attempt: Attempt | None = None
    round: int = 0
    is_new: bool = True
    own_settings: bool = False
    checkpoint: str = ""
    differs: Mapping[str, Any] | None = None

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
    held: ExitStack,
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
        held: Keeps the lock of a new attempt.

    Raises:
        ConfigurationError: A new attempt would have nothing to train, metrics of the rounds before are missing, or a
            file cannot be written.
    """
    resumed, source = int(checkpoint["global_step"]), directory.attempt_of(ckpt_path)
    # read before there is a folder: lines that are missing leave nothing behind
    lines = lines_until(source.metrics, resumed) if source is not None else []
    owned = source is not None and directory.owns(source)
    differs = _differences(checkpoint, source, yaml.safe_load(config))
    if source is not None and owned and not _is_behind(source, resumed):
        return Start(source, resumed, False, bool(differs), str(ckpt_path), differs or None)
    if max_rounds is not None and 0 <= max_rounds <= resumed:
        raise ConfigurationError(
            f"trainer.max_epochs: {max_rounds}, but {ckpt_path} is of round {resumed}: nothing is left to train; "
            f"use at least {resumed + 1}, or python -m fl_lightning test --ckpt_path {ckpt_path}"
        )
    new = directory.next_attempt(held)
    if source is None:
        print(
            f"new attempt {new.path} starts at round {resumed + 1}, and so does its metrics.jsonl: {ckpt_path} lies in no "
            "run directory",
            flush=True,
        )
        return Start(new, resumed, True, True, str(ckpt_path), differs)
    try:
        write_bytes(new.metrics, b"".join(lines))
        write_text(new.config, config)
        if keeper.in_the_run:
            best, state = source.checkpoints / "best.ckpt", checkpoint.get("callbacks", {})
            best_round = state.get(keeper.state_key, {}).get("best_round")
            # the source may have found a better one since
            if best_round is not None and best.is_file() and _round_of(best) == best_round:
                write_bytes(new.checkpoints / best.name, best.read_bytes())
            write_bytes(new.checkpoints / "last.ckpt", ckpt_path.read_bytes())
    except BaseException:
        new.discard()
        raise
    print(
        f"new attempt {new.path} goes on from round {resumed} of {source.path}, which stays as it is: "
        f"{'the checkpoint is older than its last.ckpt' if owned else 'it has other settings or another seed'}",
        flush=True,
    )
    return Start(new, resumed, True, not owned or bool(differs), str(ckpt_path), differs)


def _differences(
    checkpoint: Mapping[str, Any], source: Attempt | None, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The old and the new value of each setting that decides results: those of the checkpoint, else those in its run's folder."""
    before, after = checkpoint["fl_lightning"]["record"].get("settings"), deciding_settings(config)
    if not before and source is not None:
        before = deciding_settings(yaml.safe_load(source.config.read_text()))
    if not before:
        return {"settings": ["unknown", "those of config.yaml"]}
    names = [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]
    gone = {
        name for name in names if after.get(name) is None
    }  # of a class that is gone the settings are, too
    return {
        name: [before.get(name), after.get(name)] for name in names if name.rpartition(".")[0] not in gone
    }


def deciding_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a resolved configuration that decide its results, by dotted name without ``init_args``.

    A class counts by its name; those in a list go by it, too, such as ``trainer.callbacks.FixBN.freeze_round``.
    """
    kept = {key: config[key] for key in ("seed_everything", "model", "data", "trainer") if key in config}
    seed = {"seed_everything": kept.pop("seed_everything", None)}
    return {**seed, **dict(_flat(inside_the_hash(kept, ""), ""))}


def _flat(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if name == "trainer.callbacks" and isinstance(node, Mapping):
        node = [node]
    if isinstance(node, Mapping):
        if "class_path" in node:
            yield name, class_name(node)
        for key, value in node.items():
            inner = name if key == "init_args" else f"{name}.{key}".lstrip(".")
            if key != "class_path" and not (key == "seed" and name in ("model", "data")):
                yield from _flat(value, inner)
    elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        for index, item in enumerate(node):
            yield from _flat(item, f"{name}.{class_name(item) or index}")
    else:
        yield name, node


def _is_behind(source: Attempt, round_number: int) -> bool:
    """Whether an attempt's last checkpoint is of a later round than ``round_number``, or cannot be read."""
    last = source.checkpoints / "last.ckpt"
    try:
        return last.is_file() and _round_of(last) > round_number
    except ConfigurationError:
        return True


def _round_of(checkpoint: Path) -> int:
    return int(load_run(checkpoint)["global_step"])


class OwnServerSettings(Callback):
    """Gives the server optimizer back its configured settings, which those of the checkpoint replaced."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set learning rate, momentum and the like, and keep the optimizer's state."""
        configured = pl_module.configure_optimizers()
        if isinstance(configured, torch.optim.Optimizer):
            for group, own in zip(trainer.optimizers[0].param_groups, configured.param_groups, strict=True):
                group.update({name: value for name, value in own.items() if name != "params"})
