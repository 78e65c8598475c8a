"""Collects the values that a LightningModule logs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.clients.logged_values import Logged, LoggedValues, reduction
from fl_lightning.errors import ConfigurationError


class LogCollector:
    """Takes the place of ``self.log`` of a LightningModule.

    Args:
        task: The task of the module.

    Attributes:
        round: The values of the round, to which hooks outside of steps add.
        sink: The values to which the next value is added.
        batch: The batch whose size weighs a mean; None outside of batches.
        step: The values of the last local step.
        loader: Number of the loader in an evaluation of several loaders.
        number: Name of a logged value that is no tensor; empty if all are tensors.
        told: Notes that were printed.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self.sink = self.round = LoggedValues()
        self.step = LoggedValues()
        self.batch: Any = None
        self._in_local_step = False
        self.loader: int | None = None
        self.number = ""
        self.told: set[str] = set()

    @contextmanager
    def collecting(
        self, values: LoggedValues, batch: Any = None, *, local_step: bool = False
    ) -> Iterator[LoggedValues]:
        """Add what the module logs within the ``with`` block to ``values``."""
        before = self.sink, self.batch, self._in_local_step
        self.sink, self.batch, self._in_local_step = values, batch, local_step
        try:
            yield values
        finally:
            self.sink, self.batch, self._in_local_step = before

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Collect a value. The arguments are those of ``LightningModule.log``."""
        if name == "round":
            raise ConfigurationError(
                "self.log('round'): each row has the number of its round under this name; use another"
            )
        if self.loader is not None and add_dataloader_idx:
            name = f"{name}/dataloader_idx_{self.loader}"
        if on_step and self.sink is self.step and "on_step" not in self.told:
            self.told.add("on_step")
            self._task.run.print(
                "self.log(on_step=True): a round has one row, with the mean over the local steps of all clients"
            )
        # Lightning's defaults
        on_step = self._in_local_step if on_step is None else on_step
        on_epoch = not self._in_local_step if on_epoch is None else on_epoch
        forked = on_step and on_epoch
        if isinstance(value, Metric):
            metric = next(
                (path for path, known in self._task.metrics.metrics.items() if known is value), None
            )
            if metric is None:
                raise ConfigurationError(
                    f"self.log({name!r}): the metric {type(value).__name__} is no attribute of the module; make it one in __init__"
                )
            self.sink.add(name, Logged(metric=metric, prog_bar=prog_bar, forked=forked))
            return
        if not isinstance(value, Tensor):
            try:
                self.number, value = name, torch.tensor(float(value), device=self._task.module.device)
            except TypeError:
                raise ConfigurationError(
                    f"self.log({name!r}): a {type(value).__name__}; log a number, a tensor with one element or a metric"
                ) from None
        if value.numel() != 1:
            raise ConfigurationError(f"self.log({name!r}): a tensor {[*value.shape]}; log a single number")
        value = value.detach().reshape(())
        if value.dtype not in (torch.float32, torch.float64):
            value = value.to(torch.get_default_dtype())
        reduce, weight = reduction(name, reduce_fx), 1.0
        if reduce == "mean":
            # batch_size may be 0, if no sample of the batch counts
            weight = float(self._batch_size(name) if batch_size is None else batch_size)
            value = value * weight
        self.sink.add(name, Logged(value, weight, reduce, prog_bar, forked))

    def _batch_size(self, name: str) -> int:
        if self.batch is None:
            return 1
        try:
            return extract_batch_size(self.batch)
        except MisconfigurationException:
            raise ConfigurationError(
                f"self.log({name!r}): the batch has no tensor that tells its size; give batch_size"
            ) from None
