"""Start of a run: writing the files that identify the run, and printing the policy."""

from collections.abc import Mapping
from dataclasses import replace

import lightning as L
import yaml
from lightning.pytorch.loggers import CSVLogger

from fl_lightning.batch_norm.kinds import KINDS, STATISTICS, buffer_kinds, state_label
from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.client_data.federated import SIZES
from fl_lightning.cohort.parts import match_parts
from fl_lightning.console import print_table
from fl_lightning.experiments.run_directory.config_digest import deciding_settings
from fl_lightning.experiments.run_directory.describe import (
    describe_computing,
    identity,
    origin_in_words,
)
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.drawings import draw_partition, harmless
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.run_directory.source import provenance
from fl_lightning.experiments.run_directory.start import Start
from fl_lightning.files import write_bytes, write_json, write_text
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import Stage, policy_table, stages_in_words


class RunStart(L.Callback):
    """Callback that writes the files that identify a run, and prints the policy.

    The policy says how a round treats each kind of state. If settings have changed since the
    checkpoint, the server optimizer gets the new settings.

    Args:
        start: The run's folder, and the checkpoint to resume from.
        config: The resolved configuration.
        complete: The configuration with the class of the module.
        of_script: Whether a Python script has built the run, which a comment in ``config.yaml`` says.
        verbose: Whether to print the executor of a single process on a CPU, and why nothing is compiled.
    """

    def __init__(
        self, start: Start, config: Config, complete: Config, of_script: bool = False, verbose: bool = False
    ) -> None:
        self.start, self.attempt, self.verbose = start, start.attempt, verbose
        self.config, self.complete, self.of_script = config, complete, of_script

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``config.yaml``, ``run.json``, the partition and the policy; draw the partition."""
        assert isinstance(pl_module, FederatedModule)
        self.start = trainer.strategy.broadcast(replace(self.start, attempt=None))
        self._note_origin(pl_module)
        if self.start.differs:
            # replace the old settings, which the checkpoint has restored, by the new settings
            groups = trainer.optimizers[0].param_groups, pl_module.configure_optimizers().param_groups
            for group, new in zip(*groups, strict=True):
                group.update({name: value for name, value in new.items() if name != "params"})
        policy = policy_table(pl_module.model, pl_module.federated_callbacks, pl_module.planned_rounds)
        if not trainer.global_step:
            _print_start(pl_module, policy, self.verbose)
        if self.attempt is not None and trainer.is_global_zero:
            _remove_results(self.attempt)
            if self.start.metrics:
                write_bytes(self.attempt.metrics, self.start.metrics)
                for logger in (one for one in trainer.loggers if isinstance(one, CSVLogger)):
                    for row in read_metrics(self.attempt.metrics):
                        logger.log_metrics({**row}, step=int(row["round"]))
                    logger.save()
            origin = "".join(f"# {line}\n" for line in origin_in_words(pl_module.record.continued_from))
            settings = yaml.safe_dump(self.config, sort_keys=False)
            sizes = {name: getattr(pl_module.data, name) for name in (*SIZES, "num_clients")}
            decided = ", ".join(f"{name}: {x}" for name, x in sizes.items() if x is not None)
            header = f"# decided by the data: {decided}\n"
            if self.of_script:
                header += "# built in Python; only the class is named of objects that have no plain form\n"
            write_text(self.attempt.config, origin + header + settings)
            write_json(self.attempt.partition, pl_module.data.partition_record())
            write_json(self.attempt.policy, policy)
            with harmless(self.attempt.identity):
                write_json(self.attempt.identity, identity(pl_module))
            draw_partition(self.attempt, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the executor and other facts that affect the rounding errors of the round.

        The number of clients that an executor computes at once may change during a run.
        """
        assert isinstance(pl_module, FederatedModule)
        pl_module.record.computed_by = describe_computing(pl_module)

    def _note_origin(self, module: FederatedModule) -> None:
        """Record the settings and versions of the code that checkpoints contain.

        In a resumed run, print what has changed since the checkpoint.
        """
        record, start = module.record, self.start
        record.description, computes = deciding_settings(self.complete), provenance(self.complete)
        last = record.provenance[-1] if record.provenance else {}
        if changed := _changes(last, computes):
            print(f"code or versions changed after round {start.round}: {changed}", flush=True)
        elif last.keys() <= computes.keys():
            # delete the last entry, because the new entry contains the same versions
            del record.provenance[-1:]
        if computes not in record.provenance:
            record.provenance.append(computes)
        if start.differs is not None:
            record.continue_from(start.checkpoint, start.round, start.differs)
        now = describe_computing(module)
        # ignore the executor's name: only block_size affects rounding errors
        if changed := _changes(record.computed_by, {**now, "executor": record.computed_by.get("executor")}):
            print(
                f"computed differently after round {start.round}: {changed}; results agree up to rounding, which grows with the rounds",
                flush=True,
            )
        record.computed_by = now


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    changed = [name for name in now if name in before and before[name] != now[name]]
    return ", ".join(f"{name} {before[name]} -> {now[name]}" for name in changed)


def _print_start(module: FederatedModule, policy: Mapping[str, list[Stage]], verbose: bool) -> None:
    """Print the policy. Print the executor and compilation if the run has chosen them for speed."""
    rows = {
        state_label(kind): f"{stages_in_words(stages)}{_tensors(module, kind)}"
        for kind, stages in policy.items()
    }
    print_table("State of the model", rows)
    choice, compilation = module.executor_choice, module.executor.compilation
    rows = {}
    if choice is not None and (verbose or not choice.plain):
        rows[type(choice.executor).__name__] = f"{choice.reason}; model.executor sets another"
    if compilation.reason and (verbose or compilation.compiled):
        rows["compiled" if compilation.compiled else "not compiled"] = compilation.reason
    if rows:
        print_table("Executor", rows)


def _tensors(module: FederatedModule, kind: str) -> str:
    if kind == "buffer":
        names = (name for name, its_kind in buffer_kinds(module.model).items() if its_kind == kind)
        return f" ({', '.join(dict.fromkeys(_class_of(module, name) for name in names))})"
    layers = [x for x in batch_norm_layers(module.model).values() if x.running_mean is not None]
    trained = sum(layer in module.tracking_layers for layer in layers)
    if kind in STATISTICS and trained < len(layers):
        return f" ({trained} layer{'s' * (trained != 1)}), in eval mode ({len(layers) - trained})"
    if kind in KINDS:
        return ""
    first, *others = match_parts(module.model, [kind])
    return f" ({first}{f' and {len(others)} more' if others else ''})"


def _class_of(module: FederatedModule, name: str) -> str:
    owner, _, attribute = name.rpartition(".")
    maximum = "" if module.model.get_buffer(name).is_floating_point() else ": maximum"
    return f"{type(module.model.get_submodule(owner)).__name__}.{attribute}{maximum}"


def _remove_results(attempt: Attempt) -> None:
    """Remove the result files that an earlier fit with fewer rounds has left in this folder."""
    pictures = (*attempt.path.glob("class_*.png"), attempt.path / "overlays.png")
    for path in (attempt.result, attempt.error, *pictures):
        path.unlink(missing_ok=True)
