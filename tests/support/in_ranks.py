"""A function in several processes that know each other, as the ranks of a run do."""

import os
import pickle
import time
import traceback
import warnings

import torch
import torch.distributed as dist

from fl_lightning.ranks import Ranks


def in_ranks(size, function, folder, seconds=60):
    """What ``function(Ranks(rank, size))`` returns in ``size`` copies of this process, by rank.

    Args:
        size: How many processes.
        function: What each of them computes; tensors that it returns must be on the CPU.
        folder: An empty one.
        seconds: After which all are ended, and the test fails.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # of Python 3.12 on fork
        copies = [_copy(rank, size, function, folder) for rank in range(size)]
    end = time.monotonic() + seconds
    try:
        for pid in list(copies):
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                assert time.monotonic() < end, f"a rank has taken longer than {seconds} s"
                time.sleep(0.01)
            copies.remove(pid)
    finally:
        for pid in copies:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    found = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]
    for rank, (_, failure) in enumerate(found):
        assert failure is None, f"in rank {rank}:\n{failure}"
    return [result for result, _ in found]


def _copy(rank, size, function, folder):
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            store = dist.FileStore(str(folder / "store"), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            told = function(Ranks(rank, size)), None
        except BaseException:  # noqa: BLE001  # the test shows it
            told = None, traceback.format_exc()
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(told))
    finally:
        os._exit(0)
