"""Layout and storage of a cohort's stacked tensors, which are views of larger blocks."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fl_lightning.batch_norm.kinds import buffer_kinds, model_buffers, parameter_kinds
from fl_lightning.cohort.parts import match_parts
from fl_lightning.errors import ConfigurationError
from fl_lightning.optimizers.settings import GroupSettings

_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Block:
    """Description of a block ``[C, columns]`` of concatenated tensors.

    All tensors of a block have the same kind of state, the same dtype and the same parts of the
    model.

    Attributes:
        kind: The kind of state (see ``fl_lightning.batch_norm.kinds``).
        group: The parameter group from :func:`parameter_groups`. For buffers, the kind of state.
        dtype: The dtype of the tensors.
        shapes: The shape of each tensor for one client, by qualified name.
        parts: The parts of the model that contain the tensors, the most specific first.
    """

    kind: str
    group: str
    dtype: torch.dtype
    shapes: Mapping[str, torch.Size]
    parts: tuple[str, ...] = ()


Layout = Mapping[str, Block]
"""Blocks by name.

A name begins with the parameter group or the kind of state. If the tensors are in a part,
``@<part>`` follows. If tensors have several dtypes, every name except the first ends with the
dtype.
"""


class Tensors(dict[str, Tensor]):
    """Tensors by name. An assignment and ``update`` write into the tensors. A copy is a plain dict."""

    def __setitem__(self, name: str, value: Tensor | float) -> None:
        self[name].detach()[...] = value

    def update(self, *others: Any, **named: Any) -> None:  # that of dict would replace the tensors
        """Write into the tensors; the arguments are those of ``dict.update``."""
        MutableMapping.update(self, *others, **named)

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]  # that of dict has overloads
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Rows(Mapping[str, Tensor]):
    """Mapping from names to tensors ``[C, *shape]``, which are views of blocks ``[C, columns]``.

    An assignment to a name writes into the block.

    Args:
        layout: The tensors of each block.
        blocks: The storage of each block: a contiguous tensor ``[C, columns]``.
    """

    def __init__(self, layout: Layout, blocks: dict[str, Tensor]) -> None:
        self.layout = layout
        self.blocks = Tensors(blocks)
        self._by_row: dict[int, dict[str, Tensor]] = {}
        self._part: tuple[slice, Rows] | None = None
        self._vectors = {name for name, b in layout.items() if all(len(s) < 2 for s in b.shapes.values())}
        self._orders: dict[str, Tensor] = {}
        self._views = Tensors(
            item for name, block in layout.items() for item in split_block(blocks[name], block.shapes).items()
        )

    @classmethod
    def empty(cls, layout: Layout, like: Mapping[str, Tensor], num_rows: int) -> "Rows":
        """Return rows with uninitialised values, on the device of the tensors in ``like``."""
        blocks = {}
        for name, block in layout.items():
            columns = sum(shape.numel() for shape in block.shapes.values())
            device = like[next(iter(block.shapes))].device
            blocks[name] = torch.empty(num_rows, columns, dtype=block.dtype, device=device)
        return cls(layout, blocks)

    def zeros_like(self) -> "Rows":
        """Return rows with the same layout, filled with zeros."""
        return Rows(self.layout, {name: torch.zeros_like(block) for name, block in self.blocks.items()})

    def part(self, rows: slice) -> "Rows":
        """Return a range of rows as views. The result of the last call is cached."""
        if rows == slice(0, len(next(iter(self.blocks.values()), ()))):
            return self
        if self._part is None or self._part[0] != rows:
            blocks = {name: block[rows] for name, block in self.blocks.items()}
            self._part = rows, Rows(self.layout, blocks)
        return self._part[1]

    def columns_by_layer(self, blocks: Iterable[str]) -> dict[str, list[tuple[str, slice]]]:
        """Return the location of each layer's tensors: pairs (block, slice of columns) by layer."""
        places: dict[str, list[tuple[str, slice]]] = {}
        for block in blocks:
            stop = 0
            for name, shape in self.layout[block].shapes.items():
                start, stop = stop, stop + shape.numel()
                places.setdefault(name.rpartition(".")[0], []).append((block, slice(start, stop)))
        return places

    def chosen(self, rows: list[int]) -> "Rows":
        """Return copies of the rows with the indices ``rows``."""
        return Rows(self.layout, {name: block[rows] for name, block in self.blocks.items()})

    def row(self, index: int) -> dict[str, Tensor]:
        """Return the tensors ``[*shape]`` of one row by name, as views. The result is cached."""
        if index not in self._by_row:
            self._by_row[index] = {name: view[index] for name, view in self._views.items()}
        return self._by_row[index]

    def copies(self, index: slice | Tensor) -> dict[str, Tensor]:
        """Return copies ``[n, *shape]`` of some rows by name.

        Each block is copied by one operation. Vectors, such as gamma and beta of BN, become
        contiguous, which avoids a further copy in BN.

        Args:
            index: The rows.
        """
        copies: dict[str, Tensor] = {}
        for name, block in self.layout.items():
            rows, shapes = self.blocks[name][index], block.shapes
            if name not in self._vectors:
                copies |= split_block(rows.clone() if isinstance(index, slice) else rows, shapes)
                continue
            order = self._order(name, len(rows))
            sizes = [len(rows) * shape.numel() for shape in shapes.values()]
            pieces = torch.split(rows.flatten()[order], sizes)
            for (tensor, shape), piece in zip(shapes.items(), pieces, strict=True):
                copies[tensor] = piece.view(len(rows), *shape)
        # ``.data`` gives each tensor a separate version counter in autograd
        return {name: value.data for name, value in copies.items()}

    def write(self, index: slice | Tensor, block: str, tensors: Mapping[str, Tensor]) -> None:
        """Write values of all tensors of a block to some rows.

        Args:
            index: The rows.
            block: The block's name.
            tensors: Values ``[n, *shape]`` by name, which are broadcast and converted to the
                block's dtype.
        """
        storage = self.blocks[block]
        columns = [
            _as(tensors[name].detach(), shape).to(storage.dtype).reshape(len(tensors[name]), -1)
            for name, shape in self.layout[block].shapes.items()
        ]
        if isinstance(index, slice):
            torch.cat(columns, dim=1, out=storage[index])
        else:
            storage[index] = torch.cat(columns, dim=1)

    def _order(self, block: str, num_rows: int) -> Tensor:
        """Return the order of a block's elements in which each tensor is contiguous.

        The result is cached.
        """
        storage = self.blocks[block]
        if block not in self._orders or len(self._orders[block]) != num_rows * storage.shape[1]:
            places = torch.arange(num_rows * storage.shape[1], device=storage.device).view(num_rows, -1)
            pieces = split_block(places, self.layout[block].shapes).values()
            self._orders[block] = torch.cat([piece.flatten() for piece in pieces])
        return self._orders[block]

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __setitem__(self, name: str, value: Tensor | float) -> None:
        self._views[name] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def parameter_groups(model: nn.Module, overrides: GroupSettings) -> dict[str, str]:
    """Return the parameter group of each trainable parameter.

    - ``batch_norm``: gamma and beta of BN layers.
    - ``scalars``: parameters with one element, if ``overrides`` has the key ``scalars``.
    - ``bias``: biases, if ``overrides`` has the key ``bias``.
    - ``weights``: all other parameters.
    """
    groups = {}
    for name, kind in parameter_kinds(model).items():
        parameter = model.get_parameter(name)
        if kind == "affine":
            groups[name] = "batch_norm"
        elif "scalars" in overrides and parameter.numel() == 1:
            groups[name] = "scalars"
        elif "bias" in overrides and name.rpartition(".")[2] == "bias":
            groups[name] = "bias"
        else:
            groups[name] = "weights"
    return groups


