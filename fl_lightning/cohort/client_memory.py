"""Memory that holds the clients' state between rounds, in RAM or in files."""

import hashlib
import io
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import unwritable, write_text
from fl_lightning.ranks import Ranks

LIMIT = 256 * 2**20
"""Size in bytes above which a :class:`ClientMemory` stores its entries in files."""
_RECORD = "files of a ClientMemory"
_NOTES = "checkpoints.json"


class ClientMemory(MutableMapping[int, Mapping[str, Tensor]]):
    """Memory of a method that holds the clients' state between rounds.

    The memory maps client ids to entries. An entry maps names to tensors, and is immutable. To
    change an entry, replace it: ``memory[client] = {"name": tensor}``. Store the memory in an
    attribute of the method that ``saved`` names.

    Entries are kept in RAM on every rank and saved in checkpoints. If the memory exceeds
    :data:`LIMIT` bytes, each client's entry is stored in a file instead. The files are in the
    folder ``memory`` of the trainer's ``default_root_dir``. All ranks must be able to read this
    folder. At the end of a round, each changed entry is written to a new file, by a single rank,
    and leaves the RAM. A checkpoint lists the files of its entries, and a file that no checkpoint lists is deleted.
    Entries with negative ids belong to the server and stay in RAM.

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
        self._entries: dict[int, Mapping[str, Tensor]] = {}
        # checksums: without an entry above, the client's entry is in a file that is named by its checksum
        self._sums: dict[int, int] = {}
        self._unlisted: set[Path] = set()  # files that this rank has written since the last checkpoint
        self._folder: Path | None = None
        self._source: Path | None = None
        self._ranks = Ranks()
        if _RECORD in state:
            record = state[_RECORD]
            self._source, self._sums = Path(record["run"], record["folder"]), dict(record["sums"])
            if not self._source.is_dir():
                raise ConfigurationError(
                    f"ckpt_path: the checkpoint's folder {self._source} with the memory of {len(self._sums)} clients is missing; "
                    "keep the run's folder memory beside its folder checkpoints"
                )
            state = record["kept"]
        self.update(state)

    def __getitem__(self, client: int) -> Mapping[str, Tensor]:
        if client in self._entries or client not in self._sums:
            return self._entries[client]
        return self._read(client)

    def __setitem__(self, client: int, entry: Mapping[str, Tensor]) -> None:
        self._entries[client] = MappingProxyType(dict(entry))
        self._sums.pop(client, None)

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self._entries.pop(client, None)
        self._sums.pop(client, None)

    def __contains__(self, client: object) -> bool:
        return client in self._entries or client in self._sums

    def setdefault(self, client: int, default: Any = MappingProxyType({})) -> Mapping[str, Tensor]:
        """Return a client's entry, which cannot be changed. If it is missing, first store the default."""
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
        self._ranks, self._folder, source = ranks, folder, self._source
        if source is None:
            return

        def copy() -> None:
            if ranks.rank == 0 and not (folder.is_dir() and source.samefile(folder)):
                copy_files(source, folder, _names(self._sums))

        ranks.exchange(copy)
        self._source = folder

    def flush(self) -> None:
        """Write changed entries to files if the memory exceeds the limit.

        All ranks must call this method at the end of a round.
        """
        if self._source is None:
            if self._folder is None or sum(map(_size, self._entries.values())) <= LIMIT:
                return
            self._source = self._folder
        changed = sorted(client for client in self._entries if client >= 0)
        for client in changed:
            self._sum(client)

        def write() -> None:
            for client in changed[self._ranks.rank :: self._ranks.size]:
                self._write(client)

        self._ranks.exchange(
            write
        )  # afterwards, no rank reads the old files, and every rank has the new ones
        for client in changed:
            del self._entries[client]
        known = set(_names(self._sums))
        for path in [path for path in self._unlisted if path.name not in known]:
            path.unlink(missing_ok=True)
            self._unlisted.remove(path)

    def saved(self) -> dict[Any, Any]:
        """Return the state for a checkpoint. All ranks must call this method."""
        self.flush()
        if self._source is None or self._folder is None:  # all entries are in RAM
            return {client: dict(entry) for client, entry in self.items()}

        def sync() -> None:
            for path in self._unlisted:
                with path.open("rb") as file:
                    os.fsync(file.fileno())

        self._ranks.exchange(sync)
        self._unlisted.clear()
        run = self._folder.parents[1]
        record = {
            "run": str(run.absolute()),
            "folder": str(self._folder.relative_to(run)),
            "sums": {client: number for client, number in self._sums.items() if client >= 0},
            "kept": {client: dict(entry) for client, entry in self._entries.items()},
        }
        return {_RECORD: record}

    def checksum(self) -> int:
        """Return a checksum of the memory.

        Entries that have not changed since the last call are not read again.
        """
        return zlib.crc32(repr(sorted((client, self._sum(client)) for client in self)).encode())

    def _sum(self, client: int) -> int:
        if client not in self._sums:
            self._sums[client] = _sum(self._entries[client])
        return self._sums[client]

    def _path(self, client: int) -> Path:
        assert self._source is not None
        return self._source / f"{client}-{self._sums[client]}.pt"

    def _read(self, client: int) -> Mapping[str, Tensor]:
        path = self._path(client)
        try:
            entry = torch.load(path, weights_only=True)
            if _sum(entry) != self._sums[client]:
                raise ValueError("wrong checksum")
        except Exception as error:  # noqa: BLE001  # torch raises many types for a damaged file
            raise _damaged(path, error) from None
        return MappingProxyType(entry)

    def _write(self, client: int) -> None:
        path, content = self._path(client), io.BytesIO()
        temporary = path.with_suffix(".tmp")
        if path.exists():
            with suppress(ConfigurationError):  # a killed run may have left a part of the file
                self._read(client)
                return  # the entry is the same as in an earlier round
        torch.save({name: tensor.cpu() for name, tensor in self._entries[client].items()}, content)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content.getbuffer())
            os.replace(temporary, path)
        except OSError as error:
            raise unwritable(path, error) from error
        self._unlisted.add(path)


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


