"""The files of a run, written while it trains and when it ends."""

from collections.abc import Mapping
from typing import Any

import lightning as L

from fl_lightning.batch_norm.kinds import KIND_LABELS
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.console import print_table
from fl_lightning.files import write_json, write_text
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import Stage, policy_table, stages_in_words
from fl_lightning.run_directory.describe import run_title
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.drawings import draw_partition, draw_reports, draw_results
from fl_lightning.run_directory.metrics import cut_back
from fl_lightning.run_directory.report import reports_of
from fl_lightning.run_directory.result import collect_result, print_result


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
            print_policy(table)
            choice = pl_module.executor_choice
            if choice is not None:
                reason = f"{choice.reason}; model.executor sets another"
                print_table("Executor", {type(choice.executor).__name__: reason})
        if self.attempt is not None:
            if trainer.global_step and self.attempt.metrics.exists():
                cut_back(self.attempt.metrics, trainer.global_step)
            for path in (self.attempt.result, self.attempt.class_accuracy):
                path.unlink(missing_ok=True)  # of a shorter run that this one takes further
            write_text(self.attempt.config, self.config)
            write_json(self.attempt.partition, pl_module.data.partition_record())
            write_json(self.attempt.policy, table)
            draw_partition(self.attempt, pl_module.data.class_names, run_title(pl_module))


def print_policy(table: Mapping[str, list[Stage]]) -> None:
    """Print what happens to each kind of state in a round."""
    print_table(
        "State of the model", {KIND_LABELS[kind]: stages_in_words(stages) for kind, stages in table.items()}
    )


def finish_run(
    trainer: L.Trainer, module: FederatedModule, data: FederatedDataModule, attempt: Attempt | None
) -> dict[str, Any]:
    """Evaluate the final server model; print its result, write and draw it into the run's folder.

    Args:
        trainer: The trainer after ``fit``.
        module: The trained module.
        data: Its data.
        attempt: The run's folder, None where nothing is written (``fast_dev_run``).

    Returns:
        What ``result.json`` holds.
    """
    metrics = {name: value for name, value in module.metrics.items() if name.startswith("val/")}
    evaluations = []
    if not metrics and data.fit_split == "val" and data.val_dataloader():
        # with limit_val_batches 0 or limit_test_batches 0 there is nothing to evaluate, and no result
        evaluations += trainer.validate(module, datamodule=data, verbose=False)
    if data.test_dataloader():
        evaluations += trainer.test(module, datamodule=data, verbose=False)
    for found in evaluations:
        metrics |= found
    result = collect_result(trainer, module, attempt, metrics)
    if attempt is not None:
        write_json(attempt.result, result)
    print_result(result)
    draw_pictures(attempt, module)
    return result


def draw_pictures(attempt: Attempt | None, module: FederatedModule) -> None:
    """Draw what a run has found into its folder, where it has one (see ``fl_lightning.run_directory.drawings``)."""
    if attempt is not None:
        draw_results(attempt, run_title(module))
        draw_reports(attempt, reports_of(module.federated_callbacks), run_title(module))
