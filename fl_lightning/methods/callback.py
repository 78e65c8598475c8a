"""Base class of methods, with the hooks of a communication round."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import lightning as L
from torch import nn

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.cohort.client_memory import ClientMemory
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.execution.base import Executor
from fl_lightning.recorded import Recorded
from fl_lightning.round.declarations import Declarations

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule


class FederatedCallback(Recorded, Declarations, L.Callback):
    """Base class of federated methods. A method changes the training algorithm of a run.

    A method declares in ``policy`` how a round treats each kind of state. It changes the round by
    hooks. One round is ::

        setup                                          # once: extend_model(model), configure_batch_norm(pl_module)
        for round in 1, 2, ..., total_rounds:
            cohort <- copies of the server's state for the sampled clients
            on_round_start(trainer, pl_module, cohort)
            for step in 0, 1, ..., E - 1:              # local steps, all clients side by side
                cohort.grads, cohort.buffers <- forward and backward on each client's batch
                on_after_local_backward(trainer, pl_module, cohort, step)
                cohort.params <- one step of the client optimizer
                on_local_step_end(trainer, pl_module, cohort, step)
            on_before_aggregate(trainer, pl_module, cohort)
            cohort.pseudo_gradient <- server - aggregate(cohort)
            on_after_aggregate(trainer, pl_module, cohort)
            on_before_optimizer_step(trainer, pl_module, optimizer)  # Lightning's own hook
            server <- one step of the server optimizer
            on_round_end(trainer, pl_module, cohort)

    In every tensor of the cohort, the first dimension is the client. If a method keeps state between
    rounds, ``saved`` must name the attributes that hold this state, such as ``saved = ("memory",)``:
    tensors and numbers, with the state of clients keyed by client id.

    If ``on_divergence`` is ``drop``, clients with a non-finite update are left out. Updates are
    checked before and after ``on_before_aggregate``. Later hooks get a cohort of the remaining
    clients. ``cohort.rows`` has the indices of their rows in the entire cohort. If too few clients
    report or remain, the round is skipped. In a skipped round, ``on_round_skipped(trainer,
    pl_module)`` is called instead of the remaining hooks.

    Before each hook, the global generators of torch, NumPy and Python are seeded from the run's seed,
    the class, the hook, the round and the step. Random numbers therefore do not depend on the executor, on earlier draws
    or on a resume. A run gives the same numbers on one rank and on several ranks if hooks follow
    these rules:

    - Four hooks get the entire cohort: ``on_round_start``, ``on_before_aggregate``,
      ``on_after_aggregate`` and ``on_round_end``. In the four hooks and in Lightning's hooks, all
      ranks must compute the same numbers. These hooks must therefore not use clocks or rank numbers,
      and must draw random numbers only from the global generators.
    - Two hooks get only the rows of their rank: ``on_after_local_backward`` and
      ``on_local_step_end``. ``cohort.rows`` has the indices of the rows. A rank may have no rows.
      The two hooks may change only these rows. They must not call ``cohort.mean``, which would
      raise an error. They store state in ``cohort.extra``, not on ``self``. ``on_round_start`` must
      have filled ``cohort.extra`` with tensors ``[C, ...]``. The two hooks draw random numbers from
      ``cohort.generators``.

    A misspelled hook, such as ``on_rond_start``, raises an error, even in a mixin.

    Attributes:
        saved: Names of the attributes that checkpoints save, in addition to those of the base classes.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> class Halved(FederatedCallback):
        ...     def on_after_local_backward(self, trainer, pl_module, cohort, step):
        ...         for gradients in cohort.grads.blocks.values():
        ...             gradients *= 0.5
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[Halved()])
    """

    saved: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named = chain(*(vars(base).get("saved", ()) for base in reversed(cls.__mro__)))
        cls.saved = (*dict.fromkeys(named),)
        known = {name for name in dir(FederatedCallback) if name.startswith("on_")}
        for name in dir(cls):
            if name.startswith("on_") and name not in known:
                raise ConfigurationError(
                    f"{cls.__name__}.{name} is not a hook of FederatedCallback{nearest(name, known)}"
                )

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints. Several callbacks of one class without state may be in a run."""
        stateless = not self.saved and type(self).state_dict is FederatedCallback.state_dict
        return f"{super().state_key} {id(self)}" if stateless else super().state_key

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes that ``saved`` names, for a checkpoint.

        Raises:
            ConfigurationError: An attribute is missing.
        """
        for name in self.saved:
            if not hasattr(self, name):
                raise ConfigurationError(
                    f"{type(self).__name__}.saved: there is no attribute {name!r}{nearest(name, vars(self))}; set it in __init__, which calls super().__init__()"
                )
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the attributes that ``saved`` names from a checkpoint."""
        for name in self.saved:
            value = state_dict[name]
            is_memory = isinstance(getattr(self, name, None), ClientMemory)
            setattr(self, name, ClientMemory(value) if is_memory else value)

    def extend_model(self, model: nn.Module) -> None:
        """Replace layers by layers with more trainable parameters, which stay in the model.

        The method is called once for each model, before training, evaluations and
        ``list parameters``. Random initial values depend on the run's seed.
        """

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Replace BN layers of ``pl_module.model`` for the run, or check the model.

        The model must keep its parameters and their names, because the BN layers are restored after
        the run. Apart from BN, the forward pass must not change.
        """

    def step_executor(self, pl_module: "FederatedModule", executor: Executor) -> Executor:
        """Return the executor of the next local step. The default is the run's executor."""
        return executor

    def change_batches(
        self, pl_module: "FederatedModule", client_ids: Sequence[int], batches: BatchStack
    ) -> BatchStack:
        """Return the clients' batches after an attack has changed them.

        The method is called only if the class attribute ``role`` is ``"attack"``.
        """
        return batches

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Act before the local steps, when every row is a copy of the server's state."""

    def on_after_local_backward(
        self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort, step: int
    ) -> None:
        """Act after the backward pass of a local step. ``step`` counts from 0."""

    def on_local_step_end(
        self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort, step: int
    ) -> None:
        """Act after the client optimizer has taken a local step. ``step`` counts from 0."""

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Act after the last local step, before the clients send their rows.

        The hook may change the rows.
        """

    def on_after_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Act between aggregation and the server's step. The hook may change the aggregates.

        The aggregates are ``cohort.pseudo_gradient`` and ``cohort.server_buffers``.
        """

    def on_round_end(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: Cohort) -> None:
        """Act after the server optimizer's step, at the end of the round."""

    def on_round_skipped(
        self, trainer: L.Trainer, pl_module: "FederatedModule"
    ) -> tuple[Mapping[int, tuple[int, int]], int]:
        """Act in a skipped round, in place of the round's remaining hooks.

        Returns:
            The numbers of floats that each client sends and receives (see ``extra_traffic``), and
            the number of exchanges (see ``extra_exchanges``).
        """
        return {}, 0


class Observer(FederatedCallback):
    """Base class of callbacks that measure a run with any method; training does not change."""

    paper = "(an observer: measurement only)"
    role = "observer"
    equalities: tuple[str, ...] = ("weights_of_fedavg", "one_client_is_plain_training")
