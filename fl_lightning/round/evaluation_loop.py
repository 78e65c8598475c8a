"""An evaluation of the server's model in a loop of Lightning."""

import time
from collections.abc import Mapping

from lightning.pytorch.trainer.states import TrainerFn

from fl_lightning.client_data.loaders import check_evaluated
from fl_lightning.round.context import RunContext


class EvaluationLoop:
    """An evaluation, from its start.

    Args:
        run: The run.
    """

    def __init__(self, run: RunContext) -> None:
        self._run, self._started = run, time.perf_counter()
        self._batches_before, _ = self._progress()
        run.evaluation.start()

    def _progress(self) -> tuple[int, float]:
        """Return how many batches Lightning has evaluated so far, and how many an evaluation has."""
        trainer = self._run.trainer
        loop = trainer.test_loop if trainer.testing else trainer.validate_loop
        if trainer.state.fn == TrainerFn.FITTING:
            loop = trainer.fit_loop.epoch_loop.val_loop
        return loop.batch_progress.total.completed, sum(loop.max_batches)

    def finish(self, split: str) -> dict[str, float]:
        """Return the metrics by full name.

        Args:
            split: Prefix of the names, such as ``"test"``.
        """
        run = self._run
        batches, length = self._progress()
        check_evaluated(batches - self._batches_before, length)
        metrics = run.evaluation.finish()
        run.record.diverge(run.trainer.global_step, run.evaluation.diverged)
        return {run.client.metric_name(split, name): value for name, value in metrics.items()}

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics, and in ``fit`` the duration of the evaluation."""
        run, shown = self._run, self._run.evaluation.shown
        for name, value in metrics.items():
            run.log(name, value, prog_bar=shown is None or name in shown, add_dataloader_idx=False)
        if run.trainer.state.fn == TrainerFn.FITTING:
            run.log_numbers({"time/evaluation_s": time.perf_counter() - self._started})
