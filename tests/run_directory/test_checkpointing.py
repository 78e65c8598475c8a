import multiprocessing
import os
import random
import resource
import signal
import warnings
import zipfile
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.experiments.run_directory.metrics_log import JSONLinesLogger, lines_until, read_metrics


class Rounds(L.LightningModule):
    """One manual optimizer step per epoch that depends on the round; records what Lightning asks of it."""

    def __init__(self, scores=None, steps_per_round=1):
        super().__init__()
        self.automatic_optimization = False
        self.scores = scores
        self.steps_per_round = steps_per_round
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.events = []

    def on_train_epoch_start(self):
        self.events.append(("start", self.current_epoch, self.global_step))

    def training_step(self, batch):
        for _ in range(self.steps_per_round):
            self.weight.grad = self.weight.detach() / (self.current_epoch + 2)
            self.optimizers().step()
        self.events.append(("step", self.current_epoch, self.global_step))

    def validation_step(self, batch):
        if self.scores is not None and self.current_epoch + 1 in self.scores:
            self.log("val/accuracy", self.scores[self.current_epoch + 1], on_epoch=True, batch_size=1)
        self.events.append(("validate", self.current_epoch, self.global_step))

    def on_train_epoch_end(self):
        self.log("train/norm", self.weight.detach().norm())
        for logger in self.loggers:
            row = {"round": self.global_step, "train/norm": self.weight.detach().norm()}
            logger.log_metrics(row, step=self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)

    def train_dataloader(self):
        return DataLoader([0], batch_size=None)

    def val_dataloader(self):
        return DataLoader([0], batch_size=None)


class RaiseAt(Callback):
    """Breaks the run off in one hook of one round."""

    def __init__(self, hook, epoch, error=RuntimeError):
        setattr(self, hook, self.strike)
        self.epoch, self.error = epoch, error

    def strike(self, trainer, *args):
        if trainer.current_epoch == self.epoch:
            raise self.error("stop here")


