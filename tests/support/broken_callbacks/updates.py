"""Broken in what a client starts from, what it does in a step, and what it sends."""

import torch

from fl_lightning import FederatedCallback
from fl_lightning.callbacks import SCAFFOLD
from tests.support.broken_callbacks.registry import fails, of_kind


@fails("learning rate 0")
class SendsUpdates(FederatedCallback):
    """Sends updates in place of weights, which are never added to the server's."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        for name, rows in cohort.params.items():
            rows.sub_(0.5 * cohort.server[name])


@fails("learning rate 0")
class OwnStep(FederatedCallback):
    """Takes its own step with a fixed learning rate, deaf to schedule and client optimizer."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for row, steps in enumerate(cohort.local_steps):
            if step < steps:
                for block, gradients in cohort.grads.blocks.items():
                    cohort.params.blocks[block][row] -= 0.05 * gradients[row]


@fails("learning rate 0")
class SinglePrecision(FederatedCallback):
    """Rounds what clients send through float32 in a run in float64."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        for block in cohort.params.blocks.values():
            block.copy_(block.float())


@fails("pooled weights")
class PoolsWithoutWeights(FederatedCallback):
    """Pools statistics, and counts every client alike."""

    def policy(self, round_number, total_rounds):
        return {"mean": "pooled", "var": "pooled"}

    def on_round_end(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "mean", "var"):
            cohort.server_buffers[name].copy_(cohort.buffers[name].mean(0))


@fails("one broadcast")
class ForgetsBatches(FederatedCallback):
    """Sets the batch counters to 0 before they are sent."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "counter"):
            cohort.buffers[name].zero_()


@fails("one broadcast")
class KeepsAveragedAffine(FederatedCallback):
    """Gives clients back gamma and beta of their last round, and declares them averaged."""

    def __init__(self):
        self.memory = {}

    def on_round_start(self, trainer, pl_module, cohort):
        for row, client in enumerate(cohort.client_ids):
            for name, value in self.memory.get(client, {}).items():
                cohort.params[name][row] = value

    def on_before_aggregate(self, trainer, pl_module, cohort):
        for row, client in enumerate(cohort.client_ids):
            self.memory[client] = {
                name: cohort.params[name][row].clone() for name in of_kind(cohort, "affine")
            }

    def state_dict(self):
        return {"memory": self.memory}

    def load_state_dict(self, state):
        self.memory = state["memory"]


@fails("done clients")
class CountsEveryStep(FederatedCallback):
    """Counts the steps of the busiest client for all clients."""

    def on_round_start(self, trainer, pl_module, cohort):
        cohort.extra["steps"] = torch.zeros(len(cohort))

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        cohort.extra["steps"] += 1


@fails("traffic")
class SilentVariates(SCAFFOLD):
    """Exchanges control variates as large as the model, and says nothing of it."""

    def extra_payload(self, cohort):
        return 0, 0


@fails("traffic")
class SilentDownload(SCAFFOLD):
    """Declares what clients send, and not what they receive."""

    def extra_payload(self, cohort):
        return super().extra_payload(cohort)[0], 0


@fails("traffic")
class SilentMomentum(FederatedCallback):
    """Sends the server's momentum, which it keeps by the names of the parameters, and says nothing of it."""

    def __init__(self):
        self.sums = {}

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for name, momentum in self.sums.items():
            cohort.grads[name].add_(momentum, alpha=0.1)

    def on_after_aggregate(self, trainer, pl_module, cohort):
        for name, gradient in cohort.pseudo_gradient.items():
            self.sums[name] = 0.9 * self.sums.get(name, 0) + gradient

    def state_dict(self):
        return {"sums": self.sums}

    def load_state_dict(self, state):
        self.sums = state["sums"]


@fails("traffic")
class SilentFactors(FederatedCallback):
    """Rewrites gamma of a layer that is not trained, which clients have in their forward passes."""

    def on_round_end(self, trainer, pl_module, cohort):
        for name, value in cohort.server_parameters.items():
            if name not in cohort.params:
                value.mul_(1 + 0.1 * cohort.round)


@fails("traffic")
class SilentStart(FederatedCallback):
    """Says that statistics are reset, and gives clients others than the server's to start from."""

    def policy(self, round_number, total_rounds):
        return dict.fromkeys(("mean", "var"), "discarded")

    def on_round_start(self, trainer, pl_module, cohort):
        for name in of_kind(cohort, "mean"):
            cohort.buffers[name].fill_(cohort.round)


@fails("fresh noise")
class OneNoiseARound(FederatedCallback):
    """Draws a client's noise once a round, and adds it in each local step."""

    def on_round_start(self, trainer, pl_module, cohort):
        generators = cohort.generators("noise")
        for block, rows in cohort.params.blocks.items():
            draws = [torch.randn(rows.shape[1], generator=g, dtype=rows.dtype) for g in generators]
            cohort.extra[block] = torch.stack(draws)

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for block, gradients in cohort.grads.blocks.items():
            gradients += 0.01 * cohort.extra[block]


@fails("fresh noise")
class OneNoiseForAllClients(FederatedCallback):
    """Draws one noise for each local step, which all clients add."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for gradients in cohort.grads.blocks.values():
            gradients[cohort.active_rows()] += 0.01 * torch.randn(gradients.shape[1], dtype=gradients.dtype)
