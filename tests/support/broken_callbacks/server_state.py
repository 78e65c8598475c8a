"""Broken in what becomes of the server's state."""

from fl_lightning import FederatedCallback
from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.callbacks import FixBN, SlidingWindowFixBN
from tests.support.broken_callbacks.registry import fails, of_kind


@fails("server state")
class UnweightedStatistics(FederatedCallback):
    """Averages statistics with 1/n whatever the clients' sizes."""

    def on_round_end(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "mean", "var"):
            cohort.server_buffers[name].copy_(cohort.buffers[name].mean(0))


@fails("model comes back")
class LeavesMomentum(FederatedCallback):
    """Sets the BN layers' momentum and leaves it so."""

    def configure_batch_norm(self, pl_module):
        for layer in batch_norm_layers(pl_module.model).values():
            layer.momentum = 0.5


@fails("server state")
class AveragedCounter(FederatedCallback):
    """Averages the counter as a float."""

    def on_round_end(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "counter"):
            cohort.server_buffers[name].copy_(cohort.mean(cohort.buffers[name].double()))


@fails("frozen state", "traffic")
class DriftingStatistics(FixBN):
    """Averages frozen statistics all the same, which is no longer bitwise what was frozen."""

    def __init__(self):
        super().__init__(freeze_round=2)

    def on_round_end(self, trainer, pl_module, cohort):
        if cohort.policy["var"] == "frozen":
            for name in of_kind(cohort, "var"):
                cohort.server_buffers[name].mul_(1 + 1e-12)


@fails("frozen state", "learning rate 0")
class DecayedFrozenParameters(FixBN):
    """Lets weight decay shrink frozen gammas at the clients."""

    def __init__(self):
        super().__init__(freeze_round=2, freeze="both")

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        if cohort.policy["affine"] == "frozen":
            for name in of_kind(cohort, "affine"):
                cohort.params[name].mul_(1 - 0.05 * 0.01)


@fails("frozen state")
class DecayedAtTheServer(FixBN):
    """Lets the server optimizer's weight decay shrink frozen gammas."""

    def __init__(self):
        super().__init__(freeze_round=2, freeze="both")

    def on_round_end(self, trainer, pl_module, cohort):
        settings = pl_module.optimizers().param_groups[0]
        if cohort.policy["affine"] == "frozen":
            for name in of_kind(cohort, "affine"):
                cohort.server_parameters[name].detach().mul_(1 - settings["lr"] * settings["weight_decay"])


@fails("server optimizer")
class SteppedStatistics(FederatedCallback):
    """Passes statistics through the server optimizer's learning rate."""

    def on_round_start(self, trainer, pl_module, cohort):
        self.before = {name: cohort.server_buffers[name].clone() for name in of_kind(cohort, "mean", "var")}

    def on_round_end(self, trainer, pl_module, cohort):
        rate = pl_module.optimizers().param_groups[0]["lr"]
        for name, before in self.before.items():
            buffer = cohort.server_buffers[name]
            buffer.copy_(before - rate * (before - buffer))


@fails("server state")
class NeverPooled(FederatedCallback):
    """Says that it aggregates statistics itself, and does not."""

    def policy(self, round_number, total_rounds):
        return {"mean": "pooled", "var": "pooled"}


@fails("trains")
class NegativeVariance(FederatedCallback):
    """Overshoots: the server's variance goes below zero."""

    def policy(self, round_number, total_rounds):
        return {"var": "pooled"}

    def on_round_end(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "var"):
            cohort.server_buffers[name].sub_(10 * cohort.mean(cohort.buffers[name]))


