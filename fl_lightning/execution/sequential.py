"""The executor that computes one client after the other."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.clients.task import ClientTask
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import ConfigurationError, doing
from fl_lightning.execution.base import Compilation, Executor
from fl_lightning.execution.compiling import compiled_calls
from fl_lightning.randomness import derive_seed, seed_global


class SequentialExecutor(Executor):
    """Executor that computes one client after the other.

    This executor is the reference for other executors, and the fastest on one CPU core.

    Args:
        compile: Whether ``torch.compile`` compiles the model. Compiling takes half a minute for
            each batch shape. The model is compiled again when a method freezes BN statistics.
            Results with and without compilation differ only by rounding. ``"auto"`` (default)
            compiles long runs on a CPU if the model has many values in BN layers. It does not compile
            layers of your own, which may change from step to step, and it needs a C++ compiler. A
            resumed run keeps the decision. Evaluation is never compiled.

    Raises:
        ConfigurationError: ``compile`` is neither true, false nor ``"auto"``.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, executor=SequentialExecutor())
    """

    def __init__(self, compile: bool | Literal["auto"] = "auto") -> None:
        if compile not in (True, False, "auto"):
            raise ConfigurationError(f"SequentialExecutor.compile: {compile!r} must be true, false or auto")
        self.compile = compile
        self.compilation = Compilation(compile is True)
        self._compiled: list[tuple[nn.Module, Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without compiled code, because a copy compiles its own model."""
        return {**vars(self), "_compiled": []}

    def compiled_for(self, model: nn.Module) -> bool:
        """Return whether compiled code for this model exists."""
        return any(known is model for known, _ in self._compiled)

    def backward(
        self, task: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        """Compute a local step, see :meth:`~fl_lightning.execution.base.Executor.backward`."""
        batches = zip(rows, batch.batches(), strict=True)
        models = task.models(cohort)  # not later, as they may be made now
        with task.alone(cohort), self._fast(models) if self.compilation.compiled else nullcontext():
            losses = []
            for row, client_batch in batches:
                with doing(f"computing {task.named(cohort.client_ids[row])}"):
                    losses.append(self._client(task, cohort, row, client_batch))
            return torch.stack(losses)

    def _fast(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        if not all(map(self.compiled_for, models)):
            # copies of a module have one code, which is compiled once
            self._compiled = [(model, torch.compile(model._call_impl, dynamic=False)) for model in models]
        return compiled_calls(self._compiled)

    def _client(self, task: ClientTask, cohort: RoundCohort, row: int, batch: Any) -> Tensor:
        """Compute a client's local step, and return its loss.

        A separate method frees each client's memory early, which limits fragmentation.
        """
        # seed the random numbers of layers such as stochastic depth
        seed = derive_seed(task.seed, "model", cohort.round, cohort.client_ids[row], cohort.step)
        seed_global(seed, task.device)
        loss, logged = task.pass_alone(cohort, row, batch)
        task.keeper()([cohort.client_ids[row]], logged)
        return loss
