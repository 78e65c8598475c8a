"""Broken in a formula, so that a claim of the method does not hold."""

from broken_callbacks.registry import fails, of_kind
from callbacks import FBN, FedBN, FedTAN, FixBN, MaintainedMomentum, SiloBN
from fl_lightning.batch_norm.layers import batch_norm_layers


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
    """Exchanges statistics and not their gradients, and claims as much as the method that does both."""

    def __init__(self):
        super().__init__(backward="own")
        self.claims = FedTAN.claims


@fails("weights_of_fedavg", "fedavg_on_identical_clients", "one_client_is_plain_training")
class ShrinksGammas(SiloBN):
    """SiloBN that changes gamma and beta, which it should leave alone."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        super().on_local_step_end(trainer, pl_module, cohort, step)
        for name in of_kind(cohort, "affine"):
            cohort.params[name].mul_(0.99)


@fails("own_twin_when_frozen")
class FreezesBatchStatistics(FixBN):
    """FixBN whose clients scale what they learn by their size in stage II."""

    def __init__(self):
        super().__init__(freeze_round=2)

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        if cohort.policy["mean"] == "frozen":
            for gradients in cohort.grads.blocks.values():
                gradients.mul_(len(cohort))


@fails("own_twin_without_bn")
class ClippedMomentum(MaintainedMomentum):
    """Clips each client's gradient, which the union's does not see."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for gradients in cohort.grads.blocks.values():
            gradients.clamp_(-0.05, 0.05)


@fails("fedavg_on_identical_clients", "one_client_is_plain_training")
class FedBNTakesOneStepMore(FedBN):
    """FedBN whose clients step gamma and beta twice."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        super().on_local_step_end(trainer, pl_module, cohort, step)
        for name in of_kind(cohort, "affine"):
            cohort.params[name].sub_(0.05 * cohort.grads[name])
