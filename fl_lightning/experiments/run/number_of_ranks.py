"""Number of ranks of a run: on CPUs, one for each core, but at most one for each client."""

import lightning as L
from lightning.pytorch.utilities.seed import isolate_rng

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.cores import cores_of_a_run
from fl_lightning.execution.fork import cannot_fork
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.round.module import FederatedModule

_WORTH_RANKS = 20
"""Several ranks are used if a round has at least this number of local steps over all clients."""


def cpu_ranks() -> int:
    """Return the largest number of ranks that a run uses by default on CPUs.

    This is the number of cores that a run may use, or 1 if this process cannot fork.
    """
    return 1 if cannot_fork() else cores_of_a_run()


def useful_ranks(module: FederatedModule, data: FederatedDataModule) -> int:
    """Return the largest useful number of ranks.

    The number is 1 if a round has few local steps, and otherwise the number of clients in a round.
    This function also sets up the data, so that ranks that are forked later share the memory of the
    data.
    """
    # include_cuda=False: this must not initialise CUDA, because the process is forked later
    with isolate_rng(include_cuda=False):
        # fit sets up the data again, and must then draw the same random numbers
        data.prepare_data()
        data.setup("fit")
    if not data.num_clients:
        return 1  # if the data have no clients, the module raises an error later
    clients, steps = module.make_plan(data).usual().trained(1)
    return len(clients) if sum(steps) >= _WORTH_RANKS else 1


def limit_ranks(
    trainer: L.Trainer, module: FederatedModule, data: FederatedDataModule, *, by_default: bool
) -> None:
    """Set up the data before the trainer's strategy forks the ranks, and limit their number.

    Args:
        trainer: The trainer.
        module: The module.
        data: The data, which the ranks then share.
        by_default: Whether the number is a default (``devices: auto``), which the useful number limits.
    """
    strategy = trainer.strategy
    if isinstance(strategy, CohortStrategy) and strategy.launcher is not None:
        data.trainer = trainer  # Lightning sets it later, in fit
        ranks = useful_ranks(module, data)
        if by_default and strategy.num_nodes == 1:
            strategy.limit(ranks)