class RaiseAfterRound(Checkpoint):
    """A checkpoint callback, so that it runs after RoundCheckpoint in on_train_epoch_end."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_step == 4:
            raise RuntimeError("stop here")


def fit(root, checkpoint, *, module=None, rounds=6, ckpt_path=None, callbacks=(), **settings):
    module = module or Rounds()
    settings = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0, "logger": False} | settings
    trainer = L.Trainer(
        default_root_dir=root,
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[*callbacks, checkpoint],
        plugins=[AtomicCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return module, trainer


def round_of(path):
    return AtomicCheckpointIO().load_checkpoint(path)["global_step"]


@pytest.fixture
def last(tmp_path):
    return tmp_path / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.parametrize("saved_at", ["train epoch end", "train end"])
def test_resume_neither_repeats_nor_skips_a_round_and_ends_bit_identically(tmp_path, last, stop, saved_at):
    whole, _ = fit(tmp_path / "whole", RoundCheckpoint())
    if saved_at == "train end":
        fit(tmp_path, RoundCheckpoint(every_n_seconds=None), rounds=stop)
    else:
        killer = RaiseAt("on_train_batch_start", stop)
        with pytest.raises(RuntimeError, match="stop here"):
            fit(tmp_path, RoundCheckpoint(every_n_rounds=1), callbacks=[killer])
    assert round_of(last) == stop
    resumed, trainer = fit(tmp_path, RoundCheckpoint(), ckpt_path=last)
    assert resumed.events == [event for event in whole.events if event[1] >= stop]
    assert (trainer.current_epoch, trainer.global_step) == (6, 6)
    assert torch.equal(resumed.weight, whole.weight)


def test_resume_of_a_finished_run_does_nothing(tmp_path, last):
    fit(tmp_path, RoundCheckpoint())
    before = last.stat().st_mtime_ns
    resumed, _ = fit(tmp_path, RoundCheckpoint(monitor="val/accuracy"), ckpt_path=last)
    assert resumed.events == []
    assert last.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every_n_seconds": None}, [1, 6]),
        ({"every_n_seconds": None, "every_n_rounds": 2}, [1, 2, 4, 6]),
        ({"every_n_seconds": None, "every_n_rounds": 4}, [1, 4, 6]),
        ({"every_n_seconds": 0.0}, [1, 2, 3, 4, 5, 6]),
        ({"every_n_seconds": 25.0}, [1, 4, 6]),
        ({"every_n_seconds": 25.0, "every_n_rounds": 2}, [1, 2, 4, 6]),
    ],
)
def test_last_is_saved_after_the_first_round_when_a_period_has_passed_and_once_at_the_end(
    tmp_path, monkeypatch, settings, expected
):
    saved = []
    save = L.Trainer.save_checkpoint
    monkeypatch.setattr(
        L.Trainer,
        "save_checkpoint",
        lambda self, path, **options: (saved.append(self.global_step), save(self, path, **options)),
    )
    rounds = Rounds()
    monkeypatch.setattr(
        "fl_lightning.experiments.run_directory.checkpoints.time.monotonic", lambda: 10.0 * rounds.global_step
    )
    fit(tmp_path, RoundCheckpoint(**settings), module=rounds)
    assert saved == expected


def test_callback_that_is_used_for_a_second_fit_saves_its_last_round_again(tmp_path, last):
    checkpoint = RoundCheckpoint()
    fit(tmp_path, checkpoint)
    last.unlink()
    fit(tmp_path, checkpoint)
    assert round_of(last) == 6


def test_best_is_the_first_round_of_the_strictly_best_score_and_the_last_round_is_kept_too(tmp_path, last):
    scores = {1: 0.5, 2: 0.7, 3: 0.7, 4: float("nan"), 5: 0.6}
    checkpoint = RoundCheckpoint(monitor="val/accuracy")
    _, trainer = fit(tmp_path, checkpoint, module=Rounds(scores), check_val_every_n_epoch=1)
    assert (checkpoint.best_round, checkpoint.best_score) == (2, pytest.approx(0.7))
    assert round_of(checkpoint.best_model_path) == 2
    assert trainer.checkpoint_callback.best_model_path == str(last.with_name("best.ckpt"))
    assert round_of(last) == 6


def test_mode_min_keeps_the_smallest_score(tmp_path, last):
    scores = dict(enumerate([0.5, 0.2, 0.3, 0.2, 0.4, 0.6], start=1))
    fit(
        tmp_path,
        RoundCheckpoint(monitor="val/accuracy", mode="min"),
        module=Rounds(scores),
        check_val_every_n_epoch=1,
    )
    assert round_of(last.with_name("best.ckpt")) == 2


def test_resumed_run_compares_with_the_best_score_before_the_break(tmp_path, last):
    scores = dict(enumerate([0.1, 0.9, 0.2, 0.3, 0.8, 0.4], start=1))
    best = last.with_name("best.ckpt")
    fit(
        tmp_path,
        RoundCheckpoint(monitor="val/accuracy"),
        module=Rounds(scores),
        rounds=3,
        check_val_every_n_epoch=1,
    )
    checkpoint = RoundCheckpoint(monitor="val/accuracy")
    fit(tmp_path, checkpoint, module=Rounds(scores), ckpt_path=last, check_val_every_n_epoch=1)
    assert (round_of(best), checkpoint.best_round, checkpoint.best_model_path) == (2, 2, str(best))
    scores[4] = 0.95
    fit(
        tmp_path / "new",
        RoundCheckpoint(monitor="val/accuracy"),
        module=Rounds(scores),
        rounds=5,
        check_val_every_n_epoch=1,
        ckpt_path=best,
    )
    assert round_of(tmp_path / "new" / "checkpoints" / "best.ckpt") == 4


@pytest.mark.parametrize("best", [1, 2])
def test_what_was_best_until_a_kept_round_is_kept_where_a_later_one_is_better(tmp_path, last, best):
    scores = {**dict.fromkeys((1, 2, 3), 0.3), best: 0.5, 4: 0.9, 5: 0.4}
    monitored = {"module": Rounds(scores), "check_val_every_n_epoch": 1}
    fit(tmp_path, RoundCheckpoint(monitor="val/accuracy", keep_rounds=[2, 3]), **monitored)
    assert round_of(last.with_name("best.ckpt")) == 4
    scores[4] = 0.45
    for kept in (2, 3):
        checkpoint = RoundCheckpoint(monitor="val/accuracy")
        fit(tmp_path / f"{kept}", checkpoint, ckpt_path=last.with_name(f"round_{kept}.ckpt"), **monitored)
        assert (checkpoint.best_round, checkpoint.best_score) == (best, pytest.approx(0.5))
        assert round_of(tmp_path / f"{kept}" / "checkpoints" / "best.ckpt") == best


def test_monitor_that_only_some_rounds_log_is_judged_in_those_rounds(tmp_path, last):
    fit(tmp_path, RoundCheckpoint(monitor="val/accuracy"), module=Rounds({2: 0.3, 4: 0.9, 6: 0.5}))
    assert round_of(last.with_name("best.ckpt")) == 4


def test_evaluation_metric_that_is_never_logged_fails_at_the_first_evaluation(tmp_path):
    module = Rounds({2: 0.5})
    with pytest.raises(
        ConfigurationError,
        match=r"checkpoint.monitor: 'val/acc' was never logged; logged are: .*val/accuracy",
    ):
        fit(tmp_path, RoundCheckpoint(monitor="val/acc", mode="max"), module=module)
    assert module.global_step == 2


def test_other_metric_that_is_never_logged_fails_after_the_last_round_is_saved(tmp_path, last):
    with pytest.raises(
        ConfigurationError, match=r"checkpoint.monitor: 'train/nrom' .* logged are: train/norm"
    ):
        fit(tmp_path, RoundCheckpoint(monitor="train/nrom", mode="min"))
    assert round_of(last) == 6


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_half_done_round_is_never_saved(tmp_path, last, hook, error):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        fit(tmp_path, RoundCheckpoint(every_n_rounds=2), callbacks=[RaiseAt(hook, 3, error)])
    signal.signal(signal.SIGINT, handler)
    assert round_of(last) == 2


def test_round_whose_row_is_not_written_is_not_saved(tmp_path, last):
    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, RoundCheckpoint(every_n_rounds=2), callbacks=[RaiseAt("on_train_epoch_end", 3)])
    assert round_of(last) == 2


def test_complete_round_is_saved_when_an_exception_follows_it(tmp_path, last):
    whole, _ = fit(tmp_path / "whole", RoundCheckpoint())
    checkpoint = RoundCheckpoint()
    after = RaiseAfterRound()
    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, after, callbacks=[checkpoint])
    assert round_of(last) == 4
    resumed, _ = fit(tmp_path, RoundCheckpoint(), ckpt_path=last)
    assert torch.equal(resumed.weight, whole.weight)


def test_termination_signal_saves_the_round_that_it_let_finish(tmp_path, last):
    class Terminate(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.current_epoch == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SIGTERMException):
        fit(tmp_path, RoundCheckpoint(), callbacks=[Terminate()])
    assert round_of(last) == 3


def test_fast_dev_run_and_sanity_check_write_nothing(tmp_path):
    fit(tmp_path, RoundCheckpoint(every_n_rounds=1, monitor="val/x"), fast_dev_run=True)
    assert not (tmp_path / "checkpoints").exists()
    killer = RaiseAt("on_train_start", 0)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(
            tmp_path, RoundCheckpoint(monitor="val/x", mode="max"), callbacks=[killer], num_sanity_val_steps=1
        )
    assert not any((tmp_path / "checkpoints").iterdir())


def test_trainer_that_counts_steps_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"trainer\.max_steps 3 .* set trainer\.max_epochs"):
        fit(tmp_path, RoundCheckpoint(), max_steps=3)


def test_module_that_steps_its_optimizer_twice_a_round_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="stepped 2 times in 1 rounds"):
        fit(tmp_path, RoundCheckpoint(), module=Rounds(steps_per_round=2))


def test_state_holds_plain_numbers_and_differs_between_metrics():
    assert RoundCheckpoint().state_dict() == {}
    checkpoint = RoundCheckpoint(monitor="val/accuracy")
    assert checkpoint.state_dict() == {"best_score": None, "best_round": None}
    assert checkpoint.state_key != RoundCheckpoint(monitor="val/loss", mode="min").state_key


def test_rows_after_a_resume_equal_those_of_the_uninterrupted_run(tmp_path, last):
    fit(tmp_path / "whole", RoundCheckpoint(), logger=JSONLinesLogger(tmp_path / "whole"))
    with pytest.raises(RuntimeError, match="stop here"):
        fit(
            tmp_path,
            RoundCheckpoint(every_n_rounds=2),
            callbacks=[RaiseAt("on_train_batch_start", 3)],
            logger=JSONLinesLogger(tmp_path),
        )
    rows = tmp_path / "metrics.jsonl"
    assert [row["round"] for row in read_metrics(rows)] == [1, 2, 3]
    rows.write_bytes(b"".join(lines_until(rows, round_of(last))))
    fit(tmp_path, RoundCheckpoint(), ckpt_path=last, logger=JSONLinesLogger(tmp_path))
    assert rows.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_save_needs_no_system_temporary_folder_and_replaces_leftovers_of_a_killed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "does not exist"))
    path = tmp_path / "new" / "last.ckpt"
    path.parent.mkdir()
    (path.parent / ".last.ckpt.tmp").write_bytes(b"half a checkpoint")
    AtomicCheckpointIO().save_checkpoint({"weight": torch.arange(3.0)}, path)
    assert torch.equal(AtomicCheckpointIO().load_checkpoint(path)["weight"], torch.arange(3.0))
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


def test_process_killed_while_saving_leaves_the_old_checkpoint_and_nothing_that_lasts(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"round": 1}, path)

    def killed_while_saving():
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        AtomicCheckpointIO().save_checkpoint({"round": 2}, path)

    process = multiprocessing.get_context("fork").Process(target=killed_while_saving)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks beside threads
        process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert AtomicCheckpointIO().load_checkpoint(path) == {"round": 1}
    assert len(list(tmp_path.iterdir())) == 2
    AtomicCheckpointIO().save_checkpoint({"round": 3}, path)
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_is_reported_and_leaves_the_old_checkpoint_whole(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"round": 1}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(
            ConfigurationError, match=r"last\.ckpt cannot be written: File too large; free space"
        ):
            AtomicCheckpointIO().save_checkpoint({"round": 2, "weight": torch.zeros(300_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert AtomicCheckpointIO().load_checkpoint(path) == {"round": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_folder_that_cannot_be_written_fails_before_the_first_round(tmp_path):
    (tmp_path / "file").touch()
    module = Rounds()
    with pytest.raises(ConfigurationError, match=r"file/checkpoints cannot be written: Not a directory"):
        fit(tmp_path / "file", RoundCheckpoint(), module=module)
    assert module.events == []


@pytest.mark.parametrize("damage", ["half", "empty", "text", "one flipped bit"])
def test_damaged_checkpoint_is_named_with_its_size(tmp_path, damage):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weight": torch.randn(10_000)}, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = {
        "half": content[: len(content) // 2],
        "empty": b"",
        "text": b"model",
        "one flipped bit": content,
    }[damage]
    path.write_bytes(damaged)
    message = (
        rf"last\.ckpt is truncated, damaged or holds .* \({len(damaged):,} bytes, \w+\); use another one"
    )
    with pytest.raises(ConfigurationError, match=message):
        AtomicCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_a_file_that_inflates_is_refused_before_it_is_read(compression, tmp_path, monkeypatch):
    torch.save({"state_dict": {"weight": torch.zeros(50_000)}}, tmp_path / "whole.ckpt")
    path = tmp_path / "last.ckpt"
    with zipfile.ZipFile(tmp_path / "whole.ckpt") as whole, zipfile.ZipFile(path, "w", compression) as bomb:
        for entry in whole.infolist():
            bomb.writestr(entry.filename, whole.read(entry))
    if compression == zipfile.ZIP_STORED:  # each entry has its own bytes
        assert AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["weight"].shape == (50_000,)
        return
    monkeypatch.setattr(zipfile.ZipFile, "open", None)  # nothing is inflated
    with pytest.raises(ConfigurationError, match=r"last\.ckpt is truncated, damaged or holds .* BadZipFile"):
        AtomicCheckpointIO().load_checkpoint(path)


def damages(content):
    """A checkpoint with some wrong bytes: one bit of each byte of the archive's directory, then any bytes anywhere."""
    places = random.Random(0)
    for place in range(content.find(b"PK\x01\x02"), len(content)):
        yield {place: content[place] ^ 0x10}
    for count in (1, 1, 8) * 100:
        yield {places.randrange(len(content)): places.randrange(256) for _ in range(count)}