def saved(tree: Any) -> Any:
    """Copy nested dicts and lists, and replace each memory by its state for a checkpoint."""
    return _each(tree, lambda memory: memory.saved())


def locate(tree: Any, checkpoint: Any) -> None:
    """Update the path of the run's folder in a checkpoint's state if the folder was moved.

    Args:
        tree: The checkpoint's state, which is changed in place.
        checkpoint: Path of the checkpoint; None if unknown.
    """
    run = None if checkpoint is None else Path(checkpoint).absolute().parents[1]
    for record in _records(tree):
        if run is not None and (run / record["folder"]).is_dir():
            record["run"] = str(run)


def keep_listed(path: Path, tree: Any) -> None:
    """Note which memory files a checkpoint lists, and delete files that no checkpoint lists.

    Call this function before the checkpoint is written. Files that the checkpoint's old version
    lists stay until the next call, in case the new version cannot be written.

    Args:
        path: The checkpoint.
        tree: The checkpoint's state.
    """
    for record in _records(tree):
        folder = Path(record["run"], record["folder"])
        lists = _note(folder, path, [*_names(record["sums"])])
        listed = {name for versions in lists.values() for names in versions for name in names}
        for file in folder.glob("*.pt"):
            if file.name not in listed:
                file.unlink()


def copy_listed(source: Path, target: Path) -> None:
    """Copy the memory files that a checkpoint lists, for a copy of the checkpoint.

    Args:
        source: The checkpoint.
        target: The copy of the checkpoint.
    """
    for notes in source.parents[1].glob(f"memory/*/{_NOTES}"):
        name = os.path.relpath(source, notes.parent)
        names = json.loads(notes.read_text()).get(name, [[]])[-1]
        folder = target.parents[1] / notes.parent.relative_to(source.parents[1])
        if folder != notes.parent:
            copy_files(notes.parent, folder, names)
        _note(folder, target, names)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy memory files to another folder.

    Raises:
        ConfigurationError: A file is missing, or cannot be written.
    """
    for name in names:
        try:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
        except FileNotFoundError as error:
            raise _damaged(source / name, error) from error
        except OSError as error:
            raise unwritable(target / name, error) from error


def _note(folder: Path, checkpoint: Path, names: list[str]) -> dict[str, list[list[str]]]:
    """Note the memory files of a checkpoint's last two versions, and return all such notes."""
    notes = folder / _NOTES
    lists = json.loads(notes.read_text()) if notes.is_file() else {}
    lists = {path: versions for path, versions in lists.items() if (folder / path).is_file()}
    key = os.path.relpath(checkpoint, folder)
    lists[key] = [*lists.get(key, ())[-1:], names]
    write_text(notes, json.dumps(lists))
    return lists


def _records(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the states of memories with files in a checkpoint's state."""
    if isinstance(tree, dict):
        if _RECORD in tree:
            yield tree[_RECORD]
        for inner in tree.values():
            yield from _records(inner)


def _each(tree: Any, function: Any) -> Any:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, ClientMemory) else leaf, tree)


def _damaged(path: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{path}, the memory of client {path.stem.partition('-')[0]}, is missing or damaged ({type(error).__name__}); resume from another "
        "checkpoint"
    )


def _names(sums: Mapping[int, int]) -> list[str]:
    return [f"{client}-{number}.pt" for client, number in sums.items() if client >= 0]


def _size(entry: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in entry.values())


def _sum(entry: Mapping[str, Tensor]) -> int:
    """Return a digest of an entry of 63 bits. Files have it in their names, so 32 bits would be too few."""
    digest = hashlib.sha256()
    for place, leaf in tree_flatten_with_path(dict(sorted(entry.items())))[0]:
        if isinstance(leaf, Tensor):
            values = leaf.detach().cpu().to_dense().contiguous()
            digest.update(repr((place, values.dtype, values.shape)).encode())
            digest.update(values.flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(repr((place, leaf)).encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1
