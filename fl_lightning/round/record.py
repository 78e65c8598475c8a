"""The record of a run: metrics of the current round and totals since round 1."""

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
    """A checkpoint from which a run resumed with changed settings or data.

    Attributes:
        checkpoint: Path of the checkpoint.
        round: The checkpoint's round.
        differs: The old and the new value of each changed setting, by dotted name.
    """

    checkpoint: str
    round: int
    differs: dict[str, list[object]]


class RunRecord:
    """Metrics and totals of a run; saved with its checkpoints.

    Attributes:
        metrics: The metrics of the newest finished round, with ``round``.
        samples: Training samples that clients have processed.
        upload_bytes: Bytes that clients have sent.
        download_bytes: Bytes that clients have received.
        seconds: Time spent in rounds.
        diverged: Whether an aggregated update or an evaluation was ever non-finite.
        diverged_round: The first such round; None if unknown or not diverged.
        not_finite: Number of non-finite updates by client, aggregated or not.
        clients: Rounds, local steps and last mean training loss, by client.
        holders: The clients that have received each frozen block, by the block's name; without blocks
            that are not frozen. The one list of older checkpoints is under ``""``.
        data: Digests of the data, see ``FederatedDataModule.fingerprint``.
        description: The settings that determine results, by dotted name; may be empty.
        computed_by: The executor and other causes of rounding; empty if unknown.
        provenance: The source and versions that computed the run, one entry per change
            (:func:`~fl_lightning.experiments.run_directory.source.provenance`).
        compiled: Whether clients' passes are compiled, None before the decision.
        continued_from: The checkpoints from which the run resumed with changed settings or data.
        acting: The methods that have a policy or wrote to a tensor in this fit; not saved.
    """

    def __init__(self) -> None:
        self.data: dict[str, str] = {}
        self.description: dict[str, object] = {}
        self.computed_by: dict[str, object] = {}
        self.provenance: list[dict[str, str]] = []
        self.compiled: bool | None = None
        self.continued_from: list[Origin] = []
        self.acting: set[str] = set()
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
        """Add a metric of the current round."""
        self._pending[name] = float(value.compute() if isinstance(value, Metric) else value)

    def diverge(self, round_number: int, diverged: bool = True) -> None:
        """Flag the run as diverged in this round if ``diverged``, unless it is flagged already."""
        if diverged and not self.diverged:
            self.diverged, self.diverged_round = True, round_number

    def finish_round(
        self, cohort: RoundCohort, losses: Sequence[float], seconds: float, costs: Mapping[str, float]
    ) -> None:
        """Add a round's clients, losses, time, and bytes by metric to the totals."""
        for client, taken, loss in zip(cohort.client_ids, cohort.local_steps, losses, strict=True):
            rounds, steps, _ = self.clients.get(client, (0, 0, 0.0))
            self.clients[client] = (rounds + 1, steps + taken, loss)
        frozen = [name for name in cohort.block_names if cohort.treatment(name) == "frozen"]
        self.holders = {name: sorted({*self.holding(name), *cohort.client_ids}) for name in frozen}
        self.samples += sum(cohort.samples)
        self.spend(seconds, costs)

    def holding(self, block: str) -> list[int]:
        """Return the clients that have received a frozen block."""
        return self.holders.get(block, self.holders.get("", []))

    def spend(self, seconds: float, costs: Mapping[str, float]) -> None:
        """Add time, and bytes by metric, to the totals."""
        self.seconds += seconds
        self.upload_bytes += int(costs["comm/upload_bytes"])
        self.download_bytes += int(costs["comm/download_bytes"])

    def continue_from(self, checkpoint: str, round_number: int, differs: Mapping[str, list[object]]) -> None:
        """Note that the run resumes with changed settings or data.

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
        """Return a round's line of metrics, and start an empty line."""
        line = {"round": round_number, **self._pending}
        self._pending = {}
        return line

    def write(self, line: dict[str, float], loggers: Iterable[Logger]) -> None:
        """Store a finished line as the newest metrics, and pass it to the loggers."""
        if self._logging_seconds is not None:
            # the time of writing the previous line, as this line is not written yet
            line["time/logging_s"] = self._logging_seconds
        started = time.perf_counter()
        self.metrics = line
        for logger in loggers:
            logger.log_metrics(line, step=int(line["round"]))
        self._logging_seconds = time.perf_counter() - started

    def go_on_with(self, data: dict[str, str], path: str, round_number: int, *, accept: bool) -> bool:
        """Check that a resumed run's data equal the checkpoint's, or note an accepted difference.

        Args:
            data: Digests of the data by name.
            path: Path of the checkpoint.
            round_number: The checkpoint's round.
            accept: Whether the data may differ.

        Returns:
            Whether the checkpoint has digests; old checkpoints have none.

        Raises:
            OtherData: The data differ and ``accept`` is False.
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
                "seed_everything, or resume with these by --accept_data (in Python: accept_data = True of the module)"
            )
        if trained and other:
            self.continue_from(path, round_number, other)
        return bool(trained)

    def evaluate_on(self, data: FederatedDataModule, split: str, path: str, *, accept: bool) -> bool:
        """Check that evaluation data from the clients' samples equal the checkpoint's.

        Args:
            data: The data module.
            split: The evaluation data, ``"val"`` or ``"test"``.
            path: Path of the checkpoint.
            accept: Whether the data may differ.

        Returns:
            Whether the checkpoint has digests; old checkpoints have none.

        Raises:
            OtherData: The data differ and ``accept`` is False.
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
        """Return the totals and the newest metrics."""
        saved = (name for name in vars(self) if not name.startswith("_") and name != "acting")
        public = {name: copy(getattr(self, name)) for name in saved}
        return {"row" if name == "metrics" else name: value for name, value in public.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the totals and the newest metrics of a checkpoint."""
        self.compiled = False  # checkpoints without this entry are older than compilation
        if isinstance(state.get("holders"), list):
            state = {**state, "holders": {"": state["holders"]}}
        for name, value in state.items():
            setattr(self, "metrics" if name == "row" else name, value)
