"""Ranks that somebody else has started: ``torchrun``, Slurm or the user on each node."""

import os
import sys
import warnings


def under_torchrun() -> bool:
    """Whether ``torchrun`` has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int:
    """The rank of this process as ``torchrun``, Slurm or the user has numbered it, 0 where nobody has.

    The user numbers nodes (``NODE_RANK``), and the ranks of each where it is not a fork that starts them (``LOCAL_RANK``): only
    that of the first rank is its own.
    """
    names = ("RANK",) if under_torchrun() else ("SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")
    return max(int(os.environ.get(name, "0")) for name in names)


def silence() -> None:
    """Let nothing that is printed from now on be seen, nor a warning: another rank says it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)  # they may have been others
    warnings.filterwarnings("ignore")
