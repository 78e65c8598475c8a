"""The server: its model, its evaluation and the metrics of each round."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.round.clock import RoundClock
from fl_lightning.round.evaluation import ServerEvaluation
from fl_lightning.round.record import RunRecord


class ServerModule(L.LightningModule):
    """A model that a server holds, evaluates and reports on: what a federated module is apart from its rounds.

    Args:
        model: The server's model.
        loss: Loss of (outputs, targets), averaged over the batch. Default: cross-entropy.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss or nn.functional.cross_entropy
        self.evaluation = ServerEvaluation()
        self.record = RunRecord()
        self.clock = RoundClock()
        self._logging_seconds: float | None = None

    @property
    def data(self) -> FederatedDataModule:
        """The federated data of the run."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]  # set by Trainer.fit(datamodule=...)
        if not isinstance(data, FederatedDataModule):
            raise ConfigurationError(
                f"data: FederatedModule needs a FederatedDataModule, got {type(data).__name__}; pass "
                "datamodule=FederatedDataModule(clients=[...]) to fit()"
            )
        return data

    @property
    def round(self) -> int:
        """The communication round under way, from 1."""
        return self.trainer.current_epoch + 1

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest row of metrics, such as ``{"round": 12, "train/loss": 0.7, "val/accuracy": 0.8}``."""
        return self.record.metrics

    def on_train_epoch_end(self) -> None:
        """Write the round's row of metrics, before any checkpoint of the round."""
        self._write_metrics(self.record.finish_line(self.round))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # passed on
        """Exactly the server model's state."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a server model's state."""
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]  # keywords only
        """Log a metric of this round: one row per round holds the last value of each name.

        Args:
            name: Metric name, such as ``"bn/drift"``.
            value: A number, a one-element tensor or a torchmetrics metric.
            kwargs: As for ``LightningModule.log``; in ``fit`` the loggers get the row, so ``logger`` is False there.
        """
        logger = False if self.trainer.state.fn == TrainerFn.FITTING else None
        self.record.add(name, value)
        given = {key: setting for key, setting in kwargs.items() if setting is not None}  # log_dict gives all
        defaults = {"on_step": False, "on_epoch": True, "batch_size": 1, "logger": logger}
        super().log(name, value, **{**defaults, **given})

    def log_numbers(self, metrics: Mapping[str, float], prog_bar: bool = False) -> None:
        """Log numbers of this round without the bookkeeping of :meth:`log` over steps and devices, which takes longer.

        Args:
            metrics: Numbers by metric name, for the row and ``trainer.callback_metrics``.
            prog_bar: Whether progress bars show them.
        """
        for name, value in metrics.items():
            self.record.add(name, value)
        self.trainer.callback_metrics.update(
            zip(metrics, torch.tensor([*metrics.values()]).unbind(), strict=True)
        )
        if prog_bar:
            self.trainer.progress_bar_metrics.update(metrics)

    def forward(self, inputs: Any) -> Any:
        """The server model's outputs."""
        return self.model(inputs)

    def evaluate_batch(self, batch: Any, evaluation: ServerEvaluation) -> None:
        """Add the model's outputs on a batch to an evaluation: override it where a batch is not ``(inputs, targets)``."""
        inputs, targets = batch
        outputs = self.model(inputs)
        evaluation.update(outputs, targets, self.loss(outputs, targets))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate the server model on a batch of evaluation data."""
        self.evaluate_batch(batch, self.evaluation)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate the server model on a batch of test data."""
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """The server model's outputs on a batch."""
        return self.model(batch[0] if isinstance(batch, list | tuple) else batch)

    def on_validation_epoch_start(self) -> None:
        """Start an evaluation."""
        self._evaluation_started = time.perf_counter()
        self.evaluation.start()

    def on_test_epoch_start(self) -> None:
        """Start an evaluation."""
        self.evaluation.start()

    def on_validation_epoch_end(self) -> None:
        """Log the evaluation; before training, as row 0."""
        metrics = self._evaluated(self.data.fit_split)
        if self.trainer.sanity_checking:
            row = {**self.record.finish_line(0), **metrics}
            if self.trainer.num_sanity_val_steps == float("inf") and not self.trainer.global_step:
                self._write_metrics(row)
        else:
            self.log_dict(metrics, prog_bar=True)
            if self.trainer.state.fn == TrainerFn.FITTING:
                self.log_numbers({"time/evaluation_s": time.perf_counter() - self._evaluation_started})

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self.log_dict(self._evaluated("test"), prog_bar=True)

    def _evaluated(self, prefix: str) -> dict[str, float]:
        metrics = self.evaluation.finish()
        self.record.diverged |= self.evaluation.diverged
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    def _write_metrics(self, row: dict[str, float]) -> None:
        if self._logging_seconds is not None:
            row["time/logging_s"] = self._logging_seconds  # of the row before: this one is not written yet
        started = time.perf_counter()
        self.record.metrics = row
        for logger in self.trainer.loggers:
            logger.log_metrics(row, step=int(row["round"]))
        self._logging_seconds = time.perf_counter() - started
