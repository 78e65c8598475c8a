"""The files that a run writes when it begins."""

import lightning as L

from fl_lightning.batch_norm.kinds import KIND_LABELS
from fl_lightning.console import print_table
from fl_lightning.files import write_json, write_text
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import policy_table, stages_in_words
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.drawings import draw_partition
from fl_lightning.run_directory.metrics import cut_back


class RunFiles(L.Callback):
    """Writes what identifies a run into its directory and prints the policy in force.

    Args:
        attempt: The run's folder.
        config: The resolved configuration as YAML.
    """

    def __init__(self, attempt: Attempt | None, config: str) -> None:
        self.attempt = attempt
        self.config = config

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``config.yaml``, ``partition.json`` and ``policy.json``, draw the partition; on resume cut ``metrics.jsonl`` back."""
        assert isinstance(pl_module, FederatedModule)
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
            write_text(self.attempt.config, self.config)
            write_json(self.attempt.partition, pl_module.data.partition_record())
            write_json(self.attempt.policy, table)
            draw_partition(self.attempt, pl_module)
