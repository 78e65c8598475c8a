"""Callbacks that are each wrong in one way, and the lines of a certificate that say so."""

import random

import numpy as np
import torch

from callbacks import FBN, FedBN, FedTAN, FixBN, MaintainedMomentum, SiloBN
from fl_lightning import FederatedCallback
from fl_lightning.batch_norm.layers import batch_norm_layers

FAILS: dict[type[FederatedCallback], set[str]] = {}
"""The lines on which each broken callback fails, no more and no less."""


def fails(*lines):
    """Register a broken callback."""

    def register(cls):
        FAILS[cls] = set(lines)
        return cls

    return register


def of_kind(cohort, *kinds):
    """Names of a cohort's tensors of some kinds."""
    return [name for name, kind in {**cohort.parameter_kinds, **cohort.buffer_kinds}.items() if kind in kinds]


@fails("averaged state")
class UnweightedStatistics(FederatedCallback):
    """Averages statistics with 1/n whatever the clients' sizes."""

    def on_round_end(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "mean", "var"):
            cohort.server_buffers[name].copy_(cohort.buffers[name].mean(0))


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


@fails("resume")
class UnsavedMomentum(MaintainedMomentum):
    """Keeps momentum out of its state_dict."""

    def state_dict(self):
        return {}


@fails("resume")
class UnreadableState(FederatedCallback):
    """Saves an object, which a checkpoint that holds plain tensors and numbers cannot."""

    def state_dict(self):
        return {"history": {np.random.default_rng}}


@fails("absent clients", "client numbers", "clients' own state")
class MomentumByRow(MaintainedMomentum):
    """Keys its memory by the row in the cohort, not by the client."""

    def on_round_start(self, trainer, pl_module, cohort):
        self._by_row(super().on_round_start, trainer, pl_module, cohort)

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self._by_row(super().on_before_aggregate, trainer, pl_module, cohort)

    @staticmethod
    def _by_row(hook, trainer, pl_module, cohort):
        clients, cohort.client_ids = cohort.client_ids, list(range(len(cohort)))
        hook(trainer, pl_module, cohort)
        cohort.client_ids = clients


@fails("absent clients")
class FadingMomentum(MaintainedMomentum):
    """Lets every client's memory fade in each round, absent ones' too."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        super().on_before_aggregate(trainer, pl_module, cohort)
        for kept in self.memory.values():
            for name in kept.keys() - {"steps"}:
                kept[name] = 0.9 * kept[name]


@fails("local state", "absent clients")
class ForgetfulFedBN(FedBN):
    """Remembers only the clients of the last round."""

    def on_round_start(self, trainer, pl_module, cohort):
        for client in [c for c in self.memory if c >= 0 and c not in cohort.client_ids]:
            del self.memory[client]
        super().on_round_start(trainer, pl_module, cohort)


class NoisyGradients(FederatedCallback):
    """Scales all gradients by a number of its own."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for gradients in cohort.grads.blocks.values():
            gradients *= 1 + 0.1 * self.number(pl_module, cohort)


@fails("random numbers", "resume")
class OwnGenerator(NoisyGradients):
    """Draws from a generator that it keeps."""

    def __init__(self):
        self.generator = random.Random(0)

    def number(self, pl_module, cohort):
        return self.generator.random()


@fails("random numbers")
class SavedGenerator(NoisyGradients):
    """The same with a generator whose position is saved: it resumes, but its draws still depend on call order."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def number(self, pl_module, cohort):
        return float(torch.rand(1, generator=self.generator))

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict):
        self.generator.set_state(state_dict["generator"])


@fails("random numbers", "resume")
class GlobalNumpy(NoisyGradients):
    """Draws from numpy's global generator."""

    def number(self, pl_module, cohort):
        return np.random.rand()


@fails("runs repeat")
class Unseeded(NoisyGradients):
    """Draws from the operating system's entropy."""

    def number(self, pl_module, cohort):
        return random.SystemRandom().random()


@fails("runs repeat")
class SharedMemory(MaintainedMomentum):
    """All its objects share one memory, which outlives a run."""

    shared: dict = {}  # noqa: RUF012  # the mistake

    def __init__(self):
        super().__init__()
        self.memory = self.shared

    def state_dict(self):
        return {}


