"""The first local step of clients, as a server that knows the method and the model can compute it."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_lightning import Dropout, FederatedModule
from fl_lightning.batch_norm import averaging_by, batch_norm_layers, evaluating, has_statistics, mean_of_all
from fl_lightning.cohort import Cohort

SENT = ("averaged", "pooled")
"""Treatments of state that leaves the clients."""


class Step(NamedTuple):
    """Results of a local step of some clients.

    Attributes:
        gradients: Gradients ``[n, *shape]`` of the parameters that clients send, by name.
        means: Mean of the inputs of each BN layer with running statistics, ``[n, channels]``, by
            name of the layer.
        variances: Biased variance of these inputs, as ``means``.
    """

    gradients: dict[str, Tensor]
    means: dict[str, Tensor]
    variances: dict[str, Tensor]


def simulated_step(pl_module: FederatedModule, cohort: Cohort, rows: Sequence[int], batch: Any) -> Step:
    """Compute the first local step of some clients without changing the run.

    BN layers normalise as the method demands in this round. Dropout is off. If the method joins the
    forward passes of the cohort, it joins those of ``rows``. The results can be differentiated with
    respect to the batch.

    Args:
        pl_module: The federated module, inside a round.
        cohort: A cohort of this round, before its first local step.
        rows: Clients with whose state the step begins, as indices into the cohort. An index may
            appear several times.
        batch: The batches ``[n, b, ...]`` of these clients.
    """
    task, model, index = pl_module.client, pl_module.model, torch.tensor(rows)
    layers = batch_norm_layers(model) if has_statistics(model) else {}
    treatments = cohort.treatments
    sent = [name for name in cohort.params if treatments[name] in SENT]
    params = {name: value.requires_grad_() for name, value in cohort.params.copies(index).items()}
    inputs: dict[str, Tensor] = {}

    def passed(
        params: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        with task.slots.filled({**params, **buffers}):
            objective = task.losses(batch)[1]
        values = {name: x.transpose(0, 1).flatten(1) for name, x in inputs.items()}
        means = {name: x.mean(1) for name, x in values.items()}
        return objective, means, {name: x.var(1, correction=0) for name, x in values.items()}

    def looking(name: str) -> Any:
        return lambda layer, given: inputs.__setitem__(name, given[0])

    # other kernels of attention have no second derivative
    with ExitStack() as stack, sdpa_kernel(SDPBackend.MATH):
        for layer in model.modules():
            if isinstance(layer, Dropout):
                stack.enter_context(evaluating(layer))
        for name, norm in layers.items():
            stack.enter_context(norm.register_forward_pre_hook(looking(name)))
        stack.enter_context(averaging_by(lambda statistic, _: mean_of_all(statistic, len(rows))))
        objectives, means, variances = torch.func.vmap(passed)(params, cohort.buffers.copies(index), batch)
        leaves = [params[name] for name in sent]
        found = torch.autograd.grad(objectives.sum(), leaves, create_graph=True, materialize_grads=True)
    return Step(dict(zip(sent, found, strict=True)), means, variances)
