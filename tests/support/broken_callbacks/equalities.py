"""Broken in a formula, so that an equality of the method does not hold."""

import torch

from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.callbacks import (
    FBN,
    SCAFFOLD,
    FedBN,
    FedProx,
    FedTAN,
    FixBN,
    HybridBN,
    MaintainedMomentum,
    MomentMatching,
    SiloBN,
    StaticBN,
)
from fl_lightning.cohort.cohort import SERVER
from tests.support.broken_callbacks.registry import fails, of_kind


def with_variance(cohort, pl_module, rule):
    """Replace each running variance by a rule of (layer name, value now, value before the round, beta)."""
    for name, layer in batch_norm_layers(pl_module.model).items():
        beta = 1 - (1 - layer.momentum) ** max(cohort.local_steps)
        variance = cohort.server_buffers[f"{name}.running_var"]
        variance.copy_(rule(name, variance, beta))


def values(cohort, layer):
    """How many values per channel each client's BN layer has seen, ``[C]``."""
    return cohort.buffers[f"{layer}.count"].double().reshape(len(cohort), -1)[:, 0]


class RemembersVariance(FBN):
    """FBN that also knows the variances that a round started from."""

    def on_round_start(self, trainer, pl_module, cohort):
        super().on_round_start(trainer, pl_module, cohort)
        self.before = {name: cohort.server_buffers[name].clone() for name in of_kind(cohort, "var")}


@fails("own_twin", "union_statistics")
class LocallyUnbiased(RemembersVariance):
    """K/(K-1) with a client's own number of values, in place of N/(N-1)."""

    def on_round_end(self, trainer, pl_module, cohort):
        super().on_round_end(trainer, pl_module, cohort)

        def rule(name, variance, beta):
            counts = values(cohort, name)
            total, own = counts.sum(), counts.mean()
            past = (1 - beta) * self.before[f"{name}.running_var"]
            return past + (variance - past) * (total - 1) / total * own / (own - 1)

        with_variance(cohort, pl_module, rule)


@fails("own_twin", "union_statistics")
class WithinClientsOnly(FBN):
    """Drops the correction term, the variance between the clients."""

    def on_round_end(self, trainer, pl_module, cohort):
        super().on_round_end(trainer, pl_module, cohort)

        def rule(name, variance, beta):
            counts = values(cohort, name)
            return (counts / counts.sum()) @ cohort.buffers[f"{name}.running_var"]

        with_variance(cohort, pl_module, rule)


@fails("own_twin", "centralised_bn")
class ForwardOnlyTAN(FedTAN):
    """Exchanges statistics and not their gradients, and promises as much as the method that does both."""

    def __init__(self):
        super().__init__(backward="own")
        self.equalities = FedTAN.equalities


@fails("weights_of_fedavg", "fedavg_on_identical_clients", "one_client_is_plain_training", "learning rate 0")
class ShrinksGammas(SiloBN):
    """SiloBN that changes gamma and beta, which it should leave alone."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        super().on_local_step_end(trainer, pl_module, cohort, step)
        for name in of_kind(cohort, "affine"):
            cohort.params[name].mul_(0.99)


@fails("own_twin_when_frozen")
class FreezesBatchStatistics(FixBN):
    """FixBN whose clients scale what they learn by their number in stage II."""

    def __init__(self):
        super().__init__(freeze_round=2)

    def on_round_start(self, trainer, pl_module, cohort):
        super().on_round_start(trainer, pl_module, cohort)
        self.clients = len(cohort)

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        if cohort.policy["mean"] == "frozen":
            for gradients in cohort.grads.blocks.values():
                gradients.mul_(self.clients)


@fails("own_twin_without_bn")
class ClippedMomentum(MaintainedMomentum):
    """Clips each client's gradient, which the union's does not see."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for gradients in cohort.grads.blocks.values():
            gradients.clamp_(-0.05, 0.05)


