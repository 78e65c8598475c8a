"""Lightning's own parts in a federated run: each row of ``docs/lightning.md`` works, or is refused in one line."""

import csv
import re
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from fl_lightning import ConfigurationError, FederatedModule
from fl_lightning.__main__ import main as program
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from tests.support.command_line import attempts, message_of, rows, run, write_config
from tests.support.helpers import SGD, blobs, fit, small_cnn

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
ROUNDS = "does not apply, as each batch is a round; leave it out, and use trainer.max_epochs for fewer rounds"
STEPS = "does not apply, as clients step on each batch; use larger batches"
REFUSED = {
    ("max_epochs", 0): "0 trains nothing; use at least 1 round",
    ("max_steps", 2): "2 cannot be resumed by rounds; set trainer.max_epochs",
    ("strategy", "ddp"): "DDPStrategy would mix the gradients of clients; use strategy: cohort",
    ("sync_batchnorm", True): "True would turn FedAvg into FBN; leave it out, or use FBN",
    ("precision", "16-true"): "16-true scales losses; use bf16-mixed or 32-true",
    ("precision", "bf16-true"): "bf16-true would count and average in 8 bits; use bf16-mixed or 32-true",
    ("gradient_clip_val", 1.0): "1.0 would clip nothing; use ClientGradientClipping",
    ("gradient_clip_algorithm", "value"): "value would clip nothing; use ClientGradientClipping",
    ("accumulate_grad_batches", 2): f"2 {STEPS}",
    ("fast_dev_run", 3): "3 runs one round, not several; use true",
    ("limit_train_batches", 3): f"3 {ROUNDS}",
    ("overfit_batches", 2): f"2 {ROUNDS}",
    ("val_check_interval", 0.5): "0.5 would be ignored; use trainer.check_val_every_n_epoch, in rounds",
    ("check_val_every_n_epoch", 0): "0 must be at least 1 round",
    (
        "reload_dataloaders_every_n_epochs",
        1,
    ): "1 would reload nothing: the data draw the clients' batches anew in each round; leave it out",
    ("default_root_dir", "here"): "here would be ignored; use run_root and name",
}
AVERAGE = (
    "would evaluate and save another model than the server's; use a server optimizer with momentum, or average the "
    "checkpoints of checkpoint.keep_rounds"
)
REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": (
        {"swa_lrs": 0.1, "device": None},
        "adds an extra round; use a server optimizer with momentum",
    ),
    "WeightAveraging": ({}, AVERAGE),
    "EMAWeightAveraging": ({"decay": 0.5}, AVERAGE),
    "GradientAccumulationScheduler": ({"scheduling": {"2": 4}}, STEPS),
    "BackboneFinetuning": (
        {},
        "would not reach the clients' copies; freeze layers in the model (requires_grad), or declare them frozen in a method's policy",
    ),
    "ModelPruning": (
        {"pruning_fn": "l1_unstructured", "amount": 0.5},
        "renames the parameters, which clients and methods know by name; prune the trained model",
    ),
    "BatchSizeFinder": ({}, "finds no batch, as each batch is a round; set data.batch_size"),
    "LearningRateFinder": ({}, "finds no rate of the clients; compare rates in a study with choose"),
    "ThroughputMonitor": (
        {"batch_size_fn": "builtins.len"},
        "would count rounds as batches; read time/samples_per_s of each round",
    ),
    "OnExceptionCheckpoint": (
        {"dirpath": "x"},
        "would resume by itself in the next run; last.ckpt keeps the newest round, --ckpt_path auto resumes it",
    ),
    "SpikeDetection": (
        {},
        "gets no loss of a batch; use EarlyStopping with check_finite, or model.on_divergence",
    ),
}
WORKS = set()


def shows(*names):
    """Mark a test as the one of some rows of the page."""
    WORKS.update(names)
    return lambda test: test