def test_damage_is_one_line_or_none_at_all(tmp_path):
    path = tmp_path / "last.ckpt"
    whole = {"state_dict": {f"layer{i}.weight": torch.randn(20, 20) for i in range(10)}, "global_step": 3}
    AtomicCheckpointIO().save_checkpoint(whole, path)
    content = path.read_bytes()
    for damage in damages(content):
        damaged = bytearray(content)
        for place, value in damage.items():
            damaged[place] = value
        path.write_bytes(damaged)
        said = None
        try:
            loaded = AtomicCheckpointIO().load_checkpoint(path)
        except ConfigurationError as error:
            said = str(error)
        if said is not None:
            assert said.startswith(f"checkpoint {path} is truncated, damaged or holds")
            assert "\n" not in said
            continue
        assert loaded["global_step"] == 3
        assert all(map(torch.equal, loaded["state_dict"].values(), whole["state_dict"].values()))
    assert len(list(tmp_path.iterdir())) == 1


def test_missing_and_remote_and_executable_checkpoints_are_refused_in_one_line(tmp_path):
    io = AtomicCheckpointIO()
    with pytest.raises(ConfigurationError, match=r"none\.ckpt does not exist"):
        io.load_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(
        ConfigurationError, match=r"checkpoint: 's3://bucket/last\.ckpt' is no path of a local"
    ):
        io.save_checkpoint({}, "s3://bucket/last.ckpt")
    io.save_checkpoint({"path": Path("x")}, tmp_path / "object.ckpt")
    with pytest.raises(ConfigurationError) as caught:
        io.load_checkpoint(tmp_path / "object.ckpt")
    assert "holds more than tensors and plain values" in str(caught.value)
    assert io.load_checkpoint(tmp_path / "object.ckpt", weights_only=False) == {"path": Path("x")}


@pytest.mark.parametrize("settings", [{"every_n_seconds": -1.0}, {"every_n_rounds": 0}, {"mode": "best"}])
def test_unusable_settings_are_refused_by_name(settings):
    with pytest.raises(ConfigurationError, match=f"{next(iter(settings))}"):
        RoundCheckpoint(**settings)