@fails("trains")
class Idle(FederatedCallback):
    """Throws away what clients have learned."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        for name, rows in cohort.params.items():
            rows.copy_(cohort.server[name].expand_as(rows))


class ShrinkingStatistics(FederatedCallback):
    """Shrinks the server's running variances in one of Lightning's hooks, between two rounds."""

    @staticmethod
    def shrink(pl_module):
        for layer in batch_norm_layers(pl_module.model).values():
            layer.running_var.mul_(0.9)


@fails("between rounds")
class ShrinksBeforeTheRound(ShrinkingStatistics):
    """Before the broadcast."""

    def on_train_epoch_start(self, trainer, pl_module):
        self.shrink(pl_module)


@fails("between rounds")
class ShrinksBeforeTheBatch(ShrinkingStatistics):
    """Just before the broadcast, from some round on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if pl_module.round == 3:
            self.shrink(pl_module)


@fails("between rounds")
class ShrinksAfterTheRound(ShrinkingStatistics):
    """After the round's end."""

    def on_train_epoch_end(self, trainer, pl_module):
        self.shrink(pl_module)


@fails("between rounds")
class ShrinksInEvaluation(ShrinkingStatistics):
    """When the server is evaluated."""

    def on_validation_epoch_end(self, trainer, pl_module):
        self.shrink(pl_module)


@fails("server state")
class ShrinksInTheServerStep(ShrinkingStatistics):
    """In the hook of the server step."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.shrink(pl_module)


@fails("frozen state")
class EvaluatesInSecret(FederatedCallback):
    """Normalises with the running statistics from round 3 on, and says nothing of it."""

    def on_round_start(self, trainer, pl_module, cohort):
        for layer in batch_norm_layers(pl_module.model).values():
            layer.train(cohort.round < 3)


@fails("frozen state")
class KeepsOneClientsStatistics(FederatedCallback):
    """Gives the client with the smallest loss back the running statistics that it received."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "mean", "var"):
            cohort.buffers[name][cohort.losses.argmin()] = cohort.server_buffers[name]


@fails("frozen state")
class FreezesOneRoundEarly(FixBN):
    """Normalises with the running statistics in round T* already."""

    def __init__(self):
        super().__init__(freeze_round=2)

    def on_round_start(self, trainer, pl_module, cohort):
        super().on_round_start(trainer, pl_module, cohort)
        for layer in batch_norm_layers(pl_module.model).values():
            layer.train(cohort.round < 2)


@fails("frozen state", "own_twin_when_frozen")
class FreezesOneRoundLate(FixBN):
    """Trains with batch statistics in the first round after T*, too."""

    def __init__(self):
        super().__init__(freeze_round=2)

    def on_round_start(self, trainer, pl_module, cohort):
        super().on_round_start(trainer, pl_module, cohort)
        for layer in batch_norm_layers(pl_module.model).values():
            layer.train(cohort.round < 4)


@fails("frozen state")
class SaysOneRoundLate(FixBN):
    """Has a policy that begins one round later than its setting, half of the rounds, says."""

    def last_batch_round(self, total_rounds):
        return super().last_batch_round(total_rounds) + 1


@fails("first stage")
class LogsItsRound(FixBN):
    """Logs T* from the first round on, which other runs share."""

    same_until = FixBN.same_until

    def on_round_start(self, trainer, pl_module, cohort):
        pl_module.log("fixbn/freeze_round", float(self.last_batch_round(pl_module.planned_rounds)))


@fails("first stage")
class SharesTooMuch(FixBN):
    """Declares a round more than it has in common with FedAvg."""

    def same_until(self, total_rounds):
        return super().same_until(total_rounds) + 1


@fails("first stage", "own_twin_when_frozen")
class ActsBeforeItsRound(FixBN):
    """Forgets that other runs share the first rounds, and clips gradients in them."""

    same_until = FixBN.same_until

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for gradients in cohort.grads.blocks.values():
            gradients.clamp_(-0.1, 0.1)


@fails("frozen state")
class FindsOneRoundLate(SlidingWindowFixBN):
    """Freezes one round after the one that it has found."""

    def __init__(self):
        super().__init__(2, 1e9)

    def last_batch_round(self, total_rounds):
        return None if self.freeze_round is None else self.freeze_round + 1
