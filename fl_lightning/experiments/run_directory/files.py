"""The files of a run: those that it writes when it begins, and its pictures and tables."""

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import lightning as L
import yaml

from fl_lightning.batch_norm.kinds import KIND_LABELS
from fl_lightning.console import print_table
from fl_lightning.experiments.run_directory.continuation import Start
from fl_lightning.experiments.run_directory.describe import (
    clients_table,
    describe_computing,
    identity,
    origin_in_words,
    run_title,
)
from fl_lightning.experiments.run_directory.description import deciding_settings, misfits
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.run_directory.predictions import overlays
from fl_lightning.experiments.run_directory.source import provenance
from fl_lightning.files import write_bytes, write_json, write_text
from fl_lightning.methods.report import Report
from fl_lightning.pictures.federation import class_quality_figure, clients_figure
from fl_lightning.pictures.learning_curve import learning_curve_figure
from fl_lightning.pictures.style import write_figure
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import policy_table, stages_in_words


class RunStart(L.Callback):
    """Begins a run: writes what identifies it into its directory and prints the policy in force.

    Where its settings differ from those of its checkpoint, the server optimizer gets back the configured ones.

    Args:
        start: The run's folder, and what it goes on from.
        config: The resolved configuration.
        made: What was built.
        header: Comment at the top of ``config.yaml``.
    """

    def __init__(
        self, start: Start, config: Mapping[str, Any], made: Mapping[str, Any], header: str = ""
    ) -> None:
        self.start, self.attempt = start, start.attempt
        self.config, self.made, self.header = config, made, header

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``config.yaml``, ``run.json``, ``partition.json`` and ``policy.json``, and draw the partition."""
        assert isinstance(pl_module, FederatedModule)
        self.start = trainer.strategy.broadcast(replace(self.start, attempt=None))
        self._note_origin(pl_module)
        if self.start.differs:
            groups = trainer.optimizers[0].param_groups
            for group, own in zip(groups, pl_module.configure_optimizers().param_groups, strict=True):
                group.update({name: value for name, value in own.items() if name != "params"})
        table = policy_table(pl_module.model, pl_module.federated_callbacks, pl_module.planned_rounds)
        if not trainer.global_step:
            rows = {KIND_LABELS[kind]: stages_in_words(stages) for kind, stages in table.items()}
            print_table("State of the model", rows)
            choice, compilation = pl_module.executor_choice, pl_module.executor.compilation
            rows = {}
            if choice is not None:
                rows[type(choice.executor).__name__] = f"{choice.reason}; model.executor sets another"
            if compilation.reason:
                rows["compiled" if compilation.compiled else "not compiled"] = compilation.reason
            if rows:
                print_table("Executor", rows)
        if self.attempt is not None and trainer.is_global_zero:
            for path in (
                self.attempt.result,
                self.attempt.error,
                *self.attempt.path.glob("class_*.png"),
                self.attempt.path / "overlays.png",
            ):
                path.unlink(missing_ok=True)  # of a run that this one takes further
            if self.start.metrics:
                write_bytes(self.attempt.metrics, self.start.metrics)
            origin = "".join(f"# {line}\n" for line in origin_in_words(pl_module.record.continued_from))
            text = origin + self.header + yaml.safe_dump(self.config, sort_keys=False)
            write_text(self.attempt.config, text)
            self._check_configuration()
            write_json(self.attempt.partition, pl_module.data.partition_record())
            write_json(self.attempt.policy, table)
            with _harmless(self.attempt.identity):
                write_json(self.attempt.identity, identity(pl_module))
            draw_partition(self.attempt, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep how the round was computed: a GPU whose memory ends has halved its blocks by now."""
        assert isinstance(pl_module, FederatedModule)
        pl_module.record.computed_by = describe_computing(pl_module)

    def _check_configuration(self) -> None:
        """Check that ``config.yaml`` builds this run.

        Raises:
            RuntimeError: It would build another one.
        """
        assert self.attempt is not None
        if found := misfits(yaml.safe_load(self.attempt.config.read_text()), self.made):
            raise RuntimeError(
                f"{self.attempt.config} would not build this run ({'; '.join(found)}): a defect of fl_lightning, please report it"
            )

    def _note_origin(self, module: FederatedModule) -> None:
        """Keep the settings for checkpoints, and what is otherwise than it was in the one that the run goes on from."""
        record, start = module.record, self.start
        record.description, computes = deciding_settings(self.made), provenance(self.made)
        last = record.provenance[-1] if record.provenance else {}
        changed = [f"{x} {last[x]} -> {now}" for x, now in computes.items() if last.get(x, now) != now]
        if changed:
            print(f"other code or versions than up to round {start.round}: {', '.join(changed)}", flush=True)
        elif last.keys() <= computes.keys():
            del record.provenance[-1:]  # the same code and further methods, as after a shared first stage
        if computes not in record.provenance:
            record.provenance.append(computes)
        if start.differs is not None:
            record.continue_from(start.checkpoint, start.round, start.differs)
        before, now = record.computed_by, describe_computing(module)
        # the executor's name does not count: one process computes a client as many do
        other = [
            f"{name} {before[name]} -> {now.get(name)}"
            for name in before
            if name != "executor" and before[name] != now.get(name)
        ]
        if other:
            print(
                f"computed otherwise than up to round {start.round}, so results agree up to rounding, which grows with the "
                f"rounds: {', '.join(other)}",
                flush=True,
            )
        record.computed_by = now


