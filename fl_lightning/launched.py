"""Ranks started from outside: by ``torchrun``, Slurm or the user on each node."""

import os
import sys
import warnings


def under_torchrun() -> bool:
    """Return whether ``torchrun`` has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int:
    """Return this process's rank from ``torchrun``, Slurm or the user, 0 if it has none.

    The user numbers nodes (``NODE_RANK``) and, if ranks are not forks, the ranks of a node
    (``LOCAL_RANK``); the result is then 0 for the first rank only, not a unique rank.
    """
    names = ("RANK",) if under_torchrun() else ("SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")
    return max(int(os.environ.get(name, "0")) for name in names)


def silence() -> None:
    """Discard all further output and warnings, which another rank prints."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)  # both may have been redirected
    warnings.filterwarnings("ignore")