@fails("fedavg_on_identical_clients", "one_client_is_plain_training", "learning rate 0")
class FedBNTakesOneStepMore(FedBN):
    """FedBN whose clients step gamma and beta twice."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        super().on_local_step_end(trainer, pl_module, cohort, step)
        for name in of_kind(cohort, "affine"):
            cohort.params[name].sub_(0.05 * cohort.grads[name])


@fails("one_client_is_plain_training")
class StopsWithOneClient(FederatedCallback):
    """Trains one client for two rounds, and then says that it does not."""

    equalities = ("one_client_is_plain_training",)

    def on_round_start(self, trainer, pl_module, cohort):
        if len(cohort) == 1 and cohort.round == 3:
            raise ConfigurationError("one client is not enough")


def with_equal_weights(cohort, hook, *arguments):
    """Call a hook of a method under weights 1/n, whatever the clients' sizes."""
    weights, cohort.weights = cohort.weights, torch.full_like(cohort.weights, 1 / len(cohort))
    hook(*arguments, cohort)
    cohort.weights = weights


@fails("one_client_is_two_of_half_its_weight", "moments_of_the_mixture", "pooled weights")
class UnweightedMoments(MomentMatching):
    """Pools statistics with 1/n."""

    def on_round_end(self, trainer, pl_module, cohort):
        with_equal_weights(cohort, super().on_round_end, trainer, pl_module)


@fails("one_client_is_two_of_half_its_weight")
class UnweightedMomentum(MaintainedMomentum):
    """Averages momentum with 1/n."""

    def __init__(self):
        super().__init__("global")

    def on_after_aggregate(self, trainer, pl_module, cohort):
        with_equal_weights(cohort, super().on_after_aggregate, trainer, pl_module)


@fails("one_client_is_two_of_half_its_weight", "server_keeps_the_mean")
class UnweightedVariates(SCAFFOLD):
    """Averages control variates with 1/n."""

    def on_after_aggregate(self, trainer, pl_module, cohort):
        pl_module.usual_weights = lambda cohort: torch.full_like(cohort.weights, 1 / len(cohort))
        super().on_after_aggregate(trainer, pl_module, cohort)
        del pl_module.usual_weights


@fails("server_keeps_the_mean")
class WithoutTheShare(SCAFFOLD):
    """Adds the mean change of the cohort's control variates to c as if the cohort were everyone."""

    def on_after_aggregate(self, trainer, pl_module, cohort):
        before = dict(self.memory.get(SERVER, {}))
        super().on_after_aggregate(trainer, pl_module, cohort)
        kept = {}
        for block, now in self.memory[SERVER].items():
            old = before.get(block, torch.zeros_like(now))
            kept[block] = old + (now - old) / pl_module.weight_share(cohort)
        self.memory[SERVER] = kept


@fails("moments_of_the_mixture")
class MeanOfVariances(MomentMatching):
    """Drops the variance between the clients."""

    def on_round_end(self, trainer, pl_module, cohort):
        super().on_round_end(trainer, pl_module, cohort)
        for name in of_kind(cohort, "var"):
            cohort.server_buffers[name].copy_(cohort.mean(cohort.buffers[name]))


@fails("statistics_of_its_weights")
class MeasuresBeforeTheStep(StaticBN):
    """Measures the statistics of the weights that the round started from."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        super().on_round_end(trainer, pl_module, cohort)

    def on_round_end(self, trainer, pl_module, cohort):
        pass


@fails("statistics_of_its_weights")
class MeasuresOnce(StaticBN):
    """Measures in round 2 alone."""

    def _measure(self, pl_module, round_number):
        if round_number == 2:
            super()._measure(pl_module, round_number)


@fails("proximal_term")
class PushesAway(FedProx):
    """Has the wrong sign."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.mu = -self.mu
        super().on_after_local_backward(trainer, pl_module, cohort, step)
        self.mu = -self.mu


@fails("union_statistics")
class UnweightedPool(FBN):
    """Pools the clients' statistics with 1/n, however many values each has seen."""

    def on_round_end(self, trainer, pl_module, cohort):
        for name in batch_norm_layers(pl_module.model):
            counts = cohort.buffers[f"{name}.count"]
            counts.copy_(counts.double().mean().expand_as(counts))
        super().on_round_end(trainer, pl_module, cohort)


@fails("equal_passes")
class WeighedPass(HybridBN):
    """Pools the statistics of equal passes with n_i / n."""

    def on_round_end(self, trainer, pl_module, cohort):
        counts = cohort.extra["HybridBN samples"]
        counts.mul_(cohort.weights.to(counts) * len(counts))
        super().on_round_end(trainer, pl_module, cohort)
