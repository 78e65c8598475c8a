"""From the clients' rows to the server: the pseudo-gradient and the statistics."""

import torch
from torch import nn

from fl_lightning.aggregation import Aggregator
from fl_lightning.cohort import Cohort
from fl_lightning.rows import split_columns


def set_pseudo_gradient(model: nn.Module, cohort: Cohort, aggregator: Aggregator) -> None:
    """Set the server's gradients to server - aggregate(clients) (Reddi et al. 2021, Algorithm 1).

    Parameters that the round's policy does not average get no gradient, so the server optimizer passes them over.

    Args:
        model: The server's model.
        cohort: The clients after their local steps.
        aggregator: How their parameters are combined.
    """
    blocks = {
        name: block for name, block in cohort.params.blocks.items() if cohort.treatment(name) == "averaged"
    }
    means = aggregator.blocks(list(blocks.values()), cohort.weights)
    parameters = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    for block, mean in zip(blocks, means, strict=True):
        for name, value in split_columns(mean, cohort.params.layout[block]).items():
            # the memory of the last round's gradient: new memory costs as much as the subtraction
            parameters[name].grad = torch.sub(parameters[name].detach(), value, out=gradients[name])


def set_local_parameters(model: nn.Module, cohort: Cohort, aggregator: Aggregator) -> None:
    """Set the server's copy of parameters that clients keep for themselves to their mean: it is only evaluated.

    The server optimizer passes these parameters over, since they have no gradient.

    Args:
        model: The server's model.
        cohort: The clients after their local steps.
        aggregator: How the parameters are combined.
    """
    for name, block in cohort.params.blocks.items():
        if cohort.treatment(name) == "local":
            mean = aggregator(block, cohort.weights)
            for key, value in split_columns(mean, cohort.params.layout[name]).items():
                model.get_parameter(key).detach().copy_(value)


def set_statistics(model: nn.Module, cohort: Cohort, aggregator: Aggregator) -> None:
    """Set the server's buffers to the clients' aggregate, past the server optimizer.

    Counters, and other buffers that are not floating point, take the largest value over the clients. Buffers that the
    round's policy freezes, pools or resets stay untouched.

    Args:
        model: The server's model.
        cohort: The clients after their local steps.
        aggregator: How floating-point buffers are combined.
    """
    buffers = dict(model.named_buffers())
    for name, block in cohort.buffers.blocks.items():
        treatment = cohort.treatment(name)
        if treatment not in ("averaged", "local", "max"):
            continue
        average = treatment != "max" and block.is_floating_point()
        row = aggregator(block, cohort.weights) if average else block.amax(0)
        for key, value in split_columns(row, cohort.buffers.layout[name]).items():
            buffers[key].copy_(value)


def diverged_clients(cohort: Cohort) -> list[int]:
    """The clients whose parameters or BN statistics are not all finite.

    A model's other buffers are not looked at: an attention mask, say, may well hold infinities.
    """
    statistics = [
        block for name, block in cohort.buffers.blocks.items() if name.split(" ")[0] in ("mean", "var")
    ]
    blocks = (*cohort.params.blocks.values(), *statistics)
    # A finite sum has finite terms: one pass that writes nothing, where looking at each of them writes a mask.
    if bool(torch.stack([block.sum().isfinite() for block in blocks]).all()):
        return []
    finite = torch.stack([block.isfinite().all(1) for block in blocks]).all(0)
    return [client for client, fine in zip(cohort.client_ids, finite.tolist(), strict=True) if not fine]
