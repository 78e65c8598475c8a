"""Ranks that ``torchrun``, Slurm or the user starts on each node."""

import os
import sys
import warnings


def under_torchrun() -> bool:
    """Return whether ``torchrun`` has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int:
    """Return this process's rank from ``torchrun``, Slurm or the user; 0 if it has none.

    A user numbers the nodes (``NODE_RANK``) and, if ranks are not forks, the ranks of a node
    (``LOCAL_RANK``). The result is then not a unique rank, but it is 0 only for the first rank.
    """
    names = ("RANK",) if under_torchrun() else ("SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")
    return max(int(os.environ.get(name, "0")) for name in names)


def silence() -> None:
    """Discard all further output and warnings, as another rank prints them."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)  # either may have been redirected
    warnings.filterwarnings("ignore")