def callbacks(*entries):
    """The setting ``trainer.callbacks`` with classes of Lightning and their settings."""
    return {
        "trainer.callbacks": [
            {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": settings}
            for name, settings in entries
        ]
    }


def trained(*arguments, **changes):
    """The folder of a tiny run of four rounds with some settings."""
    write_config({"trainer.callbacks": [], **changes})
    return run(*arguments).attempt


@pytest.mark.parametrize(("setting", "line"), REFUSED.items(), ids=lambda x: x[0] if type(x) is tuple else "")
def test_setting_that_would_be_ignored_is_one_line(setting, line, capsys):
    name, value = setting
    message = message_of(capsys, lambda: run(f"--trainer.{name}", value))
    assert message.replace(f"trainer.{name} ", f"trainer.{name}: ") == f"error: trainer.{name}: {line}\n"
    assert attempts() == []


@shows("barebones", "enable_checkpointing")
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("barebones=true", "Trainer(barebones=True, "),
        ("enable_checkpointing=false", "`enable_checkpointing=False`"),
    ],
)
def test_what_lightning_refuses_itself_is_one_line(setting, words, capsys):
    message = message_of(capsys, lambda: run(f"--trainer.{setting}"))
    assert message.startswith("error: trainer (accelerator: cpu, devices: 1): ")
    assert words in message
    assert attempts() == []


@pytest.mark.parametrize("name", REFUSED_CALLBACKS)
def test_callback_that_a_round_cannot_use_is_one_line(name, capsys):
    settings, line = REFUSED_CALLBACKS[name]
    write_config(callbacks((name, settings)))
    assert message_of(capsys, run) == f"error: trainer.callbacks: {name} {line}\n"
    assert attempts() == []


@pytest.mark.parametrize("setting", [{"limit_train_batches": 3}, {"val_check_interval": 0.5}])
def test_a_script_gets_the_same_line(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ConfigurationError) as caught:
        fit(FederatedModule(small_cnn(), SGD, local_steps=1), blobs(), 2, **setting)
    assert str(caught.value) == f"trainer.{name}: {REFUSED[name, value]}"


@shows("callbacks of your own", "LambdaCallback")
def test_own_callbacks_are_called_per_round_and_hooks_that_never_are_refused():
    module, calls = FederatedModule(small_cnn(), SGD, local_steps=2), []
    spies = {
        name: lambda *_, name=name: calls.append(name)
        for name in (
            "on_train_epoch_start", "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end",
            "on_validation_end", "on_train_epoch_end",
        )
    }  # fmt: skip
    fit(
        module,
        blobs(),
        3,
        [L.pytorch.callbacks.LambdaCallback(**spies)],
        limit_val_batches=1.0,
        check_val_every_n_epoch=2,
    )
    evaluated = [name for name in spies if name != "on_validation_end"]
    assert calls == [*evaluated, *spies, *spies]
    for hook in ("on_before_zero_grad", "on_before_backward", "on_after_backward"):
        mine = type("Mine", (L.Callback,), {hook: lambda *_: None})()
        for callback in (mine, L.pytorch.callbacks.LambdaCallback(**{hook: print})):
            with pytest.raises(
                ConfigurationError, match=rf"^trainer.callbacks: \w+.{hook} would never be called"
            ):
                fit(FederatedModule(small_cnn(), SGD, local_steps=1), blobs(), 1, [callback])


@shows("EarlyStopping", "min_epochs", "min_steps")
@pytest.mark.parametrize(("least", "rounds"), [({}, 2), ({"min_epochs": 3}, 3), ({"min_steps": 3}, 3)])
def test_early_stopping_counts_rounds_and_waits_for_the_fewest(least, rounds):
    stop = (
        "EarlyStopping",
        {
            "monitor": "train/loss",
            "mode": "max",
            "patience": 1,
            "min_delta": 9.0,
            "check_on_train_epoch_end": True,
        },
    )
    changes = {f"trainer.{name}": value for name, value in least.items()}
    attempt = trained(**callbacks(stop), **changes)
    assert [row["round"] for row in rows(attempt)] == [*range(rounds + 1)]


@shows("LearningRateMonitor", "DeviceStatsMonitor", "CSVLogger", "log_every_n_steps")
def test_monitors_join_the_rows_of_metrics_and_of_loggers():
    pytest.importorskip("psutil")
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "csv"}}
    monitors = callbacks(("LearningRateMonitor", {}), ("DeviceStatsMonitor", {"cpu_stats": True}))
    attempt = trained(**monitors, **{"trainer.logger": logger, "trainer.log_every_n_steps": 2})
    by_round = {row["round"]: row for row in read_metrics(attempt.metrics)}
    cpu = "DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent"
    assert {number: row.get("lr-SGD/server") for number, row in by_round.items()} == {
        0: None, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0,
    }  # fmt: skip
    assert [cpu in row for row in by_round.values()] == [False, False, True, False, True]
    assert all("epoch" not in row for row in by_round.values())
    (file,) = Path("csv").rglob("metrics.csv")
    table = [*csv.DictReader(file.read_text().splitlines())]
    assert [float(row["round"]) for row in table] == [0, 1, 2, 3, 4]
    assert [row["lr-SGD/server"] for row in table] == ["", "1.0", "1.0", "1.0", "1.0"]
    assert [float(row["train/loss"]) for row in table[1:]] == [
        by_round[number]["train/loss"] for number in range(1, 5)
    ]


