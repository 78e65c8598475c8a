"""A trial of the first client's local steps, which finds parameters that steps move without a gradient."""

from typing import Any

import torch

from fl_lightning.client_data.batches import copied
from fl_lightning.clients.copies import whole_copy
from fl_lightning.clients.logged_values import LoggedValues
from fl_lightning.errors import doing
from fl_lightning.models.dropout import Dropout, dropout_keys
from fl_lightning.randomness import derive_seed, isolated, seed_global


def moved_in_trial(task: Any) -> list[str]:
    """Return the names of parameters without gradient that the first client's local steps change.

    A copy takes the steps, and is thrown away.

    Args:
        task: The :class:`~fl_lightning.clients.lightning_module.LightningModuleTask` of a run.
    """
    run, plan = task.run, task.run.plan.usual()
    (client, *_), (steps, *_) = plan.trained(run.round)
    copy = whole_copy(task, {})
    with isolated(), task.acting(copy):
        optimizer = copy.configure()
        for step in range(steps):
            (batch,) = run.planned_batches(plan, [client], step).batches()
            key = dropout_keys(task.seed, run.round, [client], step)[0]
            for layer in copy.module.modules():
                if isinstance(layer, Dropout):
                    layer.key.copy_(key)
            seed_global(derive_seed(task.seed, "model", run.round, client, step), task.device)
            with doing("the trial of the first client's steps"):
                objective = task.losses(copied(batch))[1]
                copy.clear_gradients()
                objective.backward()
                optimizer.step()
                with task.logs.collecting(LoggedValues(), batch):
                    task.end_step_alone(step)
    before, after = dict(task.module.named_parameters()), dict(copy.module.named_parameters())
    frozen = (name for name, parameter in before.items() if not parameter.requires_grad)
    return [name for name in frozen if not torch.equal(before[name], after[name])]
