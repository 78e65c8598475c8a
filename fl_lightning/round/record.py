"""Record of a run: metrics of the newest round, and totals over all rounds."""

import time
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from torchmetrics import Metric
from typing_extensions import TypedDict

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import OtherData


class Origin(TypedDict):
    """Checkpoint from which a run continued with changed settings or data.

    Attributes:
        checkpoint: Path of the checkpoint.
        round: The checkpoint's round.
        differs: Old and new values of changed settings, by dotted name.
    """

    checkpoint: str
    round: int
    differs: dict[str, list[object]]


class RunRecord:
    """Metrics and totals of a run, which are saved in its checkpoints.

    Attributes:
        metrics: Metrics of the newest finished round, including ``round``.
        samples: Number of training samples that clients have processed.
        upload_bytes: Bytes that clients have sent.
        download_bytes: Bytes that clients have received.
        seconds: Time spent in rounds.
        diverged: Whether an aggregated update or an evaluation has been non-finite.
        diverged_round: First diverged round; None if the round is unknown or the run has not
            diverged.
        not_finite: Number of non-finite updates of each client, including updates that were left
            out.
        clients: Number of rounds, number of local steps and latest mean training loss of each
            client.
        holders: Clients that have received frozen or discarded state, by version
            (``Cohort.versions``).
        data: Digests of the data, see ``FederatedDataModule.fingerprint``.
        description: Settings that affect results, by dotted name; may be empty.
        computed_by: The executor and other facts that affect rounding errors; empty if unknown.
        provenance: Versions of the code that computed the run
            (:func:`~fl_lightning.experiments.run_directory.source.provenance`). Each change of the
            code adds an entry.
        compiled: Whether the clients' passes are compiled; None before the decision.
        continued_from: Checkpoints from which the run continued with changed settings or data.
    """

    def __init__(self) -> None:
        self.data: dict[str, str] = {}
        self.description: dict[str, object] = {}
        self.computed_by: dict[str, object] = {}
        self.provenance: list[dict[str, str]] = []
        self.compiled: bool | None = None
        self.continued_from: list[Origin] = []
        self.metrics: dict[str, float] = {}
        self.samples = self.upload_bytes = self.download_bytes = 0
        self.seconds = 0.0
        self.diverged = False
        self.diverged_round: int | None = None
        self.not_finite: dict[int, int] = {}
        self.clients: dict[int, tuple[int, int, float]] = {}
        self.holders: dict[str, list[int]] = {}
        self._pending: dict[str, float] = {}
        self._logging_seconds: float | None = None

    def add(self, name: str, value: Any) -> None:
        """Add a metric to the metrics of the current round."""
        self._pending[name] = float(value.compute() if isinstance(value, Metric) else value)

    def diverge(self, round_number: int, diverged: bool = True) -> None:
        """Flag the run as diverged if ``diverged`` is True.

        The first diverged round is recorded.
        """
        if diverged and not self.diverged:
            self.diverged, self.diverged_round = True, round_number

    def finish_round(
        self, cohort: RoundCohort, losses: Sequence[float], seconds: float, costs: Mapping[str, float]
    ) -> None:
        """Add a round's clients, losses, duration and traffic to the totals.

        Args:
            cohort: The aggregated clients.
            losses: Mean training loss of each client.
            seconds: Duration of the round.
            costs: Traffic in bytes by metric name.
        """
        for client, taken, loss in zip(cohort.client_ids, cohort.local_steps, losses, strict=True):
            rounds, steps, _ = self.clients.get(client, (0, 0, 0.0))
            self.clients[client] = (rounds + 1, steps + taken, loss)
        versions = cohort.versions.values()
        self.holders = {name: sorted({*self.holding(name), *cohort.client_ids}) for name in versions}
        self.samples += sum(cohort.samples)
        self.spend(seconds, costs)

    def holding(self, version: str) -> list[int]:
        """Return the clients that have received a version of a block (``Cohort.versions``)."""
        return self.holders.get(version, [])

    def spend(self, seconds: float, costs: Mapping[str, float]) -> None:
        """Add a duration in seconds, and traffic in bytes by metric name, to the totals."""
        self.seconds += seconds
        self.upload_bytes += int(costs["comm/upload_bytes"])
        self.download_bytes += int(costs["comm/download_bytes"])

    def continue_from(self, checkpoint: str, round_number: int, differs: Mapping[str, list[object]]) -> None:
        """Record that the run continues with changed settings or data.

        Args:
            checkpoint: Path of the checkpoint.
            round_number: The checkpoint's round.
            differs: The old and the new value of each changed setting.
        """
        last = self.continued_from[-1] if self.continued_from else None
        if last is not None and (last["checkpoint"], last["round"]) == (checkpoint, round_number):
            last["differs"] |= differs
        else:
            self.continued_from.append(
                {"checkpoint": checkpoint, "round": round_number, "differs": dict(differs)}
            )

    def finish_line(self, round_number: int) -> dict[str, float]:
        """Return the metrics of a finished round, and clear them for the next round."""
        line = {"round": round_number, **self._pending}
        self._pending = {}
        return line

    def write(self, line: dict[str, float], loggers: Iterable[Logger]) -> None:
        """Store the metrics of the newest round, and pass the metrics to the loggers."""
        if self._logging_seconds is not None:
            # the previous duration, because the duration of this call is not known yet
            line["time/logging_s"] = self._logging_seconds
        started = time.perf_counter()
        self.metrics = line
        for logger in loggers:
            logger.log_metrics(line, step=int(line["round"]))
        self._logging_seconds = time.perf_counter() - started

    def go_on_with(self, data: dict[str, str], path: str, round_number: int, *, accept: bool) -> None:
        """Check that a resumed run has the checkpoint's data.

        If the data differ and ``accept`` is True, the change is recorded.

        Args:
            data: Digests of the data by name.
            path: Path of the checkpoint.
            round_number: The checkpoint's round.
            accept: Whether the data may differ.

        Raises:
            OtherData: The data differ and ``accept`` is False.
        """
        trained, self.data = self.data, data
        other: dict[str, list[object]] = {
            f"data.{name}": [trained.get(name), data[name]]
            for name in data
            if trained.get(name) != data[name]
        }
        if other and not accept:
            names = ", ".join(name.removeprefix("data.") for name in other)
            raise OtherData(
                f"data: the checkpoint {path} was trained on other data, these differ in: {names}; use its data and its "
                "seed_everything, or resume with these by --accept_data (in Python: accept_data = True of the module)"
            )
        if other:
            self.continue_from(path, round_number, other)

    def compare(self, data: FederatedDataModule, split: Literal["val", "test"], path: str) -> None:
        """Print a line if an evaluation has other data than the checkpoint.

        With another seed or another ``val_fraction``, the validation data are drawn anew and may
        include training samples. The same holds for test data that are drawn from a larger set:
        ``test_fraction``, ``evaluation_cities``, a table without ``test_features``, or a partition
        file over ``train+test``. The training data count only if their mean and standard deviation
        scale the samples.

        Args:
            data: The data module.
            split: The data that the evaluation reads.
            path: Path of the checkpoint.
        """
        now = {"evaluation": data.evaluation_digest(split)}
        if data.scaled_by_training:
            now["training"] = data.fingerprint()["training"]
        words = {
            "evaluation": "samples that another seed or fraction draws may have trained the model",
            "training": "their mean and standard deviation scale the samples",
        }
        for name, found in now.items():
            if found and found != self.data.get(name):
                print(f"data: other {name} data than those of {path}; {words[name]}", flush=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of the run and the newest metrics, to be saved in a checkpoint."""
        return {name: copy(value) for name, value in vars(self).items() if not name.startswith("_")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the totals and the newest metrics of a checkpoint."""
        vars(self).update(state)