@shows("ModelCheckpoint")
def test_lightnings_checkpoints_are_of_rounds_and_lie_in_the_run():
    attempt = trained(**callbacks(("ModelCheckpoint", {"every_n_epochs": 2, "save_top_k": -1})))
    names = {path.name for path in attempt.checkpoints.iterdir()}
    assert names == {"epoch=1-step=2.ckpt", "epoch=3-step=4.ckpt", "last.ckpt"}
    last, theirs = (
        torch.load(attempt.checkpoints / name, weights_only=True)["state_dict"]
        for name in ("last.ckpt", "epoch=3-step=4.ckpt")
    )
    assert all(last[name].equal(value) for name, value in theirs.items())


def test_a_metric_with_a_slash_in_the_name_of_a_checkpoint_makes_no_folder():
    settings = {"filename": "{epoch:02d}-{val/accuracy:.2f}", "monitor": "val/accuracy", "mode": "max"}
    attempt = trained(**callbacks(("ModelCheckpoint", settings)))
    names = [path.name for path in attempt.checkpoints.iterdir() if path.name != "last.ckpt"]
    assert len(names) == 1
    assert re.fullmatch(r"epoch=0\d-val_accuracy=\d\.\d\d\.ckpt", names[0])


@shows("ModelSummary", "RichModelSummary", "TQDMProgressBar", "RichProgressBar")
@pytest.mark.parametrize(
    ("name", "settings", "shown"),
    [
        ("ModelSummary", {"max_depth": 2}, r"model\.features +\| Sequential"),
        ("RichModelSummary", {"max_depth": 2}, r"model\.features +│ Sequential"),
        ("TQDMProgressBar", {}, r"Epoch 3: 100%.*val/accuracy="),
        ("RichProgressBar", {}, r"Epoch 3/3 .*1/1"),
    ],
)
def test_summaries_and_progress_bars_are_seen(name, settings, shown, capfd, caplog):
    trained(**callbacks((name, settings)))
    output = "".join([*capfd.readouterr(), caplog.text])
    assert re.search(shown, output), output
    assert "round 4/4" not in output or "Summary" in name


@pytest.mark.parametrize("name", [None, "TQDMProgressBar", "RichProgressBar"])
def test_an_evaluation_in_a_log_file_shows_a_progress_bar_if_it_is_asked(name, capfd):
    checkpoint = trained().checkpoints / "last.ckpt"
    capfd.readouterr()
    write_config(callbacks((name, {})) if name else {"trainer.callbacks": []})
    run("--ckpt_path", checkpoint, command="validate")
    assert bool(re.search(r"Validation.* 1/1 ", "".join(capfd.readouterr()))) == bool(name)


@shows("Timer", "max_time")
@pytest.mark.parametrize("way", ["Timer", "max_time"])
def test_a_time_limit_ends_the_run_after_a_complete_round(way, monkeypatch):
    def passed():  # 40 seconds for each written row
        files = list(Path("runs").rglob("metrics.jsonl"))
        return 40.0 * len(files[0].read_text().splitlines()) if files else 0.0

    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", SimpleNamespace(monotonic=passed))
    duration = "00:00:01:10"
    limit = {"trainer.max_time": duration} if way == "max_time" else callbacks((way, {"duration": duration}))
    attempt = trained(**limit)
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2, 3]
    assert "test/accuracy" in attempt.result.read_text()


