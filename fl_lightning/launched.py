"""Ranks of processes that ``torchrun``, Slurm or the user has started."""

import os
import sys
import warnings


def under_torchrun() -> bool:
    """Return whether ``torchrun`` has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int:
    """Return the rank that ``torchrun``, Slurm or the user has given this process; default 0.

    Without a launcher, the user sets ``NODE_RANK`` on each node, and may set ``LOCAL_RANK`` for
    each process. Several ranks may then return the same number, but only the first rank returns 0.
    """
    names = ("RANK",) if under_torchrun() else ("SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")
    return max(int(os.environ.get(name, "0")) for name in names)


def silence() -> None:
    """Discard all further output and warnings of this rank; another rank prints the same."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # sys.stdout or sys.stderr may have been redirected
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
    warnings.filterwarnings("ignore")
