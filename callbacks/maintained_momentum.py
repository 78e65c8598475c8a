"""Maintained momentum: section 7 of Zhong et al., "Making Batch Normalization Great in Federated Deep Learning"."""

from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from torch import Tensor

from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.errors import check_choice

if TYPE_CHECKING:
    from fl_lightning import Cohort, FederatedModule


class MaintainedMomentum(FederatedCallback):
    """Keep the client optimizer's state from one round to the next instead of starting each round from zero.

    Any elementwise optimizer's state is kept: SGD's momentum, Adam's moments with each client's own step count.

    Args:
        scope: ``"local"``: each client keeps its own state; absent clients keep theirs untouched. ``"global"``: clients
            send their state after the local steps, the server averages it with the aggregation weights, and every
            client of the next round starts from the average (so state is sent both ways). Momentum of parameters that
            another method keeps local (FedBN's gamma and beta) stays at the client in either scope.

    Raises:
        ConfigurationError: Unknown scope, or a client optimizer without state (SGD without momentum).
    """

    paper = "Zhong et al., arXiv 2303.06530, section 7"
    keeps_optimizer_state = True
    claims = ("own_twin_without_bn",)
    examples = ({"scope": "local"}, {"scope": "global"})

    def __init__(self, scope: Literal["local", "global"] = "local") -> None:
        check_choice("MaintainedMomentum.scope", scope, ("local", "global"))
        self.scope = scope
        self.memory: dict[int, dict[str, Tensor]] = {}

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Put the remembered state back."""
        if not cohort.optimizer_state_keys:
            raise ConfigurationError(
                f"MaintainedMomentum: client_optimizer {type(cohort.optimizer).__name__} keeps no state between steps; set "
                "momentum > 0"
            )
        shared = self.memory.get(-1, {})
        remembered = [{**shared, **self.memory.get(client, {})} for client in cohort.client_ids]
        for key in cohort.optimizer_state_keys:
            for block, rows in cohort.optimizer_state(key).blocks.items():
                for row, memory in zip(rows, remembered, strict=True):
                    if f"{key}/{block}" in memory:
                        row.copy_(memory[f"{key}/{block}"])
        steps = [int(memory.get("steps", torch.tensor(0))) for memory in remembered]
        cohort.optimizer_steps = torch.tensor(steps)

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Remember the state that the clients end with."""
        blocks = {
            f"{key}/{block}": rows
            for key in cohort.optimizer_state_keys
            for block, rows in cohort.optimizer_state(key).blocks.items()
        }
        shared = {name: rows for name, rows in blocks.items() if self._is_shared(cohort, name)}
        own = {name: rows for name, rows in blocks.items() if name not in shared}
        if shared:
            average = {name: cohort.mean(rows) for name, rows in shared.items()}
            self._remember(-1, {**average, "steps": cohort.optimizer_steps.max()})
        for index, client in enumerate(cohort.client_ids if own else []):
            steps = {} if shared else {"steps": cohort.optimizer_steps[index]}
            self._remember(client, {name: rows[index].clone() for name, rows in own.items()} | steps)

    def extra_payload(self, cohort: "Cohort") -> tuple[int, int]:
        """Global scope sends the state once up and once down."""
        floats = sum(
            rows.shape[1]
            for key in cohort.optimizer_state_keys
            for block, rows in cohort.optimizer_state(key).blocks.items()
            if self._is_shared(cohort, f"{key}/{block}")
        )
        return floats, floats

    def state_dict(self) -> dict[str, Any]:
        """The remembered state by client id (-1: the server's average)."""
        return {"memory": self.memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the remembered state of a checkpoint."""
        self.memory = state_dict["memory"]

    def _is_shared(self, cohort: "Cohort", name: str) -> bool:
        """Whether a state ``"<key>/<block>"`` is the server's: not that of parameters that clients keep for themselves."""
        return self.scope == "global" and cohort.treatment(name.partition("/")[2]) != "local"

    def _remember(self, owner: int, state: dict[str, Tensor]) -> None:
        self.memory.setdefault(owner, {}).update(state)
