"""The files that a run writes when it begins."""

import lightning as L
import yaml

from fl_lightning.batch_norm.kinds import KIND_LABELS
from fl_lightning.console import print_table
from fl_lightning.files import write_json, write_text
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import policy_table, stages_in_words
from fl_lightning.run_directory.continuation import Start, deciding_settings
from fl_lightning.run_directory.describe import describe_computing, origin_in_words
from fl_lightning.run_directory.drawings import draw_partition
from fl_lightning.run_directory.metrics import cut_back


class RunFiles(L.Callback):
    """Writes what identifies a run into its directory and prints the policy in force.

    Args:
        start: The run's folder, and what it goes on from.
        config: The resolved configuration as YAML.
    """

    def __init__(self, start: Start, config: str) -> None:
        self.start, self.attempt = start, start.attempt
        self.config = config

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``config.yaml``, ``partition.json`` and ``policy.json``, draw the partition; on resume cut ``metrics.jsonl`` back."""
        assert isinstance(pl_module, FederatedModule)
        self._note_origin(pl_module)
        table = policy_table(pl_module.model, pl_module.federated_callbacks, pl_module.planned_rounds)
        if not trainer.global_step:
            rows = {KIND_LABELS[kind]: stages_in_words(stages) for kind, stages in table.items()}
            print_table("State of the model", rows)
            choice = pl_module.executor_choice
            if choice is not None:
                reason = f"{choice.reason}; model.executor sets another"
                print_table("Executor", {type(choice.executor).__name__: reason})
        if self.attempt is not None:
            if trainer.global_step and self.attempt.metrics.exists():
                cut_back(self.attempt.metrics, trainer.global_step)
            for path in (self.attempt.result, self.attempt.class_accuracy, self.attempt.error):
                path.unlink(missing_ok=True)  # of a run that this one takes further
            origin = "".join(f"# {line}\n" for line in origin_in_words(pl_module.record.continued_from))
            write_text(self.attempt.config, origin + self.config)
            write_json(self.attempt.partition, pl_module.data.partition_record())
            write_json(self.attempt.policy, table)
            draw_partition(self.attempt, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep how the round was computed: a GPU whose memory ends has halved its blocks by now."""
        assert isinstance(pl_module, FederatedModule)
        pl_module.record.computed_by = describe_computing(pl_module)

    def _note_origin(self, module: FederatedModule) -> None:
        """Keep the settings for checkpoints, and what is otherwise than it was in the one that the run goes on from."""
        record, start = module.record, self.start
        record.settings = deciding_settings(yaml.safe_load(self.config))
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