@fails("observers", "random numbers", "clients' own state")
class CountsItsNeighbours(NoisyGradients):
    """Does something else where another callback runs beside it."""

    def number(self, pl_module, cohort):
        return len(pl_module.federated_callbacks)


@fails("client numbers")
class FirstClientCounts(NoisyGradients):
    """Treats client 0 differently."""

    def number(self, pl_module, cohort):
        return float(0 in cohort.client_ids)


@fails("sequential = vectorised", "vectorised in blocks")
class CountsForwardCalls(NoisyGradients):
    """A forward hook counts calls: one per client, or one per block."""

    def configure_batch_norm(self, pl_module):
        self.calls = 0
        self.handle = pl_module.model[0].register_forward_hook(self._count)

    def _count(self, module, inputs, outputs):
        self.calls += 1

    def number(self, pl_module, cohort):
        calls, self.calls = self.calls, 0
        return calls * len(cohort)

    def on_round_start(self, trainer, pl_module, cohort):
        self.calls = 0

    def on_fit_end(self, trainer, pl_module):
        self.handle.remove()


@fails("model comes back")
class LeavesMomentum(FederatedCallback):
    """Sets the BN layers' momentum and leaves it so."""

    def configure_batch_norm(self, pl_module):
        for layer in batch_norm_layers(pl_module.model).values():
            layer.momentum = 0.5


@fails("counters")
class AveragedCounter(FederatedCallback):
    """Averages the counter as a float."""

    def on_round_end(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "counter"):
            cohort.server_buffers[name].copy_(cohort.mean(cohort.buffers[name].double()))


@fails("frozen state")
class DriftingStatistics(FixBN):
    """Averages frozen statistics all the same, which is no longer bitwise what was frozen."""

    def __init__(self):
        super().__init__(freeze_round=2)

    def on_round_end(self, trainer, pl_module, cohort):
        if cohort.policy["var"] == "frozen":
            for name in of_kind(cohort, "var"):
                cohort.server_buffers[name].mul_(1 + 1e-12)


@fails("frozen state")
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


@fails("local state", "clients' own state")
class OverwrittenLocal(FederatedCallback):
    """Says that statistics are local, but clients start from the server's copy."""

    def policy(self, round_number, total_rounds):
        return dict.fromkeys(("mean", "var", "counter"), "local")


@fails("exchange in a round")
class NeighboursStatistics(FederatedCallback):
    """Gives every client the mean of all clients' statistics in the middle of a round, without declaring an exchange."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        for name in of_kind(cohort, "mean", "var"):
            cohort.buffers[name].copy_(cohort.mean(cohort.buffers[name]).expand_as(cohort.buffers[name]))


@fails("clients' own state")
class LeakedMomentum(MaintainedMomentum):
    """Shares momentum through its memory, without declaring what is sent."""

    def __init__(self):
        super().__init__("global")

    def extra_payload(self, cohort):
        return 0, 0


@fails("clients' own state")
class KeptReset(FederatedCallback):
    """Says that statistics are reset, but hands them on."""

    def policy(self, round_number, total_rounds):
        return dict.fromkeys(("mean", "var"), "reset")

    def on_round_end(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "mean", "var"):
            cohort.server_buffers[name].copy_(cohort.mean(cohort.buffers[name]))


@fails("pooled state")
class NeverPooled(FederatedCallback):
    """Says that it aggregates statistics itself, and does not."""

    def policy(self, round_number, total_rounds):
        return {"mean": "pooled", "var": "pooled"}


@fails("variances")
class NegativeVariance(FederatedCallback):
    """Overshoots: the server's variance goes below zero."""

    def policy(self, round_number, total_rounds):
        return {"var": "pooled"}

    def on_round_end(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "var"):
            cohort.server_buffers[name].sub_(10 * cohort.mean(cohort.buffers[name]))


@fails("payload")
class NegativePayload(FederatedCallback):
    """Sends half a float less."""

    def extra_payload(self, cohort):
        return 0, -0.5


@fails("trains")
class Idle(FederatedCallback):
    """Throws away what clients have learned."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        for name, rows in cohort.params.items():
            rows.copy_(cohort.server[name].expand_as(rows))


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
