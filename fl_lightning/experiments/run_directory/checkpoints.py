"""Checkpoints of the last round, of the best round, and of rounds that the user chooses."""

import contextlib
import io
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from fl_lightning.batch_norm.kinds import buffer_kinds, parameter_kinds
from fl_lightning.clients.module_evaluation import LARGER_IS_BETTER, SMALLER_IS_BETTER
from fl_lightning.clients.tasks import best_is
from fl_lightning.cohort.client_memory import copy_listed
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.files import atomic_write, unwritable
from fl_lightning.recorded import Recorded
from fl_lightning.round.module import FederatedModule


class RoundCheckpoint(Recorded, Checkpoint):
    """Checkpoints after complete rounds: ``last.ckpt`` and, for a monitored metric, ``best.ckpt``.

    ``last.ckpt`` is written in these cases:

    - The first or the last round of a fit has ended.
    - A round has ended, and ``every_n_seconds`` or ``every_n_rounds`` have passed.
    - An exception or a termination signal stops the fit between two rounds.

    The files are in the folder ``checkpoints`` of the trainer's ``default_root_dir``, which is the
    run's folder. An interrupted round is not saved; a resumed fit computes the round again.
    ``fast_dev_run`` writes no checkpoints.

    Args:
        every_n_seconds: Minimum time between two saves in seconds, >= 0. 0 saves every round; None
            disables saving by time.
        every_n_rounds: Period of saving in rounds, >= 1; None disables saving by rounds.
        monitor: Name of a logged metric, such as ``"val/accuracy"``. ``best.ckpt`` is from the
            first round with the best value. Rounds without a value and rounds with NaN are ignored.
        mode: Whether the largest (``"max"``) or the smallest value (``"min"``) is best. Default:
            smallest for a loss, largest for a quality such as accuracy
            (:func:`~fl_lightning.clients.tasks.best_is`).
        keep_rounds: Rounds, >= 1, whose checkpoints are kept as ``round_<r>.ckpt``. If ``monitor``
            is set, ``round_<r>_best.ckpt`` is a copy of ``best.ckpt`` after round r.

    Attributes:
        dirpath: Folder of the checkpoints; None before the trainer has set up the callback.
        weights_only: Whether the run's checkpoints are loaded without code; None means True.
        best_score: Best value of the monitored metric; None before its first value.
        best_round: Round of ``best_score``.
        best_model_path: Path of ``best.ckpt``; empty before the first save. Lightning reads this
            attribute for ``ckpt_path="best"``. After a fit in child processes, Lightning sets the
            attribute.
        saved_round: Last round that this fit has saved; None before the first save.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> with TemporaryDirectory() as folder:
        ...     keeper, place = RoundCheckpoint(), {"default_root_dir": folder}
        ...     state = train(small_cnn(), blobs(), rounds=2, callbacks=[keeper], trainer=place)
        ...     sorted(path.name for path in keeper.dirpath.iterdir())
        ['last.ckpt']
    """

    def __init__(
        self,
        every_n_seconds: float | None = 60.0,
        every_n_rounds: int | None = None,
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
        keep_rounds: list[int] | None = None,
    ) -> None:
        if every_n_seconds is not None and not every_n_seconds >= 0:
            raise ConfigurationError(f"every_n_seconds must be >= 0 or null, found {every_n_seconds}")
        if every_n_rounds is not None and every_n_rounds < 1:
            raise ConfigurationError(f"every_n_rounds must be >= 1 or null, found {every_n_rounds}")
        if mode not in ("max", "min", None):
            raise ConfigurationError(f"mode must be 'max', 'min' or None, found {mode!r}")
        self.dirpath: Path | None = None
        self.weights_only: bool | None = None
        self.every_n_seconds = every_n_seconds
        self.every_n_rounds = every_n_rounds
        self.monitor = monitor
        if any(number < 1 for number in keep_rounds or ()):
            raise ConfigurationError(f"keep_rounds: {keep_rounds} must be rounds >= 1")
        self.mode = mode
        self.keep_rounds = frozenset(keep_rounds or ())
        self.best_score: float | None = None
        self.best_round: int | None = None
        self.best_model_path = ""
        self.saved_round: int | None = None
        self._best: Mapping[str, str] = {}
        self._complete_round: int | None = None
        self._evaluated = False
        self._saved_at = 0.0

    @property
    def state_key(self) -> str:
        """Key of the callback's state.

        The key contains the name of the monitored metric, because scores of different metrics
        cannot be compared.
        """
        # older checkpoints have "max" in the key if no metric is monitored
        return self._generate_state_key(monitor=self.monitor, mode=self._best_is() or "max")

    def state_dict(self) -> dict[str, Any]:
        """Return the best score and its round; an empty dict if no metric is monitored."""
        if self.monitor is None:
            return {}
        return {"best_score": self.best_score, "best_round": self.best_round}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Copy the best checkpoint of earlier rounds to a new folder.

        If the checkpoint is missing, print that the best checkpoint is chosen from new rounds only.
        """
        if trainer.state.fn != "fit" or self.monitor is None or trainer.ckpt_path is None:
            return
        assert self.dirpath is not None
        path, target = Path(trainer.ckpt_path), self.dirpath / "best.ckpt"
        # None if the checkpoint's run monitored a different metric
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        missing = not target.is_file() and (state is None or state["best_round"] is not None)
        if missing and trainer.is_global_zero and self._active(trainer):
            source = self._best_until(path, state) if state and _same_data(checkpoint, pl_module) else None
            if source is not None:
                _copy(source, target)
            else:
                print(
                    f"best.ckpt: the best checkpoint before {path} is missing; only rounds after {checkpoint['global_step']} count",
                    flush=True,
                )
        # barrier: all ranks wait for the copy before they look for the file
        trainer.strategy.broadcast(None)

    def _best_until(self, path: Path, state: Mapping[str, Any]) -> Path | None:
        """Return the checkpoint that was the best when ``path`` was written; None if missing.

        Only the folder of ``path`` is searched.
        """
        for candidate in (path.with_name(_best_name(path.stem)), path.with_name("best.ckpt")):
            with contextlib.suppress(ConfigurationError):  # ignore a missing or damaged file
                if AtomicCheckpointIO().load_checkpoint(candidate)["callbacks"].get(self.state_key) == state:
                    return candidate
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score if the folder has ``best.ckpt``.

        Otherwise start without a best score.
        """
        if self.dirpath is not None and (self.dirpath / "best.ckpt").is_file():
            self.best_score, self.best_round = state_dict["best_score"], state_dict["best_round"]
            self.best_model_path = str(self.dirpath / "best.ckpt")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Create the checkpoint folder, so that errors are raised before the first round.

        Raises:
            ConfigurationError: The folder cannot be created, ``max_steps`` is set, or the best
                direction of the monitored metric is unknown.
        """
        if isinstance(pl_module, FederatedModule):
            pl_module.prepare_metrics()
            if self.monitor:
                pl_module.task.learn({self.monitor: None})
            self._best = pl_module.task.best
        if self.dirpath is None or stage == "fit":
            self.dirpath = Path(trainer.strategy.broadcast(trainer.default_root_dir)) / "checkpoints"
        if stage != "fit":
            return
        # reset the values of an earlier fit; if the run resumes, the checkpoint sets new values
        self.best_score, self.best_round, self.best_model_path = None, None, ""
        if not self._active(trainer):
            return
        if self.monitor and self._best_is() is None:
            known, name = sorted(self._best), self.monitor.rpartition("/")[2]
            words = f"known metrics are {', '.join(known)}" if known else "a name such as val/acc says this"
            hint = nearest(name, known or f"{LARGER_IS_BETTER}|{SMALLER_IS_BETTER}".split("|"))
            raise ConfigurationError(
                f"checkpoint.monitor: {self.monitor!r} does not say whether large or small values are best; set checkpoint.mode to max or "
                f"min; {words}{hint}"
            )
        if trainer.max_steps != -1:
            # with max_steps, Lightning would resume inside an epoch, and repeat or omit a round
            raise ConfigurationError(
                f"trainer.max_steps {trainer.max_steps} cannot be resumed by rounds; set trainer.max_epochs"
            )
        if trainer.is_global_zero:
            try:
                self.dirpath.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unwritable(self.dirpath, error) from error

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that a checkpoint could be loaded, and start the clock of ``every_n_seconds``.

        Raises:
            ConfigurationError: A checkpoint cannot be saved or loaded, or would lose a tensor.
        """
        if self._active(trainer) and not trainer.global_step and isinstance(pl_module, FederatedModule):
            self._check_round_trip(trainer, pl_module)
        self._complete_round, self.saved_round, self._evaluated = None, None, False
        self._saved_at = time.monotonic()

    def _check_round_trip(self, trainer: L.Trainer, module: FederatedModule) -> None:
        """Save a checkpoint in memory, and load the model's state into other tensors."""
        model, file = module.model, io.BytesIO()
        kinds = {**parameter_kinds(model), **buffer_kinds(model)}
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        kept = {name: tensors[name] for name, kind in kinds.items() if kind != "scratch"}
        others = {name: (x == 0).to(x.dtype) for name, x in kept.items()}  # no element has its own value
        try:
            torch.save(trainer._checkpoint_connector.dump_checkpoint(weights_only=False), file)
            file.seek(0)
            loaded = torch.load(file, map_location="cpu", weights_only=self.weights_only is not False)
            with module.client.slots.filled(others):
                module.load_state_dict(loaded["state_dict"], strict=module.strict_loading)
                for name, value in module.client.slots.read(others).items():
                    if not torch.equal(value.nan_to_num(), kept[name].nan_to_num()):
                        raise ValueError(f"state_dict() of {type(model).__name__} loses: {name!r}")
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if ": " in line] or [repr(error)]
            raise ConfigurationError(
                f"checkpoint: the run's checkpoints could not be loaded ({lines[-1].partition('. ')[0]}); return all tensors from "
                "state_dict(), and besides tensors only plain values from get_extra_state() and from a callback's state_dict()"
            ) from error

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the first evaluation has logged the monitored metric.

        Raises:
            ConfigurationError: The monitored metric is an evaluation metric and was not logged.
        """
        trained = trainer.state.fn == "fit" and self._active(trainer) and not trainer.sanity_checking
        self._evaluated = trained
        if trained and (self.monitor or "").startswith(("val/", "test/")):
            self._require_monitor(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the checkpoints that are due after this round.

        Raises:
            ConfigurationError: The server optimizer did not take exactly one step per round, a file
                cannot be written, or a LightningModule's first evaluation did not log the monitored
                metric.
        """
        if not self._active(trainer):
            return
        rounds = trainer.current_epoch + 1
        if trainer.global_step != rounds:
            raise ConfigurationError(
                f"the server optimizer stepped {trainer.global_step} times in {rounds} rounds; "
                "checkpoints need a module whose training_step steps it exactly once"
            )
        self._complete_round = rounds
        # a LightningModule logs under any name, also at the end of the round
        if self._evaluated and isinstance(pl_module, FederatedModule) and pl_module.client.logs_itself:
            self._require_monitor(trainer)
        if self._reached_best(trainer):
            self.best_model_path = self._save(trainer, "best.ckpt")
        if rounds in self.keep_rounds:
            path = Path(self._save(trainer, kept_name(rounds)))
            if self.best_round is not None and trainer.is_global_zero:
                _copy(Path(self.best_model_path), path.with_name(_best_name(path.stem)))
        if self._due(trainer):
            self._save_last(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last round.

        Raises:
            ConfigurationError: A file cannot be written, or the monitored metric was never logged.
        """
        if self._active(trainer):
            self._save_last(trainer)
            self._require_monitor(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save the last complete round after an exception, unless the next round has begun."""
        between_rounds = trainer.fit_loop.epoch_progress.current.ready == self._complete_round
        # saving needs all ranks; if only one rank has failed, its save would wait forever
        if between_rounds and self._active(trainer) and trainer.world_size == 1:
            with contextlib.suppress(ConfigurationError):
                # an error while saving must not replace the original exception
                self._save_last(trainer)

    def _best_is(self) -> Literal["max", "min"] | None:
        return self.mode or best_is(self.monitor or "", self._best)

    def _active(self, trainer: L.Trainer) -> bool:
        return not trainer.fast_dev_run  # type: ignore[attr-defined]  # set in a helper of the trainer

    def _require_monitor(self, trainer: L.Trainer) -> None:
        if self.monitor and self.best_score is None and self.monitor not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise ConfigurationError(
                f"checkpoint.monitor: {self.monitor!r} was never logged; logged are: {logged}"
            )

    def _reached_best(self, trainer: L.Trainer) -> bool:
        if self.monitor is None or self.monitor not in trainer.callback_metrics:
            return False
        # a metric that was not logged in this round keeps its old value, which is no new best value
        score = trainer.strategy.broadcast(float(trainer.callback_metrics[self.monitor]))
        sign = 1 if self._best_is() == "max" else -1
        if math.isnan(score) or (self.best_score is not None and sign * score <= sign * self.best_score):
            return False
        self.best_score, self.best_round = score, self._complete_round
        return True

    def _due(self, trainer: L.Trainer) -> bool:
        every = self.every_n_rounds
        if self.saved_round is None or (every is not None and trainer.global_step % every == 0):
            return True
        passed = time.monotonic() - self._saved_at
        return self.every_n_seconds is not None and trainer.strategy.broadcast(passed >= self.every_n_seconds)

    def _save_last(self, trainer: L.Trainer) -> None:
        if self.saved_round != self._complete_round:
            self._save(trainer, "last.ckpt")
            self.saved_round = self._complete_round
            self._saved_at = time.monotonic()

    def _save(self, trainer: L.Trainer, name: str) -> str:
        for logger in trainer.loggers:
            # write the rows of metrics first: a run that resumes from the checkpoint needs them
            logger.save()
        assert self.dirpath is not None
        path = str(self.dirpath / name)
        trainer.save_checkpoint(path, weights_only=False)
        return path


def kept_name(round_number: int) -> str:
    """Return the file name of the checkpoint that is kept for a round in ``keep_rounds``."""
    return f"round_{round_number}.ckpt"


def _best_name(stem: str) -> str:
    return f"{stem}_best.ckpt"


def _copy(source: Path, target: Path) -> None:
    """Copy a checkpoint, and the client memory files that it lists if the folder is another."""
    copy_listed(source.absolute(), target.absolute())
    with source.open("rb") as file, atomic_write(target) as copy:
        shutil.copyfileobj(file, copy)


def _same_data(checkpoint: Mapping[str, Any], module: L.LightningModule) -> bool:
    """Return whether a checkpoint's run has the same data as this run.

    Only then can the scores of the two runs be compared.
    """
    record = getattr(module, "record", None)
    return record is None or checkpoint["fl_lightning"]["record"].get("data") == record.data