@pytest.mark.slow
@shows("precision")
def test_precision_is_of_the_clients_passes_or_of_everything():
    losses = {}
    for precision, dtype in {
        "32-true": torch.float32,
        "bf16-mixed": torch.float32,
        "64-true": torch.float64,
    }.items():
        attempt = trained(**{"trainer.precision": precision})
        state = torch.load(attempt.checkpoints / "last.ckpt", weights_only=True)["state_dict"]
        assert state["classifier.weight"].dtype == dtype
        losses[precision] = rows(attempt)[4]["train/loss"]
    assert (
        0 < abs(losses["64-true"] - losses["32-true"]) < 1e-4 < abs(losses["bf16-mixed"] - losses["32-true"])
    )


@shows("fast_dev_run")
def test_fast_dev_run_is_one_round_without_files():
    calls = []
    fit(
        FederatedModule(small_cnn(), SGD, local_steps=1),
        blobs(),
        5,
        [L.pytorch.callbacks.LambdaCallback(on_train_epoch_end=lambda *_: calls.append(1))],
        fast_dev_run=True,
    )
    write_config()
    run("--trainer.fast_dev_run", "true")
    assert (calls, attempts()) == ([1], [])


@shows("limit_val_batches", "limit_test_batches", "limit_predict_batches", "num_sanity_val_steps")
def test_limits_hold_for_evaluations():
    none = {f"trainer.{x}": 0 for x in ("limit_test_batches", "num_sanity_val_steps")}
    none["trainer.limit_predict_batches"] = 2
    attempt = trained(**none, **{"data.init_args.eval_batch_size": 100})
    assert [row["round"] for row in rows(attempt)] == [1, 2, 3, 4]
    assert "test/accuracy" not in attempt.result.read_text()
    program(["predict", str(attempt.path)])
    (file,) = attempt.path.glob("predictions_*_round_4.csv")
    assert len(file.read_text().splitlines()) == 1 + 200
    batches = []
    counted = L.pytorch.callbacks.LambdaCallback(on_validation_batch_end=lambda *_: batches.append(1))
    module, data = FederatedModule(small_cnn(), SGD, local_steps=1), blobs()
    fit(module, data, 3, [counted], limit_val_batches=1)
    assert len(batches) == 3 < 3 * len(data.val_dataloader())


@shows("detect_anomaly")
def test_detect_anomaly_names_the_operation_in_a_clients_backward_pass():
    def loss(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets) + (outputs * 0).sum().sqrt()

    module = FederatedModule(small_cnn(), SGD, local_steps=1, loss=loss, check_first_steps=False)
    with (
        pytest.warns(UserWarning, match="Error detected in"),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        fit(module, blobs(), 1, detect_anomaly=True)


@shows("deterministic", "benchmark")
def test_deterministic_and_benchmark_are_switched_on_in_the_run():
    seen = []
    look = L.pytorch.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
        )
    )
    try:
        for deterministic, benchmark in ((True, False), (False, True)):
            module = FederatedModule(small_cnn(), SGD, local_steps=1)
            fit(module, blobs(), 1, [look], deterministic=deterministic, benchmark=benchmark)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
    assert seen == [(True, False), (False, True)]


@shows("profiler: simple", "profiler: advanced")
@pytest.mark.parametrize(
    ("name", "line"), [("simple", r"run_training_epoch\s+\|[^|]*\|\s+4\s"), ("advanced", "take_local_steps")]
)
def test_profilers_write_into_the_run(name, line):
    attempt = trained(**{"trainer.profiler": name})
    assert re.search(line, (attempt.path / "fit-profile.txt").read_text())


@shows("profiler: pytorch")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")  # of so few rounds
def test_the_profiler_of_pytorch_sees_the_clients_backward_passes():
    attempt = trained(**{"trainer.profiler": "pytorch"})
    assert "convolution_backward" in (attempt.path / "fit-profile.txt").read_text()


@shows("TensorBoardLogger")
def test_tensorboard_gets_the_rows_or_its_missing_package_is_one_line(capsys):
    logger = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "tb"}}
    write_config({"trainer.logger": logger})
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError:
        assert "pip install -U 'tensorboard'" in message_of(capsys, run)
        return
    attempt = run().attempt
    (events := EventAccumulator("tb/lightning_logs/version_0")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        [row["train/loss"] for row in rows(attempt)[1:]]
    )


def test_the_page_has_a_row_for_each_part_that_is_run_here():
    refused = {name for name, _ in REFUSED} | REFUSED_CALLBACKS.keys()
    elsewhere = {"WandbLogger"}  # tests/weights_and_biases/test_wandb_runs.py
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert named == WORKS | refused | elsewhere
