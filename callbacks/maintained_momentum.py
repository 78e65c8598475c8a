"""Maintained momentum: section 7 of Zhong et al., "Making Batch Normalization Great in Federated Deep Learning"."""

from typing import Literal

import lightning as L
import torch
from torch import Tensor

from fl_lightning import Cohort, ConfigurationError, FederatedCallback, FederatedModule
from fl_lightning.cohort import SERVER, ClientMemory, is_finite
from fl_lightning.round import aggregate


class MaintainedMomentum(FederatedCallback):
    """Maintained momentum: the client optimizers' state is kept between rounds.

    The method keeps the state of any elementwise optimizer, such as SGD's momentum, or Adam's
    moments and step counts. All state starts from zeros.

    For SGD with ``dampening`` d, the momentum after the first gradient g is therefore
    ``(1 - d) g``; in torch, it would be g. The FBN paper also starts the momentum
    ``q <- 0.99 q + 0.01 g`` from q = 0. Without this method, the momentum is g after the first step
    of every round.

    Args:
        scope: ``"local"``: each client keeps a separate state, also in rounds without this client.
            ``"global"``: clients send their states after the local steps, and the module's
            aggregator (default: weighted mean) combines the states. Every client of the next round
            starts from the result. In both scopes, the momentum of local parameters, such as
            FedBN's gamma and beta, stays at the client.

    Raises:
        ConfigurationError: The scope is unknown, or the client optimizer has no state (SGD without
            momentum).

    Example:
        >>> from functools import partial
        >>> from fl_lightning.testing import SGD, blobs, small_cnn, train
        >>> momentum = partial(SGD, momentum=0.9)
        >>> kept, restarted = (
        ...     train(small_cnn(), blobs(), rounds=2, callbacks=method, client_optimizer=momentum)
        ...     for method in ([MaintainedMomentum()], [])
        ... )
        >>> bool((kept["8.weight"] == restarted["8.weight"]).all())
        False
    """

    paper = "Zhong et al., arXiv 2303.06530, section 7"
    equalities = ("own_twin_without_bn", "one_client_is_two_of_half_its_weight")
    takes = ("the client optimizer's state",)
    saved = ("memory",)
    examples = ({"scope": "local"}, {"scope": "global"})

    def __init__(self, scope: Literal["local", "global"] = "local") -> None:
        self.scope = scope
        self.memory = ClientMemory()

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Give each client's optimizer the state from earlier rounds."""
        if not cohort.optimizer_state_keys:
            raise ConfigurationError(
                f"MaintainedMomentum: client_optimizer {type(cohort.optimizer).__name__} keeps no state between steps; set "
                "momentum > 0"
            )
        state, steps = _state(cohort), {}
        memories = {owner: self.memory.get(owner, {}) for owner in (SERVER, *cohort.client_ids)}
        for block in cohort.params.blocks:
            owners = [SERVER if self._is_shared(cohort, block) else client for client in cohort.client_ids]
            remembered = [memories[owner] for owner in owners]
            steps[block] = torch.stack([memory.get("steps", torch.tensor(0)) for memory in remembered])
            for name in (name for name, (of, _) in state.items() if of == block):
                for row, memory in zip(state[name][1], remembered, strict=True):
                    if name in memory:
                        row.copy_(memory[name])
        cohort.optimizer_steps = steps

    def on_after_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Store the optimizers' states. A state that is not finite does not replace the old one."""
        state = _state(cohort)
        shared = {name: of for name, of in state.items() if self._is_shared(cohort, of[0])}
        local = {name: rows for name, (_, rows) in state.items() if name not in shared}
        steps = {self._is_shared(cohort, block): seen for block, seen in cohort.optimizer_steps.items()}
        if shared:
            combined = {**aggregate(cohort, shared, pl_module.aggregator), "steps": steps[True].max()}
            if is_finite(combined):
                self.memory[SERVER] = {**self.memory.get(SERVER, {}), **combined}
        if local:
            cohort.store_vectors(self.memory, {**local, "steps": steps[False]})

    def extra_payload(self, cohort: Cohort) -> tuple[int, int]:
        """Return the numbers of floats that a client sends and receives for the global state."""
        floats = sum(
            rows.shape[1] for block, rows in _state(cohort).values() if self._is_shared(cohort, block)
        )
        return floats, floats

    def _is_shared(self, cohort: Cohort, block: str) -> bool:
        """Return whether the server keeps a block's state.

        In global scope, the server keeps the state of all blocks except local parameters.
        """
        return self.scope == "global" and cohort.treatment(block) != "local"


def _state(cohort: Cohort) -> dict[str, tuple[str, Tensor]]:
    """Return the client optimizer's state by name.

    Each value is the name of a block and the block's rows ``[C, columns]``.
    """
    return {
        f"{key}/{block}": (block, rows)
        for key in cohort.optimizer_state_keys
        for block, rows in cohort.optimizer_state(key).blocks.items()
    }
