"""The ranks of a run: processes that divide the run's work and keep equal state."""

import pickle
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from fl_lightning.errors import ConfigurationError

_LARGE = 200_000  # size in bytes above which a block is sent separately
_SHORT = 4096  # number of bytes that each rank sends in the first all-gather of an exchange
_GRACE = 10.0  # seconds; after the loss of a rank, all running ranks must report within this time

Item = TypeVar("Item")
Mapped = TypeVar("Mapped")


class LostRank(ConfigurationError):
    """Loss of a rank that has ended or does not answer."""


class Ranks:
    """The processes of a run: each computes a share of the work, and all receive all results.

    Args:
        rank: Rank of this process, from 0.
        size: Number of ranks.
        patience: Seconds to wait for another rank.
        here: Number of ranks on this machine.
    """

    def __init__(self, rank: int = 0, size: int = 1, patience: float = 1800.0, here: int = 1) -> None:
        self.rank, self.size, self.patience, self.here = rank, size, patience, here
        self._depth = 0  # number of nested calls of exchange that are running now

    def share(self, count: int, rank: int | None = None) -> range:
        """Return the indices of a rank's share of ``count`` items.

        A share is contiguous. The sizes of two shares differ by at most one.

        Args:
            count: Number of items.
            rank: The rank; default: this rank.
        """
        mine = np.array_split(np.arange(count), self.size)[self.rank if rank is None else rank]
        return range(int(mine[0]), int(mine[-1]) + 1) if len(mine) else range(0)

    def map(self, function: Callable[[Item], Mapped], items: Iterable[Item]) -> list[Mapped]:
        """Return ``[function(item) for item in items]`` on every rank.

        Each item is computed on one rank, which sends the result to the other ranks.

        Args:
            function: Function of an item; the same on every rank. Its results are pickled. Tensors
                in the results must be on the CPU.
            items: Items; the same on every rank.
        """
        items = list(items)
        parts = self.exchange(lambda: [function(items[index]) for index in self.share(len(items))])
        return [result for part in parts for result in part]

    def exchange(self, compute: Callable[[], Mapped]) -> list[Mapped]:
        """Call a function on every rank; return the results of all ranks, in order of rank.

        If the function raises an exception on one rank, all ranks raise an exception.

        Args:
            compute: Function without arguments. Its result is pickled. After the call, the states
                of torch's random generators are restored.

        Raises:
            ConfigurationError: A rank has raised a ``ConfigurationError``.
            RuntimeError: A rank has raised any other exception.
        """

        def computed() -> Mapped:
            # restore the random generators, whose states must stay equal on all ranks
            gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]  # untyped in torch
            with torch.random.fork_rng(gpus):
                return compute()

        if self.size == 1:
            return [computed()]
        mine: Exception | None = None
        self._depth += 1
        try:
            message = pickle.dumps((computed(), None, self._depth))
        except Exception as error:
            if is_shared(error) or isinstance(error, LostRank):
                # keep only the notes that all ranks have, because all ranks raise this error
                error.__notes__ = getattr(error, "shared_by_ranks", getattr(error, "__notes__", []))
                raise
            mine, message = error, pickle.dumps((None, described(error), 0))
        finally:
            self._depth -= 1
        with self.meeting():
            everyone = [*map(pickle.loads, self._all_gather(message))]
        for rank, (_, failure, _) in enumerate(everyone):
            if failure is not None:
                raise _shared(mine if rank == self.rank and mine is not None else failure_of(rank, *failure))
        if len({depth for *_, depth in everyone}) > 1:
            raise _shared(
                ConfigurationError(
                    "ranks are at different places: a custom layer, loss or hook calls cohort_mean or ranks.exchange for some "
                    "clients only; call it equally often for all clients"
                )
            )
        return [result for result, *_ in everyone]

    def _all_gather(self, message: bytes) -> list[bytes]:
        """Send a message to all ranks, and return the messages of all ranks.

        The rest of a long message is sent by a second all-gather.
        """
        heads = self._all_gather_sized(len(message).to_bytes(8) + message[:_SHORT], 8 + _SHORT)
        lengths = [int.from_bytes(head[:8]) for head in heads]
        longest = max(lengths) - _SHORT
        rests = self._all_gather_sized(message[_SHORT:], longest) if longest > 0 else [b""] * self.size
        return [(head[8:] + rest)[:length] for head, rest, length in zip(heads, rests, lengths, strict=True)]

    def _all_gather_sized(self, message: bytes, size: int) -> list[bytes]:
        padded = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
        padded = padded.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded)
        return [received.cpu().numpy().tobytes() for received in everyone]

    def agree(self, state: Callable[[], Mapping[str, object]], place: str) -> None:
        """Check that every rank has the same state.

        Args:
            state: Function that returns named parts of the state. A part is a tensor, a plain
                value, or a nested container of tensors and plain values.
            place: Place of the check in the run, such as ``"round 3"``, for the error message.

        Raises:
            ConfigurationError: The state of a rank differs; the message names the rank.
        """
        if self.size == 1:
            return
        sums: dict[str, int] = {}

        def together() -> int:
            sums.update(checksums(state()))
            return zlib.crc32(repr(sums).encode())

        if len(set(self.exchange(together))) == 1:
            return
        first, *others = self.exchange(lambda: sums)
        for rank, other in enumerate(others, 1):
            for key in {**first, **other}:
                if first.get(key) != other.get(key):
                    raise _shared(
                        ConfigurationError(
                            f"{place}: rank {rank} has another {key} than rank 0; outside of local steps, hooks must compute the same "
                            "on every rank: they may use no clock, no process number, and only torch's global random numbers. "
                            "In local steps, hooks may change rows only. All CPUs must be of the same kind"
                        )
                    )

    def complete(self, blocks: Sequence[Tensor]) -> None:
        """Copy the rows that other ranks have computed into the blocks of this rank.

        Before the call, each rank has computed only its :meth:`share` of the rows of each block.

        Args:
            blocks: Contiguous tensors ``[C, ...]``. ``C``, the number of rows, may differ between
                blocks.
        """
        if self.size == 1:
            return
        # send the values as bytes, because not every backend supports every dtype
        blocks = [block.view(len(block), -1).view(torch.uint8) for block in blocks if block.numel()]
        large = [block for block in blocks if block.numel() > _LARGE]
        sent: list[Any] = []
        with self.meeting():
            for block in large:
                for rank in range(self.size):
                    if rows := self.share(len(block), rank):
                        part = block[rows.start : rows.stop]
                        sent.append(dist.broadcast(part, rank, async_op=True))
            self._complete_together([block for block in blocks if block.numel() <= _LARGE])
            for work in sent:
                work.wait()

    def _complete_together(self, blocks: Sequence[Tensor]) -> None:
        """Send the rows of all small blocks in a single all-gather."""

        def parts(rank: int) -> list[Tensor]:
            shares = [self.share(len(block), rank) for block in blocks]
            return [block[rows.start : rows.stop] for block, rows in zip(blocks, shares, strict=True)]

        if not blocks:
            return
        sizes = [sum(part.numel() for part in parts(rank)) for rank in range(self.size)]
        piece, *pieces = [blocks[0].new_zeros(max(sizes)) for _ in range(1 + self.size)]
        torch.cat([part.flatten() for part in parts(self.rank)], out=piece[: sizes[self.rank]])
        dist.all_gather(pieces, piece)
        for rank in set(range(self.size)) - {self.rank}:
            places = parts(rank)
            received = torch.split(pieces[rank][: sizes[rank]], [place.numel() for place in places])
            for place, values in zip(places, received, strict=True):
                place.copy_(values.view_as(place))

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Convert a communication error in the block to :class:`LostRank`.

        Raises:
            LostRank: A rank has ended or does not answer; the message names the rank.
        """
        try:
            yield
        except RuntimeError as error:
            late = "imed out" in str(error)
            lost = self._lost()
            who = " and ".join(f"rank {rank}" for rank in lost) or "a rank"
            has = "have" if len(lost) > 1 else "has"
            raise LostRank(
                f"{who} {has} not answered for {self.patience:g} s; continue a stopped process (kill -CONT), or "
                "increase CohortStrategy.timeout for long rounds"
                if late
                else f"{who} {has} ended, and this rank with it; see the output of {who} for the reason"
            ) from error

    def _lost(self) -> list[int]:
        """Return the ranks that have ended or do not answer.

        This rank writes a key to the store of the process group, and then leaves the group. As a
        result, ranks that wait in the group wake up and also write a key. A rank that writes no key
        within ``_GRACE`` seconds is lost.
        """
        try:
            store: Any = dist.distributed_c10d._get_default_store()
            store.set(f"here {self.rank}", "")
            dist.destroy_process_group()
            until, others = time.monotonic() + _GRACE, list(range(self.size))
            while len(others) > 1 and time.monotonic() < until:
                others = [rank for rank in others if not store.check([f"here {rank}"])]
                time.sleep(0.05)
        except (RuntimeError, ValueError):  # the store is missing if rank 0 has ended
            return [0]
        return others


def checksums(state: Mapping[str, object]) -> dict[str, int]:
    """Return a checksum for each tensor and each plain value in nested containers.

    The keys are paths such as ``server['0.weight']``.
    """
    return {
        f"{name}{keystr(place)}": _number(leaf)
        for name, tree in state.items()
        for place, leaf in tree_flatten_with_path(tree)[0]
    }


def _number(leaf: Any) -> int:
    if hasattr(leaf, "checksum"):  # a large object, which maintains a checksum of its content
        return int(leaf.checksum())
    if isinstance(leaf, Tensor):
        values = leaf.detach().cpu()
        values = values if values.layout == torch.strided else values.to_dense()
        return zlib.crc32(values.contiguous().flatten().view(torch.uint8).numpy().data)
    if isinstance(leaf, set | frozenset):  # sorted, because the order of a set differs between processes
        leaf = sorted(map(repr, leaf))
    return zlib.crc32(repr(leaf).encode())


def is_shared(error: BaseException) -> bool:
    """Return whether every rank raises this exception.

    Only one rank needs to print such an exception.
    """
    return hasattr(error, "shared_by_ranks")


def _shared(error: Exception) -> Exception:
    error.shared_by_ranks = [*getattr(error, "__notes__", [])]  # type: ignore[attr-defined]  # see is_shared
    return error


def described(error: Exception) -> tuple[bool, str, list[str], str]:
    """Describe an exception for another process, because some exceptions cannot be unpickled.

    Returns:
        Whether the user has made a mistake, the message, the notes and the traceback.
    """
    mistake = isinstance(error, ConfigurationError)
    message = str(error) if mistake else traceback.format_exception_only(error)[0].strip()
    notes = [str(note) for note in getattr(error, "__notes__", [])]
    return mistake, message, notes, traceback.format_exc()[-20_000:]


def failure_of(rank: int, mistake: bool, message: str, notes: Sequence[str], trace: str) -> Exception:
    """Make an exception from the description of another rank's exception.

    The arguments after ``rank`` are the return value of :func:`described`.
    """
    failure: Exception = ConfigurationError(message) if mistake else RuntimeError(message)
    for note in notes:
        failure.add_note(note)
    failure.__cause__ = RuntimeError(f"in rank {rank}:\n{trace}")
    return failure
