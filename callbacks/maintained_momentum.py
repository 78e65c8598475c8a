"""Maintained momentum: section 7 of Zhong et al., "Making Batch Normalization Great in Federated Deep Learning"."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from torch import Tensor

from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.cohort import SERVER, ClientMemory
from fl_lightning.errors import check_choice
from fl_lightning.round import aggregate

if TYPE_CHECKING:
    from fl_lightning import Cohort, FederatedModule


class MaintainedMomentum(FederatedCallback):
    """Keep the client optimizer's state from one round to the next instead of starting each round from zero.

    Any elementwise optimizer's state is kept: SGD's momentum, Adam's moments with each client's own step count. All of it
    starts from zeros, momentum with ``dampening`` d too: a client's first step ever is ``(1 - d) g``, as in FBN's
    ``q <- 0.99 q + 0.01 g`` from q = 0, where torch's own first step is the whole g. Without this method every round
    begins with torch's.

    Args:
        scope: ``"local"``: each client keeps its own state; absent clients keep theirs untouched. ``"global"``: clients
            send their state after the local steps, the module's aggregator combines it (its mean, with the aggregation
            weights), and every client of the next round starts from that (so state is sent both ways). Momentum of
            parameters that another method keeps local (FedBN's gamma and beta) stays at the client in either scope.

    Raises:
        ConfigurationError: Unknown scope, or a client optimizer without state (SGD without momentum).
    """

    paper = "Zhong et al., arXiv 2303.06530, section 7"
    claims = ("own_twin_without_bn", "one_client_is_two_of_half_its_weight")
    takes: Mapping[str, str] = {"the client optimizer's state": ""}
    examples = ({"scope": "local"}, {"scope": "global"})

    def __init__(self, scope: Literal["local", "global"] = "local") -> None:
        check_choice("MaintainedMomentum.scope", scope, ("local", "global"))
        self.scope = scope
        self.memory = ClientMemory()

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Put the remembered state back."""
        if not cohort.optimizer_state_keys:
            raise ConfigurationError(
                f"MaintainedMomentum: client_optimizer {type(cohort.optimizer).__name__} keeps no state between steps; set "
                "momentum > 0"
            )
        state, steps = _state(cohort), {}
        kept = {owner: self.memory.get(owner, {}) for owner in (SERVER, *cohort.client_ids)}
        for block in cohort.params.blocks:
            owners = [SERVER if self._is_shared(cohort, block) else client for client in cohort.client_ids]
            remembered = [kept[owner] for owner in owners]
            steps[block] = torch.stack([memory.get("steps", torch.tensor(0)) for memory in remembered])
            for name in (name for name, (of, _) in state.items() if of == block):
                for row, memory in zip(state[name][1], remembered, strict=True):
                    if name in memory:
                        row.copy_(memory[name])
        cohort.optimizer_steps = steps

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Remember the state that the clients end with."""
        state = _state(cohort)
        shared = {name: of for name, of in state.items() if self._is_shared(cohort, of[0])}
        own = {name: rows for name, (_, rows) in state.items() if name not in shared}
        steps = {self._is_shared(cohort, block): seen for block, seen in cohort.optimizer_steps.items()}
        if shared:
            found = aggregate(cohort, shared, pl_module.aggregator)
            self._remember(SERVER, {**found, "steps": steps[True].max()})
        for index, client in enumerate(cohort.client_ids if own else []):
            rest = {name: rows[index].clone() for name, rows in own.items()}
            self._remember(client, {**rest, "steps": steps[False][index].clone()})

    def extra_payload(self, cohort: "Cohort") -> tuple[int, int]:
        """Global scope sends the state once up and once down."""
        floats = sum(
            rows.shape[1] for block, rows in _state(cohort).values() if self._is_shared(cohort, block)
        )
        return floats, floats

    def state_dict(self) -> dict[str, Any]:
        """The remembered state by client id (``SERVER``: what the server has combined)."""
        return {"memory": self.memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the remembered state of a checkpoint."""
        self.memory = ClientMemory(state_dict["memory"])

    def _is_shared(self, cohort: "Cohort", block: str) -> bool:
        """Whether a block's state is the server's: not that of parameters that clients keep for themselves."""
        return self.scope == "global" and cohort.treatment(block) != "local"

    def _remember(self, owner: int, state: dict[str, Tensor]) -> None:
        self.memory[owner] = {**self.memory.get(owner, {}), **state}


def _state(cohort: "Cohort") -> dict[str, tuple[str, Tensor]]:
    """What the client optimizer remembers, by a name of its own: the parameter block and the rows ``[C, columns]``."""
    return {
        f"{key}/{block}": (block, rows)
        for key in cohort.optimizer_state_keys
        for block, rows in cohort.optimizer_state(key).blocks.items()
    }
