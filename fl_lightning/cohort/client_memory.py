"""Memory that holds the clients' state between rounds, in RAM or in files."""

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
"""Size in bytes above which a :class:`ClientMemory` stores its entries in files."""
_RECORD = "files of a ClientMemory"


class ClientMemory(MutableMapping[int, Mapping[str, Tensor]]):
    """Memory of a method that holds the clients' state between rounds.

    The memory maps client ids to entries. An entry maps names to tensors, and is immutable. To
    change an entry, replace it: ``memory[client] = {"name": tensor}``. Store the memory in an
    attribute of the method that ``saved`` names.

    Entries are kept in RAM on every rank and saved in checkpoints. If the memory exceeds
    :data:`LIMIT` bytes, each client's entry is stored in a file instead. The files are in the
    folder ``memory`` of the trainer's ``default_root_dir``. All ranks must be able to read this
    folder. At the end of a round, only changed entries are written to their files. Each file is
    written by a single rank. Checkpoints use hard links to the files. Entries with negative ids
    belong to the server and stay in RAM.

    Args:
        state: State from a checkpoint, or a mapping from client ids to entries. Default: empty.

    Raises:
        ConfigurationError: A file of a checkpoint is missing or damaged, or a file cannot be
            written.

    Example:
        >>> memory = ClientMemory()
        >>> memory[3] = {"control": torch.zeros(2)}
        >>> 3 in memory, 4 in memory
        (True, False)
    """

    def __init__(self, state: Mapping[Any, Any] = MappingProxyType({})) -> None:
        self._label = ""
        self._entries: dict[int, Mapping[str, Tensor]] = {}
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
                    f"ckpt_path: the checkpoint's folder {self._folder} with the memory of {len(self._sums)} clients is missing; "
                    "keep the run's folder memory beside its folder checkpoints"
                )
            state = record["kept"]
        self.update(state)

    def __getitem__(self, client: int) -> Mapping[str, Tensor]:
        if client in self._entries or client not in self._sums:
            return self._entries[client]
        return self._read(client)

    def __setitem__(self, client: int, entry: Mapping[str, Tensor]) -> None:
        self._bytes += _size(entry) - _size(self._entries.get(client, {}))
        self._entries[client] = MappingProxyType(dict(entry))
        self._changed.add(client)

    def __delitem__(self, client: int) -> None:
        known = self._sums.pop(client, None) is not None
        if client in self._entries:
            self._bytes -= _size(self._entries.pop(client))
        elif not known:
            raise KeyError(client)
        self._changed.discard(client)
        self._written.discard(client)

    def setdefault(self, client: int, default: Any = MappingProxyType({})) -> Mapping[str, Tensor]:
        """Return a client's entry. If the entry is missing, first store the default."""
        if client not in self:
            self[client] = default
        return self[client]

    def __iter__(self) -> Iterator[int]:
        return iter({**self._entries, **self._sums})

    def __len__(self) -> int:
        return len({**self._entries, **self._sums})

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClientMemory":
        """Return a copy of this memory that keeps all entries in RAM."""
        return ClientMemory(deepcopy(contents(self), memo))

    def open(self, folder: Path, ranks: Ranks) -> None:
        """Set the folder for the memory's files. All ranks must call this method before training.

        Args:
            folder: Folder of the memory, created if needed.
            ranks: The ranks of the run.
        """
        self._ranks, self._live = ranks, folder / "now"
        if self._folder not in (None, self._live):
            assert self._folder is not None
            self._link(self._folder, self._live)
            self._folder = self._live

    def flush(self) -> None:
        """Write changed entries to files if the memory exceeds the limit.

        All ranks must call this method at the end of a round. Written entries stay in RAM until the
        next call, because other ranks may still be writing.
        """
        if self._folder is None:
            if self._live is None or self._bytes <= LIMIT:
                return
            self._folder, self._changed = self._live, set(self._entries)
        self._ranks.exchange(lambda: None)  # barrier: other ranks may still read the old files
        for client in self._written - self._changed:
            del self._entries[client]
        self._written = {client for client in self._changed if client >= 0}
        for client in sorted(self._written):
            self._sums[client] = _sum(self._entries[client])
            if client % self._ranks.size == self._ranks.rank:
                self._write(client)
        self._changed = set()

    def saved(self, round_number: int) -> dict[Any, Any]:
        """Make hard links to the memory's files, and return the state for a checkpoint.

        All ranks must call this method.

        Args:
            round_number: The round of the checkpoint.
        """
        self.flush()
        if self._folder is None or self._live is None:  # all entries are in RAM
            return {client: dict(entry) for client, entry in self.items()}
        for client in self._unsynced:
            with self._file(client).open("rb") as file:
                os.fsync(file.fileno())
        self._unsynced = set()
        target = self._live.with_name(f"{self._label or 'checkpoint'}_{round_number}")
        self._link(self._folder, target)
        run = self._live.parents[2]
        record = {
            "run": str(run.absolute()),
            "folder": str(target.relative_to(run)),
            "sums": self._sums,
            "kept": {client: dict(entry) for client, entry in self._entries.items() if client < 0},
        }
        return {_RECORD: record}

    @contextmanager
    def labelled(self, label: str, round_number: int) -> Iterator[None]:
        """Set the label of the checkpoint that is saved within the ``with`` block.

        When the block ends, the memory files of earlier checkpoints with this label are removed.

        Args:
            label: Name of the checkpoint, such as ``"last"``.
            round_number: The round of the checkpoint.
        """
        self._label = label  # an attribute: Lightning's hooks cannot pass arguments to ``saved``
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
        """Return a checksum of the memory.

        Entries that have not changed since the last call are not read again.
        """
        server = {client: _sum(entry) for client, entry in self._entries.items() if client < 0}
        for client in self._entries.keys() - server.keys():
            if client in self._changed or client not in self._sums:
                self._sums[client] = _sum(self._entries[client])
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
            reason = "wrong checksum"
        except Exception as error:  # noqa: BLE001  # torch raises many types for a damaged file
            reason = type(error).__name__
        raise _damaged(path, client, reason)

    def _write(self, client: int) -> None:
        path, content = self._file(client), io.BytesIO()
        torch.save({name: tensor.cpu() for name, tensor in self._entries[client].items()}, content)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(content.getbuffer())
            os.replace(temporary, path)  # never change the old file: checkpoints link to it
        except OSError as error:
            raise unwritable(path, error) from error
        self._unsynced.add(client)

    def _link(self, source: Path, target: Path) -> None:
        """Wait until all ranks have written their files, then link the files in ``target``."""

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


