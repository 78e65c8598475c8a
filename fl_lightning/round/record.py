"""What a run logs and counts: the metrics of the round under way and totals since round 1."""

import time
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

from lightning.pytorch.loggers import Logger
from torchmetrics import Metric
from typing_extensions import TypedDict

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import OtherData


class Origin(TypedDict):
    """A checkpoint from which a run went on otherwise than it was.

    Attributes:
        checkpoint: Path of the checkpoint.
        round: Its round.
        differs: The old and the new value of each setting that differs, by its dotted name.
    """

    checkpoint: str
    round: int
    differs: dict[str, list[object]]


class RunRecord:
    """Metrics and totals of a run; saved with its checkpoints.

    Attributes:
        metrics: The metrics of the newest finished round, with the round itself.
        samples: Training samples that clients have processed.
        upload_bytes: Bytes that clients have sent.
        download_bytes: Bytes that clients have received.
        seconds: Time spent in rounds.
        diverged: Whether the server has ever aggregated an update, or had an evaluation, that was not finite.
        diverged_round: The first round of that; None where there was none, or it is not known.
        not_finite: How many updates of a client were not finite, by client, whatever became of them.
        clients: By client: the rounds it took part in, its local steps in them and its mean training loss in the
            last of them.
        holders: The clients that have received the frozen state, empty while nothing is frozen.
        data: What the data are (:meth:`~fl_lightning.client_data.federated.FederatedDataModule.fingerprint`).
        description: The settings that decide results by dotted name; empty if the run has none.
        computed_by: The executor and what else its rounding depends on; empty where the run does not say.
        provenance: The source and the versions that computed it, more than one where they changed on the way
            (:func:`~fl_lightning.experiments.run_directory.source.provenance`).
        compiled: Whether clients' passes are compiled, None before that was decided.
        continued_from: Each checkpoint from which the run went on otherwise.
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
        self.holders: list[int] = []
        self._pending: dict[str, float] = {}
        self._logging_seconds: float | None = None

    def add(self, name: str, value: Any) -> None:
        """Add a metric of the round under way."""
        self._pending[name] = float(value.compute() if isinstance(value, Metric) else value)

    def diverge(self, round_number: int, found: bool = True) -> None:
        """Flag the run as diverged, in this round unless it was before, if that was ``found``."""
        if found and not self.diverged:
            self.diverged, self.diverged_round = True, round_number

    def finish_round(
        self, cohort: RoundCohort, losses: Sequence[float], seconds: float, costs: Mapping[str, float]
    ) -> None:
        """Add a round to the totals: its clients and their losses, its time, and its bytes by the names of their metrics."""
        for client, taken, loss in zip(cohort.client_ids, cohort.local_steps, losses, strict=True):
            rounds, steps, _ = self.clients.get(client, (0, 0, 0.0))
            self.clients[client] = (rounds + 1, steps + taken, loss)
        frozen = "frozen" in cohort.policy.values()
        self.holders = sorted({*self.holders, *cohort.client_ids}) if frozen else []
        self.samples += sum(cohort.samples)
        self.spend(seconds, costs)

    def spend(self, seconds: float, costs: Mapping[str, float]) -> None:
        """Add time, and bytes by the names of their metrics, to the totals."""
        self.seconds += seconds
        self.upload_bytes += int(costs["comm/upload_bytes"])
        self.download_bytes += int(costs["comm/download_bytes"])

    def continue_from(self, checkpoint: str, round_number: int, differs: Mapping[str, list[object]]) -> None:
        """Note that the run goes on otherwise than it was.

        Args:
            checkpoint: Path of the checkpoint.
            round_number: Its round.
            differs: The old and the new value of each setting that differs.
        """
        last = self.continued_from[-1] if self.continued_from else None
        if last is not None and (last["checkpoint"], last["round"]) == (checkpoint, round_number):
            last["differs"] |= differs
        else:
            self.continued_from.append(
                {"checkpoint": checkpoint, "round": round_number, "differs": dict(differs)}
            )

    def finish_line(self, round_number: int) -> dict[str, float]:
        """The finished line of metrics of a round; the next one starts empty."""
        line = {"round": round_number, **self._pending}
        self._pending = {}
        return line

    def write(self, line: dict[str, float], loggers: Iterable[Logger]) -> None:
        """Make a finished line of metrics the newest, and give it to the loggers."""
        if self._logging_seconds is not None:
            line["time/logging_s"] = self._logging_seconds  # of the line before: this one is not written yet
        started = time.perf_counter()
        self.metrics = line
        for logger in loggers:
            logger.log_metrics(line, step=int(line["round"]))
        self._logging_seconds = time.perf_counter() - started

    def go_on_with(self, data: dict[str, str], path: str, round_number: int, *, accept: bool) -> bool:
        """Go on with data, and note it where they are others than those of the checkpoint.

        Args:
            data: Digests of the data by name.
            path: The checkpoint.
            round_number: Its round.
            accept: Whether they may be others.

        Returns:
            Whether the checkpoint knows its data; an old one does not.

        Raises:
            OtherData: They are others and may not be.
        """
        trained, self.data = self.data, data
        other: dict[str, list[object]] = {
            f"data.{name}": [trained.get(name), data[name]]
            for name in data
            if trained.get(name) != data[name]
        }
        if trained and other and not accept:
            names = ", ".join(name.removeprefix("data.") for name in other)
            raise OtherData(
                f"data: the checkpoint {path} was trained on other data, these differ in: {names}; use its data and its "
                "seed_everything, or go on with these by --accept_data (in Python: accept_data = True of the module)"
            )
        if trained and other:
            self.continue_from(path, round_number, other)
        return bool(trained)

    def evaluate_on(self, data: FederatedDataModule, split: str, path: str, *, accept: bool) -> bool:
        """Evaluate on data that are drawn from those of the clients, which may be others than those of the checkpoint if accepted.

        Args:
            data: The data.
            split: Which of them, ``"val"`` or ``"test"``.
            path: The checkpoint.
            accept: Whether they may be others.

        Returns:
            Whether the checkpoint knows its data; an old one does not.

        Raises:
            OtherData: They are others and may not be.
        """
        trained, seed = self.data.get("evaluation"), self.description.get("seed_everything")
        if trained is not None and not accept and trained not in data.evaluation_digests():
            remedy = "use its data and its seed_everything"
            if seed is not None and seed != data.seed:
                remedy = f"use its seed_everything: {seed}, where {data.seed} is given"
            words = {"val": "validation", "test": "test"}[split]
            raise OtherData(
                f"data: the checkpoint {path} was trained with other {words} data, and these may hold samples of its training; {remedy}, "
                "or evaluate on these by --accept_data (in Python: accept_data = True of the module)"
            )
        return trained is not None

    def state_dict(self) -> dict[str, Any]:
        """Totals and the newest metrics, as plain numbers."""
        kept = {name: copy(value) for name, value in vars(self).items() if not name.startswith("_")}
        return {"row" if name == "metrics" else name: value for name, value in kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the totals of a checkpoint; one that does not say whether passes were compiled is of a time when they were not."""
        self.compiled = False
        for name, value in state.items():
            setattr(self, "metrics" if name == "row" else name, value)
