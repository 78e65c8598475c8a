"""Recording of a run's rounds. The recording does not affect the method under test."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.cohort.client_memory import contents
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.methods.callback import FederatedCallback
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.plan import RoundPlan
from fl_lightning.testing.federation import Disturbance
from fl_lightning.verification.differences import apart
from fl_lightning.verification.memory import large_of_server, shifted

State = dict[str, Tensor]


@dataclass
class Round:
    """Record of one communication round.

    Attributes:
        number: Number of the round, from 1.
        clients: Client ids of the cohort.
        shares: Expected aggregation weights, ``[C]``: n_i / n, or equal weights.
        treatments: Treatment of each tensor of the model.
        undecided: Treatments whose first round is known only during training, keyed by kind of
            state.
        broadcast: The server's state at the start of the round.
        start: The clients' rows before their first local step, ``[C, *shape]``.
        sent: The clients' rows before aggregation, ``[C, *shape]``.
        aggregated: The server's state after a step of ``SGD(lr=1)`` on the pseudo-gradient.
        corrected: The server's state after a step of ``SGD(lr=1)`` on the pseudo-gradient that
            ``on_after_aggregate`` has corrected.
        server: The server's state at the end of the round.
        memory: The method's ``state_dict`` after the round.
        payload: Result of ``extra_payload``.
        exchanges: Result of ``extra_exchanges``.
        downloads: Number of bytes that the round counts as received, by client.
        loss: Mean training loss.
        metrics: All metrics of the round, except times.
        received: Number of floats in the client optimizer's state that are equal at all clients,
            and not 0, when the round starts. The server must have sent these floats.
        steps: Number of local steps of each client.
        trained: The clients' rows after their last local step, including ``scratch`` buffers.
        losses: The clients' losses, ``[C]``.
        grads: For each local step, a dict with the clients' gradients ``[C, *shape]`` by name.
        late: Text that names an entry of ``cohort.extra`` and a client, if the entry has changed
            after the client's last step. Otherwise empty.
    """

    number: int
    clients: list[int]
    shares: Tensor
    treatments: dict[str, str]
    undecided: dict[str, str]
    broadcast: State
    start: State = field(default_factory=dict)
    sent: State = field(default_factory=dict)
    aggregated: State = field(default_factory=dict)
    corrected: State = field(default_factory=dict)
    server: State = field(default_factory=dict)
    memory: Any = None
    payload: Any = (0, 0)
    exchanges: Any = 0
    downloads: dict[int, int] = field(default_factory=dict)
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    received: int = 0
    steps: list[int] = field(default_factory=list)
    trained: State = field(default_factory=dict)
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    grads: list[State] = field(default_factory=list)
    late: str = ""

    def __str__(self) -> str:
        return f"round {self.number}"

    def row(self, rows: State, client: int) -> State:
        """Return one client's tensors by name.

        ``rows`` are the tensors of all clients: the attribute ``start`` or ``sent``.
        """
        index = self.clients.index(client)
        return {name: value[index] for name, value in rows.items()}


@dataclass
class ScriptedPlan(RoundPlan):
    """Plan of a run whose cohorts are fixed: ``script`` lists the clients of each round."""

    script: Sequence[Sequence[int]] = ()

    def cohort(self, round_number: int) -> list[int]:
        """Return the clients that take part in a round."""
        return list(self.script[round_number - 1])


class ObservedRun(FederatedModule):
    """Run that records its rounds.

    Attributes:
        script: The cohort of each round.
        method: The callback under test, if any.
        error: Exception that stopped the run, if any.
        rounds: Records of the rounds.
        kinds: Kind of state of each persistent tensor of the model.
        disturbance: Change of one client or of the method's memory, if any.
        usual: Rounds of the undisturbed run, if the client replays its messages of that run.
    """

    script: Sequence[Sequence[int]] = ()
    method: FederatedCallback | None
    error: Exception | None = None
    rounds: list[Round]
    disturbance: Disturbance | None = None
    usual: Sequence[Round] = ()

    def names(self, *kinds: str) -> list[str]:
        """Return the names of the model's persistent tensors of these kinds of state."""
        return [name for name, kind in self.kinds.items() if kind in kinds]

    def setup(self, stage: str) -> None:
        """Set up the run with the cohorts in ``script``."""
        super().setup(stage)
        self.plan = ScriptedPlan(
            **{**vars(self.plan), "cohort_size": len(self.script[0])}, script=self.script
        )

    def start_round(self) -> RoundCohort:
        """Start a round, and record the server's state before it."""
        before = self._server_state()
        cohort = super().start_round()
        kinds = {**cohort.parameter_kinds, **cohort.buffer_kinds}
        self.kinds = {name: kind for name, kind in kinds.items() if kind != "scratch"}
        equal = self.weighting == "uniform"
        sizes = [1.0 if equal else float(self.data.num_examples(client)) for client in cohort.client_ids]
        undecided = dict(self.method.undecided()) if self.method is not None else {}
        shares, clients = torch.tensor(sizes).double() / sum(sizes), list(cohort.client_ids)
        self.rounds.append(Round(cohort.round, clients, shares, cohort.treatments, undecided, before))
        return cohort

    def call_hook(self, hook: str, cohort: RoundCohort, *args: int) -> None:
        """Call a hook of all methods, and record the state before and after the hook."""
        seen, step = self.rounds[-1], args[0] if args else 0
        if self.disturbance is not None and self.disturbance.round == cohort.round:
            self._disturb(hook, cohort, self.disturbance)
        if hook == "on_before_aggregate":
            rows = {**cohort.params, **cohort.buffers}
            seen.trained = {name: value.detach().clone() for name, value in rows.items()}
            seen.losses = cohort.losses.clone()
        elif hook == "on_after_aggregate":
            seen.aggregated = self._stepped(cohort)
        done = [row for row, steps in enumerate(cohort.local_steps) if args and steps <= step]
        extra = {name: value[done].clone() for name, value in cohort.extra.items()} if done else {}
        super().call_hook(hook, cohort, *args)
        for name, value in extra.items():
            for row, old in zip(done, value, strict=True):
                if apart(old, cohort.extra[name][row]):
                    seen.late = seen.late or f"{name!r} of client {cohort.client_ids[row]}"
        if hook == "on_after_local_backward":
            seen.grads.append({name: value.clone() for name, value in cohort.grads.items()})
        elif hook == "on_round_start":
            seen.start, seen.steps = self._rows(cohort), list(cohort.local_steps)
            keys = cohort.optimizer_state_keys
            states = [block for key in keys for block in cohort.optimizer_state(key).blocks.values()]
            seen.received = sum(int(((block == block[0]) & (block != 0)).all(0).sum()) for block in states)
        elif hook == "on_before_aggregate":
            seen.sent = self._rows(cohort)
            if self.method is not None:
                seen.payload = self.method.extra_payload(cohort)
                seen.exchanges = self.method.extra_exchanges(cohort)
        elif hook == "on_after_aggregate":
            seen.corrected = self._stepped(cohort)
        elif hook == "on_round_end":
            seen.server = self._server_state()

    def on_train_epoch_end(self) -> None:
        """Record the round's loss, and the method's memory after the round."""
        super().on_train_epoch_end()
        seen = self.rounds[-1]
        seen.downloads = {client: down for client, (_, down) in self.communication.by_client().items()}
        seen.metrics = {name: x for name, x in self.metrics.items() if not name.startswith("time/")}
        seen.loss = float(self.trainer.callback_metrics["train/loss"])
        if self.method is not None:
            seen.memory = deepcopy(contents(self.method.state_dict()))

    def _disturb(self, hook: str, cohort: RoundCohort, change: Disturbance) -> None:
        if hook == "on_round_start" and "memory" in change.what and self.method is not None:
            memory = deepcopy(contents(self.method.state_dict()))
            if large_of_server(memory):
                self.method.load_state_dict(shifted(memory))
            # the server has sent what it has changed
            for name, parameter in cohort.server_parameters.items():
                if name not in cohort.params and apart(self.rounds[0].broadcast[name], parameter.detach()):
                    parameter.detach().add_(0.25)
        if hook != "on_before_aggregate" or change.client not in cohort.client_ids:
            return
        row = cohort.client_ids.index(change.client)
        rows = {**cohort.params, **cohort.buffers}
        changed = [rows[name] for name in self.kinds if cohort.treatments[name] in change.what]
        for key in cohort.optimizer_state_keys if "optimizer" in change.what else []:
            changed += cohort.optimizer_state(key).blocks.values()
        for tensors in changed:
            if tensors.dtype != torch.bool:
                tensors[row] += 0.25 if tensors.is_floating_point() else 100
        for seen in self.usual[change.round - 1 : change.round]:  # replay
            for name, value in seen.row(seen.trained, change.client).items():
                rows[name][row] = value
            cohort.losses[row] = seen.losses[seen.clients.index(change.client)]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Discard the run's output, because ``verify`` prints only the certificate."""

    def _server_state(self) -> State:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def _stepped(self, cohort: Cohort) -> State:
        gradients = cohort.pseudo_gradient.row(0)
        return self._server_state() | {n: cohort.server[n] - gradient for n, gradient in gradients.items()}

    def _rows(self, cohort: Cohort) -> State:
        rows = {**cohort.params, **cohort.buffers}
        return {name: rows[name].detach().clone() for name in self.kinds}
