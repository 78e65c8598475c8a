"""The first local step of clients, as a server that knows the method and the model can compute it."""

from collections.abc import Iterable, Iterator, Sequence
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
            name of the layer. Only layers that are called exactly once are included.
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
    pl_module: FederatedModule,
    cohort: Cohort,
    rows: Sequence[int],
    batch: Any,
    setting: str,
    *,
    differentiable: bool = True,
) -> Step:
    """Compute the first local step of some clients without changing the run.

    BN layers normalise as the method demands in this round. Dropout is off. If the method
    joins the clients' forward passes, those of ``rows`` are joined. A derivative with respect to the
    batch leaves out what a layer detaches (``backward: own`` of FedTAN).

    Args:
        pl_module: The federated module, inside a round.
        cohort: A cohort of this round, before its first local step.
        rows: Clients whose state the step starts from, as indices into the cohort. An index may
            appear several times.
        batch: The batches ``[n, b, ...]`` of these clients.
        setting: Setting that decides the number of samples b, with its value, for error messages.
        differentiable: Whether the results can be differentiated with respect to the batch.

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
        except ConfigurationError as error:
            observer = setting.partition(".")[0]
            if isinstance(error, CannotVectorize):
                setting, remedy = f"{observer} needs torch.func.vmap", ""
            else:
                remedy = "use more samples, or "
            # the remedies of the error's own message are about training
            reason = str(error).partition("; ")[0]
            raise ConfigurationError(
                f"{setting}: {reason}; {remedy}leave {observer} out of trainer.callbacks"
            ) from error
        leaves = [params[name] for name in sent]
        found = torch.autograd.grad(
            objectives.sum(), leaves, create_graph=differentiable, materialize_grads=True
        )
    step = Step(dict(zip(sent, found, strict=True)), means, variances)
    return step if differentiable else Step(*(_detached(each) for each in step))


def _detached(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in values.items()}


def first_batches(pl_module: FederatedModule, cohort: Cohort, observer: str) -> list[tuple[Tensor, Tensor]]:
    """Return the first batch of each client in this round.

    Raises:
        ConfigurationError: As in :func:`checked_pairs`.
    """
    batches = pl_module.client_batches(cohort, [*range(len(cohort))], 0).batches()
    return [*checked_pairs(batches, observer, "the clients'")]


def checked_pairs(batches: Iterable[Any], observer: str, whose: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches, each a pair of inputs and targets.

    Raises:
        ConfigurationError: A batch is no pair of floating-point inputs and targets, or samples of
            batches differ in shape.
    """
    shapes: list[torch.Size] = []
    for batch in batches:
        parts = batch if isinstance(batch, tuple | list) else ()
        if (
            len(parts) != 2
            or not all(isinstance(part, Tensor) for part in parts)
            or not parts[0].is_floating_point()
        ):
            raise ConfigurationError(
                f"{observer}: {whose} batches must be pairs of floating-point inputs and targets; leave {observer} out of "
                "trainer.callbacks"
            )
        found = [part.shape[1:] for part in parts]
        for name, one, other in zip(("inputs", "targets"), shapes or found, found, strict=True):
            if one != other:
                raise ConfigurationError(
                    f"{observer}: {whose} {name} have the shapes {[*one]} and {[*other]}, which must be equal; leave {observer} out of "
                    "trainer.callbacks"
                )
        shapes = found
        yield parts[0], parts[1]
