"""What methods keep of each client from one round to another: in memory, and in files once it is much."""

import io
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import unwritable
from fl_lightning.ranks import Ranks, checksums

LIMIT = 256 * 2**20
"""Bytes that a :class:`ClientMemory` holds before it writes files."""
_RECORD = "files of a ClientMemory"


class ClientMemory(MutableMapping[int, Mapping[str, Tensor]]):
    """What a method keeps of each client from one round to another: tensors by name, by the client's number.

    A client's entry is replaced as a whole, ``memory[client] = {"name": tensor}``, and cannot be changed in place. A method
    has one as an attribute, returns it in ``state_dict()`` and makes it anew from what ``load_state_dict`` gets.

    What it holds lies in memory, on every rank, and in the checkpoint. Beyond :data:`LIMIT` bytes it moves into files
    under ``memory/`` of the trainer's ``default_root_dir``, which all ranks must be able to read: one for each client, written
    at the end of a round by the one rank that owns the client. A round then costs what its own clients cost. A checkpoint
    has a folder of hard links to the files that belong to it. Negative numbers are the server's and stay in memory.

    Args:
        state: What a checkpoint has of it, or its entries.

    Raises:
        ConfigurationError: The checkpoint's files are missing or damaged, or none can be written.
    """

    def __init__(self, state: Mapping[Any, Any] = MappingProxyType({})) -> None:
        self._label = ""
        self._kept: dict[int, Mapping[str, Tensor]] = {}
        self._sums: dict[int, int] = {}
        self._changed: set[int] = set()
        self._written: set[int] = set()
        self._unsynced: set[int] = set()
        self._bytes = 0
        self._folder: Path | None = None
        self._live: Path | None = None
        self._ranks = Ranks()
        if _RECORD in state:
            record = state[_RECORD]
            self._folder, self._sums = Path(record["run"], record["folder"]), dict(record["sums"])
            if not self._folder.is_dir():
                raise ConfigurationError(
                    f"ckpt_path: the checkpoint's folder {self._folder} is missing, where the memory of {len(self._sums)} clients "
                    "was; keep the run's folder memory beside its folder checkpoints"
                )
            state = record["kept"]
        self.update(state)

    def __getitem__(self, client: int) -> Mapping[str, Tensor]:
        if client in self._kept or client not in self._sums:
            return self._kept[client]
        return self._read(client)

    def __setitem__(self, client: int, entry: Mapping[str, Tensor]) -> None:
        self._bytes += _size(entry) - _size(self._kept.get(client, {}))
        self._kept[client] = MappingProxyType(dict(entry))
        self._changed.add(client)

    def __delitem__(self, client: int) -> None:
        known = self._sums.pop(client, None) is not None
        if client in self._kept:
            self._bytes -= _size(self._kept.pop(client))
        elif not known:
            raise KeyError(client)
        self._changed.discard(client)
        self._written.discard(client)

    def setdefault(self, client: int, default: Any = MappingProxyType({})) -> Mapping[str, Tensor]:
        """A client's entry; where there is none, the default becomes it."""
        if client not in self:
            self[client] = default
        return self[client]

    def __iter__(self) -> Iterator[int]:
        return iter({**self._kept, **self._sums})

    def __len__(self) -> int:
        return len({**self._kept, **self._sums})

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClientMemory":
        """A copy that lies in memory."""
        return ClientMemory(deepcopy(contents(self), memo))

    def open(self, folder: Path, ranks: Ranks) -> None:
        """Say where files may be written; called before training, by all ranks.

        Args:
            folder: The method's own, which need not exist.
            ranks: The processes of the run.
        """
        self._ranks, self._live = ranks, folder / "now"
        if self._folder not in (None, self._live):
            assert self._folder is not None
            self._link(self._folder, self._live)
            self._folder = self._live

    def flush(self) -> None:
        """Write the clients that have changed, where they are kept in files; called at the end of a round, by all ranks.

        Until the next time these clients are read from memory: other ranks may not have written theirs yet.
        """
        if self._folder is None:
            if self._live is None or self._bytes <= LIMIT:
                return
            self._folder, self._changed = self._live, set(self._kept)
        self._ranks.exchange(lambda: None)  # nobody reads any more what clients had before
        for client in self._written - self._changed:
            del self._kept[client]
        self._written = {client for client in self._changed if client >= 0}
        for client in sorted(self._written):
            self._sums[client] = _sum(self._kept[client])
            if client % self._ranks.size == self._ranks.rank:
                self._write(client)
        self._changed = set()

    def saved(self, round_number: int) -> dict[Any, Any]:
        """What a checkpoint keeps of it, together with files of its own; called by all ranks.

        Args:
            round_number: The round after which the checkpoint is written.
        """
        self.flush()
        if self._folder is None or self._live is None:  # of no training: what a checkpoint had
            return {client: dict(entry) for client, entry in self.items()}
        for client in self._unsynced:
            with self._file(client).open("rb") as file:
                os.fsync(file.fileno())
        self._unsynced = set()
        target = self._live.with_name(f"{self._label or 'checkpoint'}_{round_number}")
        self._link(self._folder, target)
        run = self._live.parents[2]
        kept = {client: dict(entry) for client, entry in self._kept.items() if client < 0}
        record = {
            "run": str(run.absolute()),
            "folder": str(target.relative_to(run)),
            "sums": self._sums,
            "kept": kept,
        }
        return {_RECORD: record}

    @contextmanager
    def labelled(self, label: str, round_number: int) -> Iterator[None]:
        """Name the files of the checkpoint that the block writes, and remove those of earlier ones of this name after it.

        A checkpoint that is written outside of such a block stays.

        Args:
            label: Name of the checkpoint.
            round_number: The round after which it is written.
        """
        self._label = label  # Lightning's hooks between here and ``saved`` pass on no name
        try:
            yield
        finally:
            self._label = ""
        if self._folder is not None and self._ranks.rank == 0:
            assert self._live is not None
            for folder in self._live.parent.glob(f"{label}_*"):
                if folder.name != f"{label}_{round_number}":
                    shutil.rmtree(folder)

    def checksum(self) -> int:
        """A number that another content would change; what did not change since the last time costs nothing."""
        server = {client: _sum(entry) for client, entry in self._kept.items() if client < 0}
        for client in self._kept.keys() - server.keys():
            if client in self._changed or client not in self._sums:
                self._sums[client] = _sum(self._kept[client])
        if self._folder is None:
            self._changed = set()
        return zlib.crc32(repr(sorted((self._sums | server).items())).encode())

    def _file(self, client: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{client}.pt"

    def _read(self, client: int) -> Mapping[str, Tensor]:
        path = self._file(client)
        try:
            entry = torch.load(path, weights_only=True)
            if _sum(entry) == self._sums[client]:
                return MappingProxyType(entry)
            reason = "it holds something else"
        except Exception as error:  # noqa: BLE001  # torch has many for a damaged file
            reason = type(error).__name__
        raise _damaged(path, client, reason)

    def _write(self, client: int) -> None:
        path, content = self._file(client), io.BytesIO()
        torch.save({name: tensor.cpu() for name, tensor in self._kept[client].items()}, content)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(content.getbuffer())
            os.replace(temporary, path)  # checkpoints keep the file that had this name
        except OSError as error:
            raise unwritable(path, error) from error
        self._unsynced.add(client)

    def _link(self, source: Path, target: Path) -> None:
        """Make a folder of the clients' files as they are, once all ranks have written theirs."""

        def link() -> None:
            if self._ranks.rank:
                return
            lost = next((client for client in self._sums if not (source / f"{client}.pt").is_file()), None)
            if lost is not None:
                raise _damaged(source / f"{lost}.pt", lost, "FileNotFoundError")
            shutil.rmtree(target, ignore_errors=True)
            try:
                target.mkdir(parents=True)
                for client in self._sums:
                    _link_file(source / f"{client}.pt", target / f"{client}.pt")
            except OSError as error:
                raise unwritable(target, error) from error

        self._ranks.exchange(lambda: None)
        self._ranks.exchange(link)


def memories(callbacks: Iterable[Any]) -> dict[str, ClientMemory]:
    """The memories of callbacks by a name that can be a folder's."""
    found: dict[str, ClientMemory] = {}
    for callback in callbacks:
        for name, value in vars(callback).items():
            if isinstance(value, ClientMemory):
                key = f"{type(callback).__name__}.{name}"
                found[key if key not in found else f"{key}.{len(found)}"] = value
    return found


def contents(tree: Any) -> Any:
    """A tree with what memories hold in their place."""
    return _each(tree, lambda memory: {client: dict(entry) for client, entry in memory.items()})


def saved(tree: Any, round_number: int) -> Any:
    """A tree with what a checkpoint keeps of memories in their place (:meth:`ClientMemory.saved`)."""
    return _each(tree, lambda memory: memory.saved(round_number))


def locate(tree: Any, checkpoint: Any) -> None:
    """Let the records of memories in a checkpoint's state know where the run is now, if their files are there.

    Args:
        tree: The state, changed in place.
        checkpoint: Path of the checkpoint, None where it is not known.
    """
    if not isinstance(tree, dict) or checkpoint is None:
        return
    record, run = tree.get(_RECORD), Path(checkpoint).absolute().parents[1]
    if record is not None and (run / record["folder"]).is_dir():
        record["run"] = str(run)
    for inner in tree.values():
        locate(inner, checkpoint)


def link_files(run: Path, name: str, other: Path, other_name: str) -> None:
    """Give the files of one checkpoint to its copy under another name, or in another run.

    Args:
        run: The folder of the checkpoint's run.
        name: What the memories call the checkpoint: its label and round.
        other: The folder of the copy's run.
        other_name: What they call the copy.
    """
    for folder in run.glob(f"memory/*/{name}"):
        target = other / "memory" / folder.parent.name / other_name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target, copy_function=_link_file)


def _each(tree: Any, function: Any) -> Any:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, ClientMemory) else leaf, tree)


def _link_file(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _damaged(path: Path, client: int, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path}, the memory of client {client}, is missing or damaged ({reason}); go on from another checkpoint"
    )


def _size(entry: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in entry.values())


def _sum(entry: Mapping[str, Tensor]) -> int:
    return zlib.crc32(repr(checksums({"": dict(sorted(entry.items()))})).encode())