def parameter_layout(
    model: nn.Module,
    overrides: GroupSettings,
    parts: Sequence[str] = (),
    groups: Mapping[str, str] | None = None,
) -> Layout:
    """Return the blocks of a model's trainable parameters by name.

    Parameters are in the same block if they have the same parameter group, parts and dtype.

    Args:
        model: The model.
        overrides: Settings of the client optimizer for each parameter group.
        parts: Parts of the model that a policy treats separately (see
            ``fl_lightning.cohort.parts``).
        groups: Parameter group of each parameter. Default: :func:`parameter_groups`.
    """
    groups, within = groups or parameter_groups(model, overrides), match_parts(model, parts)
    return _layout(dict(model.named_parameters()), parameter_kinds(model), groups, within)


def buffer_layout(model: nn.Module, parts: Sequence[str] = ()) -> Layout:
    """Return the blocks of a model's buffers by name.

    Buffers are in the same block if they have the same kind of state, parts and dtype.
    """
    kinds = buffer_kinds(model)
    return _layout(model_buffers(model), kinds, kinds, match_parts(model, parts))


def _layout(
    tensors: Mapping[str, Tensor],
    kinds: Mapping[str, str],
    groups: Mapping[str, str],
    within: Mapping[str, tuple[str, ...]],
) -> Layout:
    main: dict[str, torch.dtype] = {}
    members: dict[str, list[str]] = {}
    for name, group in groups.items():
        dtype, place = tensors[name].dtype, "@".join((group, *within.get(name, ())))
        block = place if main.setdefault(place, dtype) == dtype else f"{place} {dtype}"
        members.setdefault(block, []).append(name)
    return {
        block: Block(
            kind=kinds[names[0]],
            group=groups[names[0]],
            dtype=tensors[names[0]].dtype,
            shapes={name: tensors[name].shape for name in names},
            parts=within.get(names[0], ()),
        )
        for block, names in members.items()
    }