def draw_partition(attempt: Attempt, module: FederatedModule) -> None:
    """Draw ``partition.png`` from ``partition.json``: samples by client and class, or sizes where it has no classes."""
    with _harmless(attempt.partition_picture):
        record, title = json.loads(attempt.partition.read_text()), run_title(module)
        write_figure(attempt.partition_picture, clients_figure(record, module.data.class_names, title))


def draw_pictures(attempt: Attempt | None, module: FederatedModule) -> None:
    """Draw what a run has found into its folder, and write what its clients did and the tables of its reports as ``<name>.csv``.

    ``learning_curve.png`` is drawn from ``metrics.jsonl``; where the run is finished ``class_accuracy.png``, or what else the task
    calls it, from ``result.json``, and of a segmentation ``overlays.png``.

    Args:
        attempt: The run's folder, None where nothing is written (``fast_dev_run``).
        module: The trained module, whose callbacks may be reports with pictures ``<name>.png``.
    """
    if attempt is None:
        return
    title = run_title(module)
    with _harmless(attempt.learning_curve):
        policy = json.loads(attempt.policy.read_text())
        figure = learning_curve_figure(read_metrics(attempt.metrics), policy, title, module.task.quality)
        write_figure(attempt.learning_curve, figure)
    if attempt.result.exists():
        what = module.task.by_class
        path = attempt.path / f"class_{what}.png"
        with _harmless(path):
            found = json.loads(attempt.result.read_text())[f"class_{what}"]
            if found is not None:
                figure = class_quality_figure(
                    found[what], found["classes"], f"{found['split']} {what}", title
                )
                write_figure(path, figure)
        path = attempt.path / "overlays.png"
        with _harmless(path):
            if (shown := overlays(module, title)) is not None:
                write_figure(path, shown)
    with _harmless(attempt.participation):
        _write_table(attempt.participation, *clients_table(module))
    histograms: dict[str, Any] = {}
    for report in (cb for cb in module.federated_callbacks if isinstance(cb, Report)):
        with _harmless(f"a picture of {type(report).__name__}"):
            for name, draw in report.figures(read_metrics(attempt.metrics)).items():
                write_figure(attempt.path / f"{name}.png", draw(title))
        with _harmless(f"a table of {type(report).__name__}"):
            for name, table in report.tables().items():
                _write_table(attempt.path / f"{name}.csv", table.columns, table.rows)
            histograms |= {name: [*values] for name, values in report.histograms().items() if len(values)}
    if histograms:
        with _harmless(attempt.histograms):
            write_json(attempt.histograms, histograms)


def _write_table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    text = StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    write_text(path, text.getvalue())


@contextmanager
def _harmless(what: Path | str) -> Iterator[None]:
    """Say that a picture or table could not be made, whatever the reason, and go on: a run is more than its pictures."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # matplotlib's, the disk's, or those of a user's own record
        print(f"{what} was not written: {type(error).__name__}: {error}", file=sys.stderr)
