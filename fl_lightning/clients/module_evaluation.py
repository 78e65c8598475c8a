"""Evaluation by the evaluation steps of a user's LightningModule."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from math import inf, isnan, nan
from typing import Any

import lightning as L

from fl_lightning.client_data.loaders import every_batch
from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.clients.logged_values import LoggedValues
from fl_lightning.clients.metric_states import MetricStates
from fl_lightning.clients.metrics import undefined_is_nan
from fl_lightning.clients.tasks import Task
from fl_lightning.errors import doing
from fl_lightning.randomness import derive_seed, seed_everything, seeded

# words in names of metrics whose best values are large, and whose best values are small
LARGER_IS_BETTER = "acc|accuracy|f1|auc|auroc|ap|map|precision|recall|iou|miou|dice|r2|psnr|ssim|bleu"
SMALLER_IS_BETTER = "loss|error|err|mse|mae|rmse|nll|perplexity|ece|brier"


class _ModuleTask(Task):
    """Task of a LightningModule that computes its own loss and metrics.

    Attributes:
        logged: Names of the metrics that evaluations have logged, with directions.
    """

    quality = ""

    def __init__(self) -> None:
        self.logged: dict[str, str] = {}

    @property
    def best(self) -> dict[str, str]:
        """Direction of each logged metric whose name or class tells it, the qualities first."""
        return dict(sorted(self.logged.items(), key=lambda item: item[1]))

    def loss(self, outputs: Any, targets: Any) -> Any:
        """Raise an error, because the module computes its own loss."""
        raise NotImplementedError("a LightningModule with a training_step has no loss of (outputs, targets)")

    def learn(self, names: Mapping[str, bool | None]) -> None:
        """Add the names of logged metrics."""
        for name, large in names.items():
            words = re.split("[_/]", name.lower())
            if large is None and any(re.fullmatch(SMALLER_IS_BETTER, word) for word in words):
                large = False
            elif large is None and any(re.fullmatch(LARGER_IS_BETTER, word) for word in words):
                large = True
            if large is not None:
                self.logged[name] = "max" if large else "min"


class ModuleEvaluation(ServerEvaluation):
    """Evaluation by ``validation_step`` or ``test_step`` of a LightningModule.

    Every rank evaluates every batch. If each loader belongs to a client, the metrics are the means
    over the clients.

    Args:
        client: The hooks of the LightningModule.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._of_client: int | None = None
        super().__init__()

    def start(self) -> None:
        """Start a new evaluation."""
        super().start()
        self._values: LoggedValues | None = None
        self._held: MetricStates = {}
        self._parts: list[dict[str, float | None]] = []
        self._index = 0
        self.shown = set()
        self.loader: int | None = None

    @property
    def _run(self) -> Any:
        return self._client.run

    @property
    def _kind(self) -> str:
        return "test" if self._run.trainer.testing else "validation"

    def step(self, batch: Any) -> None:
        """Evaluate the next batch of the only loader."""
        self._step(batch, self._index, self.loader)

    def all_batches(
        self, loader: Any, evaluate: Callable[[Any, "ModuleEvaluation"], None]
    ) -> dict[str, float]:
        """Evaluate all batches of a loader or of several loaders, and return the metrics.

        Args:
            loader: A loader, or a list of loaders.
            evaluate: Function that calls :meth:`step` with a batch on the run's device.
        """
        loaders = loader if isinstance(loader, list) else [loader]
        for number, batches in enumerate(loaders):
            self.loader, self._index = number if len(loaders) > 1 else None, 0
            limit = self._limits[number]
            for batch in islice(every_batch(batches), None if limit == inf else int(limit)):
                evaluate(self._run.on_device(batch), self)
        return self.finish()

    @property
    def _limits(self) -> Sequence[int | float]:
        trainer: L.Trainer = self._run.trainer
        if trainer.sanity_checking:
            return trainer.num_sanity_val_batches
        return trainer.num_test_batches if trainer.testing else trainer.num_val_batches

    def _step(self, batch: Any, batch_idx: int, loader: int | None) -> Any:
        by_client = self._run.data.evaluates_clients and loader is not None
        if self._values is not None and by_client and loader != self._of_client:
            self._end()
        if self._values is None:
            self._values, self._held = LoggedValues(), self._client.metrics.take()
            self._of_client = loader if by_client else None
            self._client.metrics.put(self.kept.get(self._of_client, {}))
            with self._seeded("start"), self._client.logs.collecting(self._values):
                self._client.call(f"on_{self._kind}_start")
                self._client.call(f"on_{self._kind}_epoch_start")
        seed_everything(derive_seed(self._run.seed, "evaluation", self._run.trainer.global_step, batch_idx))
        self._index = batch_idx + 1
        with doing(f"{self._kind}_step of {type(self._client.module).__name__}, batch {batch_idx + 1}"):
            return self._client.evaluate(
                self._kind, batch, batch_idx, None if by_client else loader, self._values
            )

    def _seeded(self, place: str) -> AbstractContextManager[None]:
        run = self._run
        return seeded(derive_seed(run.seed, f"evaluation {place}", run.trainer.global_step))

    def step_of_loop(self, batch: Any, batch_idx: int, loader: int) -> Any:
        """Evaluate a batch in a loop of Lightning's trainer, and return the step's outputs."""
        return self._step(batch, batch_idx, loader if len(self._limits) > 1 else None)

    def is_defined(self, name: str) -> bool:
        """Return whether a client has the logged value. A metric such as an AUROC may have no value."""
        return any(part.get(name) is not None for part in self._parts)

    def finish(self) -> dict[str, float]:
        """Return the metrics by the names that the module has logged."""
        if self._values is not None:
            self._end()
            names = dict.fromkeys(name for part in self._parts for name in part)
            parts = {name: [x for part in self._parts if (x := part.get(name)) is not None] for name in names}
            self.metrics = {
                name: sum(values) / len(values) if values else nan for name, values in parts.items()
            }
        return self.metrics

    def _conclude(self, of_ranks: Any) -> None:
        """Keep the metrics that the module has logged."""

    def _end(self) -> None:
        assert self._values is not None
        metrics = self._client.metrics.metrics
        if self is self._run.evaluation:  # the metrics of variants have other names
            self._run.show_to_callbacks(self._values.numbers(metrics))
        of_steps = {*self._values}
        with (
            self._seeded("end"),
            self._client.logs.collecting(self._values),
            undefined_is_nan(metrics.values()) as undefined,
        ):
            self._client.call(f"on_{self._kind}_epoch_end")
        counted = {name for name, x in self._values.items() if x.metric is None and x.weight > 0}
        if undefined:  # a NaN that the hook has logged comes from such a metric
            counted &= of_steps
        counted |= {f"{name}_epoch" for name in counted}
        numbers = self._values.numbers(metrics)
        self._parts.append({n: None if isnan(x) and n not in counted else x for n, x in numbers.items()})
        self.shown = (self.shown or set()) | {
            name for name, logged in self._values.items() if logged.prog_bar
        }
        large = {n: metrics[x.metric].higher_is_better if x.metric else None for n, x in self._values.items()}
        self._run.task.learn(large)
        self._client.call(f"on_{self._kind}_end")
        if not self._run.trainer.sanity_checking:
            self.kept[self._of_client] = self._client.metrics.take_best(self._values)
        self._client.metrics.put(self._held)
        self._values = None
