"""Quality of clients that never train, with BN statistics from several sources."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, product
from statistics import fmean
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from fl_lightning import ConfigurationError, FederatedModule, Report, Table
from fl_lightning.batch_norm import batch_norm_layers
from fl_lightning.cohort import LAST_LAYER, match_parts
from fl_lightning.errors import check_choice, check_number
from fl_lightning.methods import (
    Adaptation,
    Drawing,
    MetricRows,
    Observer,
    PersonalEvaluation,
    VariantEvaluation,
    adapt_statistics,
    adapted_state,
    entropy_steps,
    evaluate_client,
    fine_tuned,
    formatted,
    main_metric,
    moving_statistics,
    spread_over_clients,
)
from fl_lightning.pictures import participation_figure
from fl_lightning.round import Classification, ServerEvaluation

_SOURCES = ("server", "adabn", "mixture", "tent", "fine_tuned")


class ParticipationGap(Report, Observer, VariantEvaluation):
    """Observer that compares clients that never train with clients that train.

    The data module's setting ``held_out`` chooses the clients that never train. Each source makes a
    model for such a client from the server's model and the client's own training data:

    - ``server``: The server's model, with the server's BN statistics.
    - ``adabn``: BN statistics of the client's data
      (:func:`~fl_lightning.methods.own_data.adapt_statistics`).
    - ``mixture``: The server's statistics, moved towards the statistics of the client's batches
      (:func:`~fl_lightning.methods.adaptations.moving_statistics`).
    - ``tent``: A step on gamma and beta per batch, on the entropy of the predictions
      (:func:`~fl_lightning.methods.adaptations.entropy_steps`).
    - ``fine_tuned``: Training of the last layer. This source alone uses labels.

    The model is evaluated on the client's own evaluation data, as in ``ClientEvaluation``. Clients
    that train are evaluated with the model that they use: their own under a method such as FedBN, the
    server's under all others. Each evaluation logs under ``val/`` or ``test/``:

    - ``trained_accuracy``: Mean over the clients that train.
    - ``held_out_accuracy_<source>``: Mean over the clients that never train.
    - ``gap_accuracy_<source>``: The participation gap, the first mean minus the second (Yuan et al.,
      "What do we mean by generalization in federated learning?", ICLR 2022).
    - The same with ``_worst`` for the mean over the worst tenth of the clients, at least one. The two
      means also have ``_variance``.

    Other metrics of the task have the same names with their own name in place of ``accuracy``. After
    the run, ``held_out.csv`` and ``held_out.png`` have each client's values in the last evaluation.

    Args:
        sources: List of sources. None selects all that the model allows.
        tau: Weight of a batch in ``mixture``, in [0, 1].
        tent_lr: Learning rate of ``tent``.
        fine_tune_epochs: Passes over the client's training data in ``fine_tuned``.

    Raises:
        ConfigurationError: A setting is out of range, the model does not allow a source, or a method
            with models of the clients comes later in ``trainer.callbacks``.

    Attributes:
        values: Metrics of the last evaluation: by source (``"trained"`` for clients that train), and
            then by client id.
    """

    paper = "Yuan et al., ICLR 2022 (an observer: evaluation only)"

    def __init__(
        self,
        sources: Sequence[str] | None = None,
        tau: float = 0.1,
        tent_lr: float = 1e-3,
        fine_tune_epochs: int = 1,
    ) -> None:
        for source in sources or ():
            check_choice("ParticipationGap.sources", source, _SOURCES)
        check_number("ParticipationGap.tau", tau, least=0, most=1)
        check_number("ParticipationGap.tent_lr", tent_lr, least=0)
        check_number("ParticipationGap.fine_tune_epochs", fine_tune_epochs, least=0)
        self.sources, self.tau, self.tent_lr, self.fine_tune_epochs = sources, tau, tent_lr, fine_tune_epochs
        self.values: dict[str, dict[int, Mapping[str, float]]] = {}
        self._main = ""
        self._rows: list[tuple[int, str, int]] = []

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Check the sources, and the order of the callbacks."""
        for source in {*(self.sources or ())}.difference(self._sources(pl_module)):
            raise ConfigurationError(
                f"ParticipationGap.sources: {source} needs Batch Normalization with running statistics, and tent a classifier with "
                "gamma and beta; leave it out"
            )
        trainer: Any = pl_module.trainer
        callbacks = [x for x in trainer.callbacks if isinstance(x, PersonalEvaluation | type(self))]
        for late in callbacks[callbacks.index(self) + 1 :]:
            raise ConfigurationError(
                f"trainer.callbacks: ParticipationGap compares with the clients' models of {type(late).__name__}; put "
                f"{type(late).__name__} before ParticipationGap"
            )

    def _sources(self, pl_module: FederatedModule) -> dict[str, Adaptation | None]:
        """Return the sources that the model allows, with the adaptation of each, if any."""
        layers = [x for x in batch_norm_layers(pl_module.model).values() if x.running_mean is not None]
        possible: dict[str, Adaptation | None] = {"server": None}
        if layers:
            possible |= {"adabn": adapt_statistics, "mixture": partial(moving_statistics, tau=self.tau)}
        classifies = isinstance(pl_module.task, Classification)
        if classifies and any(layer.affine for layer in layers):
            possible["tent"] = partial(entropy_steps, lr=self.tent_lr)
        return possible | {"fine_tuned": None}

    def variants(self, trainer: L.Trainer, pl_module: FederatedModule) -> Mapping[str, Mapping[str, Tensor]]:
        """Return a model for each client that never trains, and each source except ``server``."""
        if trainer.sanity_checking or not pl_module.data.held_out:
            return {}
        if trainer.state.fn != TrainerFn.FITTING:
            pl_module.data.setup("fit")
        possible, head = self._sources(pl_module), match_parts(pl_module.model, [LAST_LAYER])

        def model(name: str) -> tuple[str, Mapping[str, Tensor]]:
            source, client = name.split()[0], int(name.split()[1])
            if (adapt := possible[source]) is None:
                return name, fine_tuned(pl_module, client, self.fine_tune_epochs, head)
            steps = range(pl_module.data.steps_per_epoch(client))
            batches = (pl_module.data.cohort_batch([client], [step]).batches()[0] for step in steps)
            return name, adapted_state(pl_module, adapt, batches, source, client)

        sources = [source for source in self.sources or possible if source != "server"]
        names = [f"{source} {client}" for source in sources for client in pl_module.data.held_out]
        return dict(pl_module.ranks.map(model, names))

    def variant_metrics(
        self, pl_module: FederatedModule, split: str, evaluations: Mapping[str, ServerEvaluation]
    ) -> Mapping[str, float]:
        """Return the means over the clients, and the gap for each source."""
        data, task = pl_module.data, pl_module.task
        if pl_module.trainer.sanity_checking or not data.held_out:
            return {}
        held_out, trained = list(data.held_out), range(data.num_clients)
        methods = pl_module.federated_callbacks
        personal = next((x for x in methods if isinstance(x, PersonalEvaluation)), None)
        jobs = [] if personal else [("trained", client) for client in trained]
        jobs += [(x, client) for x in self.sources or self._sources(pl_module) for client in held_out]
        pl_module.evaluation.finish()

        def measured(job: tuple[str, int]) -> Mapping[str, float]:
            name = "{} {}".format(*job)
            tensors: Mapping[str, Tensor] = {}
            if job[0] in ("trained", "server"):
                evaluate, quality = pl_module.client.evaluate_batch, pl_module.evaluation.class_quality
            else:
                tensors = self._tensors[name]
                evaluate = partial(self.evaluate, pl_module, tensors)
                quality = evaluations[name].class_quality
            with pl_module.trainer.precision_plugin.val_step_context():
                return evaluate_client(pl_module, job[1], split, evaluate, quality, tensors).metrics

        self.values = {"trained": {**personal.own_values} if personal else {}}
        for (source, client), metrics in zip(jobs, pl_module.ranks.map(measured, jobs), strict=True):
            self.values.setdefault(source, {})[client] = metrics
        self._rows = [
            (x, data.client_names[x] if data.client_names else str(x), data.num_examples(x))
            for x in (*trained, *held_out)
        ]
        self._main = main_metric(task, chain.from_iterable(x.values() for x in self.values.values()))
        forms = {x: f"held_out_{{}}_{x}" for x in self.values} | {"trained": "trained_{}"}
        found: dict[str, float] = {}
        for source, values in self.values.items():
            found |= spread_over_clients([*values.values()], task.best, forms[source])
            for metric, place in product(task.best, ("", "_worst") if source != "trained" else ()):
                one, other = (formatted(form, metric) + place for form in (forms["trained"], forms[source]))
                if one in found and other in found:
                    found[formatted(f"gap_{{}}_{source}", metric) + place] = found[one] - found[other]
        return found

    def result_lines(self) -> Mapping[str, str]:
        """Return lines for the result table: the mean of the main metric over each group of clients."""
        if not self._rows:
            return {"never train": "no client; set data.held_out to a number, a fraction or names"}
        means = {source: f"{fmean(values):.4f}" for source, values in self._main_values().items()}
        own = means.pop("trained", "unknown")
        others = ", ".join(f"{source} {mean}" for source, mean in means.items())
        return {"clients that train": own, "never train": others}

    def _main_values(self) -> dict[str, list[float]]:
        known = {s: [x[self._main] for x in v.values() if self._main in x] for s, v in self.values.items()}
        return {source: values for source, values in known.items() if values}

    def tables(self) -> Mapping[str, Table]:
        """Return the table ``held_out``: the values of each client in the last evaluation."""
        values = self.values.values()
        metrics = sorted({name for by_client in values for known in by_client.values() for name in known})
        columns = [
            "client",
            "name",
            "samples",
            "trains",
            *(f"{m}_{s}" for s, m in product(self.values, metrics)),
        ]
        rows: list[list[float | str]] = []
        for client, name, samples in self._rows:
            trains = "yes" if client in self.values["trained"] else "no"
            found = (by_client.get(client, {}).get(m, "") for by_client, m in product(values, metrics))
            rows.append([client, name, samples, trains, *found])
        return {"held_out": Table(columns, rows)} if rows else {}

    def figures(self, rows: MetricRows) -> Mapping[str, Drawing]:
        """Return the figure ``held_out``: the main metric of each client, by source."""
        known = self._main_values()
        return {"held_out": partial(participation_figure, known, self._main)} if len(known) > 1 else {}
