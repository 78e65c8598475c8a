"""The first local step of clients, as a server that knows the method and the model can compute it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_lightning import ConfigurationError, Dropout, FederatedModule
from fl_lightning.batch_norm import averaging_by, batch_norm_layers, evaluating, has_statistics, mean_of_all
from fl_lightning.cohort import Cohort
from fl_lightning.errors import CannotVectorize

SENT = ("averaged", "pooled")
"""Treatments of state that leaves the clients."""


class Step(NamedTuple):
    """Results of a local step of some clients.

    Attributes:
        gradients: Gradients ``[n, *shape]`` of the parameters that clients send, by name.
        means: Mean of the inputs of each BN layer with running statistics, ``[n, channels]``, by
            name of the layer. Layers that are not called once are left out.
        variances: Biased variance of these inputs, as ``means``.
    """

    gradients: dict[str, Tensor]
    means: dict[str, Tensor]
    variances: dict[str, Tensor]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Turn dropout layers off until the ``with`` block ends."""
    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, Dropout):
                stack.enter_context(evaluating(layer))
        yield


def simulated_step(
    pl_module: FederatedModule, cohort: Cohort, rows: Sequence[int], batch: Any, setting: str
) -> Step:
    """Compute the first local step of some clients without changing the run.

    BN layers normalise as the method demands in this round. Dropout is off. If the method joins the
    forward passes of the cohort, it joins those of ``rows``. The results can be differentiated with
    respect to the batch. The derivative leaves out what a layer detaches (``backward: own`` of
    FedTAN).

    Args:
        pl_module: The federated module, inside a round.
        cohort: A cohort of this round, before its first local step.
        rows: Clients with whose state the step begins, as indices into the cohort. An index may
            appear several times.
        batch: The batches ``[n, b, ...]`` of these clients.
        setting: Setting that decides the number of samples b, with its value, for error messages.

    Raises:
        ConfigurationError: The model cannot be computed by ``torch.func.vmap`` or on b samples.
    """
    task, model, index = pl_module.client, pl_module.model, torch.tensor(rows)
    layers = batch_norm_layers(model) if has_statistics(model) else {}
    treatments = cohort.treatments
    sent = [name for name in cohort.params if treatments[name] in SENT]
    params = {name: value.requires_grad_() for name, value in cohort.params.copies(index).items()}
    inputs: dict[str, list[Tensor]] = {name: [] for name in layers}

    def passed(
        params: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        with task.slots.filled({**params, **buffers}):
            objective = task.losses(batch)[1]
        values = {name: each[0].transpose(0, 1).flatten(1) for name, each in inputs.items() if len(each) == 1}
        means = {name: x.mean(1) for name, x in values.items()}
        return objective, means, {name: x.var(1, correction=0) for name, x in values.items()}

    def looking(name: str) -> Any:
        return lambda layer, given: inputs[name].append(given[0])

    # other kernels of attention have no second derivative
    with ExitStack() as stack, sdpa_kernel(SDPBackend.MATH), without_dropout(model):
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_pre_hook(looking(name)))
            if layer.momentum is None:  # vmap cannot read the counter, and the new statistics are not used
                layer.momentum = 0.1
                stack.callback(setattr, layer, "momentum", None)
        stack.enter_context(averaging_by(lambda statistic, _: mean_of_all(statistic, len(rows))))
        try:
            objectives, means, variances = torch.func.vmap(passed)(
                params, cohort.buffers.copies(index), batch
            )
        except CannotVectorize as error:
            raise ConfigurationError(
                f"{setting.partition('.')[0]}: the attack needs torch.func.vmap, but {error}; leave it out of trainer.callbacks"
            ) from error
        except ConfigurationError as error:
            raise ConfigurationError(f"{setting}: the attack's step fails: {error}") from error
        leaves = [params[name] for name in sent]
        found = torch.autograd.grad(objectives.sum(), leaves, create_graph=True, materialize_grads=True)
    return Step(dict(zip(sent, found, strict=True)), means, variances)


def first_batches(pl_module: FederatedModule, cohort: Cohort, observer: str) -> list[tuple[Tensor, Tensor]]:
    """Return the first batch of each client in this round.

    Raises:
        ConfigurationError: A batch is no pair of inputs and targets, or inputs differ in shape.
    """
    batches = pl_module.client_batches(cohort, [*range(len(cohort))], 0).batches()
    for batch in batches:
        parts = batch if isinstance(batch, tuple | list) else ()
        if (
            len(parts) != 2
            or not all(isinstance(part, Tensor) for part in parts)
            or not parts[0].is_floating_point()
        ):
            raise ConfigurationError(
                f"{observer}: a client's batch must be a pair of floating-point inputs and targets; leave {observer} out of "
                "trainer.callbacks"
            )
    if len(shapes := {batch[0].shape[1:] for batch in batches}) > 1:
        raise ConfigurationError(
            f"{observer}: the clients' inputs have the shapes {' and '.join(str([*shape]) for shape in sorted(shapes))}; all must be equal"
        )
    return [(inputs, targets) for inputs, targets in batches]