def is_finite(entry: Mapping[str, Tensor]) -> bool:
    """Return whether all tensors of a client's entry are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in entry.values())


def memories(callbacks: Iterable[Any]) -> dict[str, ClientMemory]:
    """Return the callbacks' memories, keyed by names that are valid folder names."""
    named: dict[str, ClientMemory] = {}
    for callback in callbacks:
        for name, value in vars(callback).items():
            if isinstance(value, ClientMemory):
                key = f"{type(callback).__name__}.{name}"
                named[key if key not in named else f"{key}.{len(named)}"] = value
    return named


def contents(tree: Any) -> Any:
    """Copy nested dicts and lists, and replace each memory by a dict of its entries."""
    return _each(tree, lambda memory: {client: dict(entry) for client, entry in memory.items()})


def saved(tree: Any, round_number: int) -> Any:
    """Copy nested dicts and lists, and replace each memory by its state for a checkpoint."""
    return _each(tree, lambda memory: memory.saved(round_number))


def locate(tree: Any, checkpoint: Any) -> None:
    """Update the path of the run's folder in a checkpoint's state if the folder was moved.

    Args:
        tree: The checkpoint's state, which is changed in place.
        checkpoint: Path of the checkpoint; None if unknown.
    """
    if not isinstance(tree, dict) or checkpoint is None:
        return
    record, run = tree.get(_RECORD), Path(checkpoint).absolute().parents[1]
    if record is not None and (run / record["folder"]).is_dir():
        record["run"] = str(run)
    for inner in tree.values():
        locate(inner, checkpoint)


def link_files(run: Path, name: str, other: Path, other_name: str) -> None:
    """Make hard links to a checkpoint's memory files, for a copy of the checkpoint.

    Args:
        run: Folder of the original checkpoint's run.
        name: Name of the original's memory folder, ``<label>_<round>``.
        other: Folder of the copy's run.
        other_name: Name of the copy's memory folder.
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
        f"{path}, the memory of client {client}, is missing or damaged ({reason}); resume from another checkpoint"
    )


def _size(entry: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in entry.values())


def _sum(entry: Mapping[str, Tensor]) -> int:
    return zlib.crc32(repr(checksums({"": dict(sorted(entry.items()))})).encode())
