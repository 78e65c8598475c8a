"""Broken in that clients on other ranks are forgotten, each with the form that is right beside it."""

import os

import torch

from fl_lightning import FederatedCallback
from tests.support.broken_callbacks.registry import fails, of_kind

RIGHT: list[type[FederatedCallback]] = []
"""The same methods as they should be: nothing is wrong with them."""


def right(cls):
    """Register the right form of a broken callback."""
    RIGHT.append(cls)
    return cls


class GradientNorms(FederatedCallback):
    """Gives the server the clients' mean squared gradient over the local steps of a round."""

    def __init__(self):
        self.mean = torch.zeros(())

    def norms(self, cohort):
        return sum(block.square().sum(1) for block in cohort.grads.blocks.values())

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


@fails("ranks")
class SumOnSelf(GradientNorms):
    """Keeps a sum over its clients on ``self``."""

    def on_round_start(self, trainer, pl_module, cohort):
        self.sum = 0.0

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.sum = self.sum + self.norms(cohort).sum()

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.mean = self.sum / len(cohort)


@fails("ranks")
class RowsOfTheWholeCohort(GradientNorms):
    """Keeps a sum for each client on ``self``, and adds to all where a rank has some."""

    def on_round_start(self, trainer, pl_module, cohort):
        self.sums = torch.zeros(len(cohort)).double()

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.sums += self.norms(cohort)

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.mean = cohort.mean(self.sums)


@right
class SumsInExtra(GradientNorms):
    """Keeps a sum for each client where ranks tell each other."""

    def on_round_start(self, trainer, pl_module, cohort):
        cohort.extra["gradient norms"] = torch.zeros(len(cohort)).double()

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        cohort.extra["gradient norms"] += self.norms(cohort)

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.mean = cohort.mean(cohort.extra["gradient norms"])


@fails("ranks")
class DrawsByRow(FederatedCallback):
    """Draws for all its rows at once: what a client gets depends on the row that it has on its rank."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for gradients in cohort.grads.blocks.values():
            gradients *= 1 + 0.1 * torch.rand(len(cohort), 1)


@right
class DrawsByClient(FederatedCallback):
    """Draws from the generator of each client."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for row, generator in enumerate(cohort.generators("scale")):
            for gradients in cohort.grads.blocks.values():
                gradients[row] *= 1 + 0.1 * torch.rand(1, generator=generator)


class PoolsVariances(FederatedCallback):
    """Pools variances itself: the largest of the clients'."""

    def policy(self, round_number, total_rounds):
        return {"var": "pooled"}

    def pool(self, cohort):
        for name in of_kind(cohort, "var") if len(cohort) else ():
            cohort.server_buffers[name].copy_(cohort.buffers[name].amax(0))


@fails("ranks", "traffic")
class PoolsInLocalSteps(PoolsVariances):
    """Changes the server's model in local steps, each rank by its own clients."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.pool(cohort)


@right
class PoolsAtTheEnd(PoolsVariances):
    """Changes it after the server's step."""

    def on_round_end(self, trainer, pl_module, cohort):
        self.pool(cohort)


class Shares(FederatedCallback):
    """Divides gradients by the number of clients."""

    def divide(self, cohort, clients):
        for gradients in cohort.grads.blocks.values():
            gradients /= clients


@fails("ranks")
class CountsItsRows(Shares):
    """Takes the clients of its rank for the cohort."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.divide(cohort, len(cohort))


@right
class CountsTheCohort(Shares):
    """Counts where the whole cohort is there."""

    def on_round_start(self, trainer, pl_module, cohort):
        self.clients = len(cohort)

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.divide(cohort, self.clients)


@fails("ranks")
class NamesTheProcess(FederatedCallback):
    """Remembers the number of its process."""

    process = 0

    def on_round_end(self, trainer, pl_module, cohort):
        self.process = os.getpid()

    def state_dict(self):
        return {"process": self.process}

    def load_state_dict(self, state):
        self.process = state["process"]
