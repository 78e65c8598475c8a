"""Broken in that equal runs end differently."""

import random

import numpy as np
import torch

from fl_lightning import FederatedCallback
from fl_lightning.callbacks import MaintainedMomentum
from tests.support.broken_callbacks.registry import fails


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


class NoisyGradients(FederatedCallback):
    """Scales all gradients by a number of its own."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for gradients in cohort.grads.blocks.values():
            gradients *= 1 + 0.1 * self.number(pl_module, cohort)


@fails("observers", "resume")
class OwnGenerator(NoisyGradients):
    """Draws from a generator that it keeps."""

    def __init__(self):
        self.generator = random.Random(0)

    def number(self, pl_module, cohort):
        return self.generator.random()


@fails("observers")
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


@fails("observers", "resume")
class UnsavedGenerator(NoisyGradients):
    """Draws from a generator that no checkpoint contains."""

    def on_fit_start(self, trainer, pl_module):
        self.generator = np.random.default_rng(0)

    def on_round_start(self, trainer, pl_module, cohort):
        self.drawn = self.generator.random()

    def number(self, pl_module, cohort):
        return self.drawn


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


@fails("observers")
class CountsItsNeighbours(NoisyGradients):
    """Does something else where another callback runs beside it."""

    def number(self, pl_module, cohort):
        return len(pl_module.federated_callbacks)


@fails("client numbers")
class FirstClientCounts(FederatedCallback):
    """Treats client 0 differently."""

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for row in (row for row, client in enumerate(cohort.client_ids) if client == 0):
            for gradients in cohort.grads.blocks.values():
                gradients[row] *= 1.1


@fails("executors")
class CountsForwardCalls(NoisyGradients):
    """A forward hook counts calls for each client: one, or one per block."""

    def configure_batch_norm(self, pl_module):
        self.calls = 0
        self.handle = pl_module.model[0].register_forward_hook(self._count)

    def _count(self, module, inputs, outputs):
        self.calls += 1

    def number(self, pl_module, cohort):
        calls, self.calls = self.calls, 0
        return calls / max(1, len(cohort.active_rows()))

    def on_round_start(self, trainer, pl_module, cohort):
        self.calls = 0

    def on_fit_end(self, trainer, pl_module):
        self.handle.remove()


@fails("client numbers")
class LateFirstRow(FederatedCallback):
    """Doubles the gradients of the first row, whoever it is, in one late round."""

    round = 2

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        if cohort.round == self.round and cohort.rows.start == 0:
            for gradients in cohort.grads.blocks.values():
                gradients[0] *= 2


@fails("client numbers")
class LastRoundsFirstRow(LateFirstRow):
    """The same in the last round."""

    round = 4