def check_room(tensors: Collection[Tensor], clients: int, copies: int = 1) -> None:
    """Check that the rows of all clients fit into the memory of the device.

    Args:
        tensors: The tensors of which each client has a copy, all on one device.
        clients: Number of clients.
        copies: Number of processes on this machine, each of which holds all rows. With GPUs, each
            process has a separate GPU.

    Raises:
        ConfigurationError: The rows need more memory than the device or machine has.
    """
    device = next(iter(tensors)).device
    on_gpu = device.type == "cuda"
    room = torch.cuda.mem_get_info(device)[1] if on_gpu else _memory()
    need = clients * sum(tensor.nbytes for tensor in tensors)
    if need * (1 if on_gpu else copies) > room:
        raise ConfigurationError(
            f"a round of {clients:,} clients takes {need / 1e9:,.1f} GB for weights, gradients and buffers, on each of {copies} "
            f"ranks here, but {device.type} memory is {room / 1e9:,.1f} GB; lower model.participation or trainer.devices, or use a "
            "smaller model"
        )


def _memory() -> int:
    """Return the memory of this machine or container, in bytes."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else "max"
    return room if limit == "max" else min(room, int(limit))


def _as(tensor: Tensor, shape: torch.Size) -> Tensor:
    if tensor.shape[1:] == shape:
        return tensor
    missing = len(shape) - (tensor.ndim - 1)
    return tensor.reshape(len(tensor), *[1] * missing, *tensor.shape[1:]).expand(len(tensor), *shape)


def split_block(block: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Split a block ``[C, columns]`` or a vector ``[columns]`` into one view per name."""
    pieces = torch.split(block, [shape.numel() for shape in shapes.values()], dim=-1)
    lead = block.shape[:-1]
    return {
        name: piece.view((*lead, *shape)) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


def join_columns(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], out: Tensor | None = None
) -> Tensor:
    """Concatenate tensors of one client, or of the server, into a vector ``[columns]``."""
    return torch.cat([tensors[name].detach().reshape(-1) for name in shapes], out=out)
