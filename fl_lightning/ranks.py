"""The processes of a run, which share its work and keep the same state."""

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

_LARGE = 200_000  # bytes of a block that travels by itself
_SHORT = 4096  # bytes that ranks tell each other in one message
_GRACE = 10.0  # seconds that ranks have to notice that one is lost

Item = TypeVar("Item")
Result = TypeVar("Result")


class LostRank(ConfigurationError):
    """Another rank has ended, or has not answered."""


class Ranks:
    """The processes of a run: each computes its share, and all of them know all results.

    Args:
        rank: This process, from 0.
        size: How many there are.
        patience: Seconds for which the others wait for one.
        here: How many of them share this machine's memory.
    """

    def __init__(self, rank: int = 0, size: int = 1, patience: float = 1800.0, here: int = 1) -> None:
        self.rank, self.size, self.patience, self.here = rank, size, patience, here
        self._depth = 0  # of exchanges within exchanges

    def share(self, count: int, rank: int | None = None) -> range:
        """Which of ``count`` things a rank computes (None: this one): neighbours, as many as others have or one less."""
        mine = np.array_split(np.arange(count), self.size)[self.rank if rank is None else rank]
        return range(int(mine[0]), int(mine[-1]) + 1) if len(mine) else range(0)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """``[function(item) for item in items]``, each computed by one rank and known to all, in the order of the items.

        Args:
            function: What is computed of an item; the same on every rank. What it returns is pickled: tensors of a GPU go to
                the CPU first.
            items: The same on every rank.
        """
        items = list(items)
        parts = self.exchange(lambda: [function(items[index]) for index in self.share(len(items))])
        return [result for part in parts for result in part]

    def exchange(self, compute: Callable[[], Result]) -> list[Result]:
        """What every rank has computed, by rank. An exception of one of them is raised on all.

        Args:
            compute: Computes what this rank has to tell, which is pickled. torch's global generators are given back as they were.

        Raises:
            ConfigurationError: A rank has found a mistake of the user's.
            RuntimeError: Another one has failed.
        """

        def computed() -> Result:
            # ranks that have computed something else go on with the same generators
            gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]  # torch gives it no types
            with torch.random.fork_rng(gpus):
                return compute()

        if self.size == 1:
            return [computed()]
        own: Exception | None = None
        self._depth += 1
        try:
            told = pickle.dumps((computed(), None, self._depth))
        except Exception as error:
            if is_shared(error) or isinstance(error, LostRank):
                # of an exchange within this one, where the others have heard of it: what this rank did is not to blame
                error.__notes__ = getattr(error, "shared_by_ranks", getattr(error, "__notes__", []))
                raise
            own, told = error, pickle.dumps((None, described(error), 0))
        finally:
            self._depth -= 1
        with self.meeting():
            everyone = [*map(pickle.loads, self._tell(told))]
        for rank, (_, failure, _) in enumerate(everyone):
            if failure is not None:
                raise _shared(own if rank == self.rank and own is not None else failure_of(rank, *failure))
        if len({depth for *_, depth in everyone}) > 1:
            raise _shared(
                ConfigurationError(
                    "ranks are at different places: a layer, loss or hook of your own calls cohort_mean or ranks.exchange for some "
                    "clients only; all must call it equally often"
                )
            )
        return [result for result, *_ in everyone]

    def _tell(self, told: bytes) -> list[bytes]:
        """What every rank tells, by rank; what does not fit in the first message comes in a second one."""
        heads = self._gather(len(told).to_bytes(8) + told[:_SHORT], 8 + _SHORT)
        lengths = [int.from_bytes(head[:8]) for head in heads]
        longest = max(lengths) - _SHORT
        rests = self._gather(told[_SHORT:], longest) if longest > 0 else [b""] * self.size
        return [(head[8:] + rest)[:length] for head, rest, length in zip(heads, rests, lengths, strict=True)]

    def _gather(self, own: bytes, size: int) -> list[bytes]:
        told = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
        told = told.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        everyone = [torch.empty_like(told) for _ in range(self.size)]
        dist.all_gather(everyone, told)
        return [one.cpu().numpy().tobytes() for one in everyone]

    def agree(self, state: Callable[[], Mapping[str, Any]], place: str) -> None:
        """Check that every rank has the same.

        Args:
            state: Gives trees of tensors and plain values, by a name for messages.
            place: Where in the run this is.

        Raises:
            ConfigurationError: A rank has something else; it is named.
        """
        if self.size == 1:
            return
        own: dict[str, int] = {}

        def together() -> int:
            own.update(checksums(state()))
            return zlib.crc32(repr(own).encode())

        if len(set(self.exchange(together))) == 1:
            return
        first, *others = self.exchange(lambda: own)
        for rank, found in enumerate(others, 1):
            for key in {**first, **found}:
                if first.get(key) != found.get(key):
                    raise _shared(
                        ConfigurationError(
                            f"{place}: rank {rank} has another {key} than rank 0; outside of local steps hooks must compute the same on "
                            "every rank (no clock, no process number, no random numbers but torch's global ones), and in them "
                            "change nothing but rows; CPUs must be of one kind"
                        )
                    )

    def complete(self, blocks: Sequence[Tensor]) -> None:
        """Fill in, in place, the rows of contiguous ``blocks [C, ...]`` that other ranks have computed: those of :meth:`share`."""
        if self.size == 1:
            return
        # bytes: not every backend sends every type
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
        """Small blocks travel in one piece: on one machine a message takes longer than their bytes."""

        def parts(rank: int) -> list[Tensor]:
            shares = [self.share(len(block), rank) for block in blocks]
            return [block[rows.start : rows.stop] for block, rows in zip(blocks, shares, strict=True)]

        if not blocks:
            return
        sizes = [sum(part.numel() for part in parts(rank)) for rank in range(self.size)]
        own, *pieces = [blocks[0].new_zeros(max(sizes)) for _ in range(1 + self.size)]
        torch.cat([part.flatten() for part in parts(self.rank)], out=own[: sizes[self.rank]])
        dist.all_gather(pieces, own)
        for rank in set(range(self.size)) - {self.rank}:
            places = parts(rank)
            found = torch.split(pieces[rank][: sizes[rank]], [place.numel() for place in places])
            for place, values in zip(places, found, strict=True):
                place.copy_(values.view_as(place))

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Where ranks talk to each other.

        Raises:
            LostRank: One does not; it is named.
        """
        try:
            yield
        except RuntimeError as error:
            late = "imed out" in str(error)
            lost = self._lost()
            who = " and ".join(f"rank {rank}" for rank in lost) or "a rank"
            has = "have" if len(lost) > 1 else "has"
            raise LostRank(
                f"{who} {has} not answered for {self.patience:g} s; if it was stopped, let it go on (kill -CONT), and let a "
                "long round have a longer CohortStrategy.timeout"
                if late
                else f"{who} {has} ended, and this one with it; its own output says why"
            ) from error

    def _lost(self) -> list[int]:
        """The ranks that do not say that they have lost another one: all that do part, so that each comes to know of it."""
        try:
            store: Any = dist.distributed_c10d._get_default_store()
            store.set(f"here {self.rank}", "")
            dist.destroy_process_group()
            until, others = time.monotonic() + _GRACE, list(range(self.size))
            while len(others) > 1 and time.monotonic() < until:
                others = [rank for rank in others if not store.check([f"here {rank}"])]
                time.sleep(0.05)
        except (RuntimeError, ValueError):  # the first one has the store
            return [0]
        return others


def checksums(state: Mapping[str, Any]) -> dict[str, int]:
    """A number for each tensor and value of some trees, which another content would change, by its place."""
    return {
        f"{name}{keystr(place)}": _number(leaf)
        for name, tree in state.items()
        for place, leaf in tree_flatten_with_path(tree)[0]
    }


def _number(leaf: Any) -> int:
    if hasattr(leaf, "checksum"):  # of much that knows what has changed
        return int(leaf.checksum())
    if isinstance(leaf, Tensor):
        values = leaf.detach().cpu()
        values = values if values.layout == torch.strided else values.to_dense()
        return zlib.crc32(values.contiguous().flatten().view(torch.uint8).numpy().data)
    if isinstance(leaf, set | frozenset):  # their order is each process's own
        leaf = sorted(map(repr, leaf))
    return zlib.crc32(repr(leaf).encode())


def is_shared(error: BaseException) -> bool:
    """Whether every rank raises this exception, so that one of them may say so for all."""
    return hasattr(error, "shared_by_ranks")


def _shared(error: Exception) -> Exception:
    error.shared_by_ranks = [*getattr(error, "__notes__", [])]  # type: ignore[attr-defined]  # see is_shared
    return error


def described(error: Exception) -> tuple[bool, str, list[str], str]:
    """An exception as another process can raise it: whether it is a mistake of the user's, its line, notes and traceback."""
    said = (
        str(error)
        if isinstance(error, ConfigurationError)
        else traceback.format_exception_only(error)[0].strip()
    )
    return (
        isinstance(error, ConfigurationError),
        said,
        [str(note) for note in getattr(error, "__notes__", [])],
        traceback.format_exc()[-20_000:],
    )


def failure_of(rank: int, mistake: bool, said: str, notes: Sequence[str], trace: str) -> Exception:
    """An exception that another rank has described."""
    failure: Exception = ConfigurationError(said) if mistake else RuntimeError(said)
    for note in notes:
        failure.add_note(note)
    failure.__cause__ = RuntimeError(f"in rank {rank}:\n{trace}")
    return failure
