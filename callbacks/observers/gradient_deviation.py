"""Gradients of a round's first local step, for the clients and for the union of their batches."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from fl_lightning import Dropout, FederatedModule
from fl_lightning.batch_norm import (
    averaging_by,
    batch_norm_layers,
    evaluating,
    has_statistics,
    mean_of_all,
    watching_inputs,
)
from fl_lightning.client_data import BatchStack, copied
from fl_lightning.cohort import Cohort, RoundCohort, StateSlots
from fl_lightning.execution import Executor, SequentialExecutor, VectorizedExecutor, joint_executor


@dataclass(frozen=True)
class FirstStep:
    """Results of a round's first local step, before any method changes the gradients.

    Attributes:
        mean_gradient: Mean of the clients' gradients, weighted by batch size. The keys are the
            names of the parameters, without frozen and local parameters.
        union_gradient: Gradient of a single client with the union of all batches and the same
            method, with the keys of ``mean_gradient``.
        means: Mean of each BN layer's inputs at each client, ``[C, channels]``, in the order of the
            layers. For an unused layer, the running mean is stored.
        variances: Unbiased variance of each BN layer's inputs, with the same shape as ``means``.
    """

    mean_gradient: Mapping[str, Tensor]
    union_gradient: Mapping[str, Tensor]
    means: Tensor
    variances: Tensor


def first_step(pl_module: FederatedModule, cohort: Cohort, *, union: bool = True) -> FirstStep:
    """Compute a round's first local step, forward and backward, without changing the run.

    The step is computed for the clients of the round, and then for the union: a single client with
    the batches of all clients. It uses the run's precision, the method's BN layers, and the
    clients' weights and buffers at the start of the round. If the method uses a joint forward pass,
    this step does the same. Dropout is off, because the clients and the union would draw different
    masks.

    If all clients start from the same state, the union starts from this state, too. If callbacks
    have given clients different states, the union starts from the server's state.

    Args:
        pl_module: The federated module, inside a round.
        cohort: The round's cohort after every ``on_round_start`` and before its first local step.
        union: Whether to compute the union's gradient. If False, ``union_gradient`` is empty.
    """
    slots, ranks, everyone = pl_module.client.slots, pl_module.ranks, list(range(len(cohort)))
    joint = pl_module.joint_method is not None
    rows = everyone if joint else list(ranks.share(len(cohort)))
    with isolate_rng(), ExitStack() as without_dropout, _observed(pl_module.model) as layers:
        for layer in pl_module.model.modules():
            if isinstance(layer, Dropout):
                without_dropout.enter_context(evaluating(layer))
        pl_module.client.slots = StateSlots(pl_module.model)
        try:
            clients = cohort_beside(pl_module, cohort, common=False)
            batches = pl_module.client_batches(clients, everyone, 0)

            def compute() -> None:
                part = batches
                if rows != everyone:
                    part = BatchStack(batches=[batches.batches()[row] for row in rows])
                if rows:
                    first_executor(pl_module).backward(pl_module.client, clients, part.map(copied), rows)

            ranks.exchange(compute)
            if not joint:
                ranks.complete([*clients.grads.blocks.values(), *clients.buffers.blocks.values()])
            twin = cohort_beside(pl_module, cohort, common=True) if union else None
            if twin is not None:
                with averaging_by(lambda statistic, _: mean_of_all(statistic, 1)):
                    first_executor(pl_module).backward(pl_module.client, twin, batches.union(), [0])
        finally:
            pl_module.client.slots = slots
    sizes = torch.tensor(batches.sizes(), dtype=torch.float64)
    averaged = [block for block in cohort.params.layout if cohort.treatment(block) == "averaged"]
    names = [name for block in averaged for name in cohort.params.layout[block].shapes]
    shares = (sizes / sizes.sum()).to(clients.grads[names[0]]) if names else sizes
    return FirstStep(
        mean_gradient={n: torch.einsum("c,c...->...", shares, clients.grads[n]) for n in names},
        union_gradient={n: twin.grads[n][0] for n in names} if twin is not None else {},
        means=_join(clients, layers, "observed_mean"),
        variances=_join(clients, layers, "observed_var"),
    )


def cohort_beside(pl_module: FederatedModule, cohort: Cohort, *, common: bool) -> RoundCohort:
    """Return a second cohort for this round, whose clients start as in ``cohort``.

    Args:
        pl_module: The federated module.
        cohort: The round's cohort before its first forward pass.
        common: Whether the second cohort has only one client, the union. It starts from the
            server's state, except for state that is equal for all clients and not local.
    """
    client, parts = pl_module.client, pl_module.parts
    groups, group_of = client.parameter_groups, client.group_of
    count = 1 if common else len(cohort)
    copy = RoundCohort(pl_module.model, count, groups, parts=parts, groups=group_of)
    copy.broadcast(
        round_number=cohort.round,
        client_ids=cohort.client_ids[:count],
        weights=torch.full((count,), 1 / count, dtype=torch.float64),
        local_steps=[1] * count,
        policy=cohort.policy,
        optimizer=client.optimizer,
        seed=pl_module.seed,
    )
    for rows, copies in ((cohort.params, copy.params), (cohort.buffers, copy.buffers)):
        for block in rows.layout:
            for name in rows.layout[block].shapes:
                alike = cohort.treatment(block) != "local" and bool((rows[name] == rows[name][:1]).all())
                if alike or not common:
                    copies[name].copy_(rows[name][:count])
    return copy


def first_executor(pl_module: FederatedModule) -> Executor:
    """Return an executor of a round's first local step that computes with the server's model."""
    joint = pl_module.joint_method
    if joint is not None:
        return joint_executor(joint)
    # other executors may use copies of the model, which lack the forward hooks
    executor = pl_module.executor
    return executor if isinstance(executor, VectorizedExecutor) else SequentialExecutor()


def _join(cohort: Cohort, layers: Sequence[str], buffer: str) -> Tensor:
    rows = [cohort.buffers[f"{layer}.{buffer}"] for layer in layers]
    return torch.cat(rows, 1) if rows else torch.empty(len(cohort), 0)


@contextmanager
def _observed(model: nn.Module) -> Iterator[list[str]]:
    """Let every BN layer store the mean and variance of its inputs in two buffers.

    Executors give each client a copy of these buffers. Yield the names of the BN layers.
    """
    layers = batch_norm_layers(model) if has_statistics(model) else {}

    def look(name: str, inputs: Tensor) -> None:
        layers[name].get_buffer("observed_mean").copy_(inputs.mean(1))
        # frozen BN accepts one value per channel, whose unbiased variance would be NaN: store 0
        correction = min(1, inputs.shape[1] - 1)
        layers[name].get_buffer("observed_var").copy_(inputs.var(1, correction=correction))

    for layer in layers.values():
        for buffer in ("mean", "var"):
            running = layer.get_buffer(f"running_{buffer}").clone()
            layer.register_buffer(f"observed_{buffer}", running, persistent=False)
    try:
        with watching_inputs(layers, look):
            yield list(layers)
    finally:
        for layer in layers.values():
            del layer.observed_mean, layer.observed_var
