"""Broken in what is kept of clients, and in what they see of each other."""

from fl_lightning import FederatedCallback, LocalState
from fl_lightning.callbacks import FedBN, MaintainedMomentum
from tests.support.broken_callbacks.registry import fails, of_kind


@fails("absent clients", "client numbers", "clients own state")
class MomentumByRow(MaintainedMomentum):
    """Keys its memory by the row in the cohort, not by the client."""

    def on_round_start(self, trainer, pl_module, cohort):
        self._by_row(super().on_round_start, trainer, pl_module, cohort)

    def on_after_aggregate(self, trainer, pl_module, cohort):
        self._by_row(super().on_after_aggregate, trainer, pl_module, cohort)

    @staticmethod
    def _by_row(hook, trainer, pl_module, cohort):
        clients, cohort.client_ids = cohort.client_ids, list(range(len(cohort)))
        hook(trainer, pl_module, cohort)
        cohort.client_ids = clients


@fails("absent clients")
class FadingMomentum(MaintainedMomentum):
    """Lets every client's memory fade in each round, absent ones' too."""

    def on_after_aggregate(self, trainer, pl_module, cohort):
        super().on_after_aggregate(trainer, pl_module, cohort)
        for client, kept in self.memory.items():
            self.memory[client] = {name: x if name == "steps" else 0.9 * x for name, x in kept.items()}


@fails("local state", "absent clients")
class ForgetfulFedBN(FedBN):
    """Remembers only the clients of the last round."""

    def on_round_start(self, trainer, pl_module, cohort):
        for client in [c for c in self.memory if c >= 0 and c not in cohort.client_ids]:
            del self.memory[client]
        super().on_round_start(trainer, pl_module, cohort)


@fails("local state", "clients own state")
class OverwrittenLocal(FederatedCallback):
    """Says that statistics are local, but clients start from the server's copy."""

    def policy(self, round_number, total_rounds):
        return dict.fromkeys(("mean", "var", "counter"), "local")


@fails("exchange in a round", "ranks", "traffic")
class NeighboursStatistics(FederatedCallback):
    """Gives every client the mean of its rank's clients' statistics in the middle of a round, without declaring an exchange."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        for name in of_kind(cohort, "mean", "var"):
            cohort.buffers[name].copy_(cohort.buffers[name].mean(0).expand_as(cohort.buffers[name]))


@fails("payload", "clients own state", "traffic")
class LeakedMomentum(MaintainedMomentum):
    """Shares momentum through its memory, without declaring what is sent."""

    def __init__(self):
        super().__init__("global")

    def extra_payload(self, cohort):
        return 0, 0


@fails("clients own state")
class KeptDiscarded(FederatedCallback):
    """Says that statistics are reset, but hands them on."""

    def policy(self, round_number, total_rounds):
        return dict.fromkeys(("mean", "var"), "discarded")

    def on_round_end(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "mean", "var"):
            cohort.server_buffers[name].copy_(cohort.mean(cohort.buffers[name]))


@fails("payload", "traffic")
class NegativePayload(FederatedCallback):
    """Sends half a float less."""

    def extra_payload(self, cohort):
        return 0, -0.5


@fails("clients own state")
class CountsTheOthers(LocalState):
    """Scales gradients by the server's copy of the counter, the largest of those that clients keep for themselves."""

    kinds = ("mean", "var", "counter")

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        count = max(int(cohort.server_buffers[name]) for name in of_kind(cohort, "counter"))
        for gradients in cohort.grads.blocks.values():
            gradients /= 1 + count


@fails("clients own state")
class HandsOnDiscardedCounters(FederatedCallback):
    """Says that counters are reset, but hands the largest on."""

    def policy(self, round_number, total_rounds):
        return {"counter": "discarded"}

    def on_round_end(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "counter"):
            cohort.server_buffers[name].copy_(cohort.buffers[name].amax(0))


@fails("exchange in a round")
class LateExchange(FederatedCallback):
    """From round 3 on, gives every client the mean of all clients' weights before it sends its own."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if cohort.round >= 3:
            for weights in cohort.params.blocks.values():
                weights.copy_(cohort.mean(weights).expand_as(weights))


@fails("absent clients")
class FadingNamedMemory(FederatedCallback):
    """Keeps each client's loss under its name, and lets all of them fade."""

    def __init__(self):
        self.memory = {}

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.memory = {name: 0.9 * loss for name, loss in self.memory.items()}
        for client, loss in zip(cohort.client_ids, cohort.losses.tolist(), strict=True):
            self.memory[f"client{client}"] = loss

    def state_dict(self):
        return {"memory": self.memory}

    def load_state_dict(self, state_dict):
        self.memory = state_dict["memory"]


@fails("client numbers")
class MemoryUnderTheNextName(FederatedCallback):
    """Keeps each client's loss under the name of a neighbour in the cohort."""

    def __init__(self):
        self.memory = {}

    def on_before_aggregate(self, trainer, pl_module, cohort):
        for client, loss in zip(cohort.client_ids, cohort.losses.flip(0).tolist(), strict=True):
            self.memory[f"client {client}"] = {"loss": loss}

    def state_dict(self):
        return {"memory": self.memory}

    def load_state_dict(self, state_dict):
        self.memory = state_dict["memory"]


@fails("payload", "clients own state")
class UnderstatedMomentum(MaintainedMomentum):
    """Shares momentum, and declares one float."""

    def __init__(self):
        super().__init__("global")

    def extra_payload(self, cohort):
        return 1, 1


@fails("clients own state")
class UnderstatedUpload(MaintainedMomentum):
    """Shares momentum, and declares what is received and no more than one float of what is sent."""

    def __init__(self):
        super().__init__("global")

    def extra_payload(self, cohort):
        return 1, super().extra_payload(cohort)[1]
