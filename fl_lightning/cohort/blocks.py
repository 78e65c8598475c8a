"""The layout of a cohort: which tensors of a model stand side by side in which block."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_lightning.batch_norm.kinds import buffer_kinds, parameter_kinds
from fl_lightning.optimizers import GroupSettings


@dataclass(frozen=True)
class Block:
    """Tensors of one kind and type, side by side in the columns of ``[C, columns]``.

    Attributes:
        kind: Their kind of state (see ``fl_lightning.batch_norm.kinds``).
        group: Their parameter group, from :func:`parameter_groups`; the kind where they are buffers.
        dtype: Their type.
        shapes: Their shape at one client, by qualified name.
    """

    kind: str
    group: str
    dtype: torch.dtype
    shapes: Mapping[str, torch.Size]


Layout = Mapping[str, Block]
"""The blocks by name: the group's, with the type behind it where a group has tensors of a second one."""


def parameter_groups(model: nn.Module, overrides: GroupSettings) -> dict[str, str]:
    """The parameter group of each trainable parameter.

    BN layers' gamma and beta are always a group of their own (``batch_norm``); parameters with one element
    (``scalars``) and biases (``bias``) are where ``overrides`` sets something for them; all others are ``weights``.
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


def parameter_layout(model: nn.Module, overrides: GroupSettings) -> Layout:
    """The blocks of a model's trainable parameters: one for each parameter group and type.

    Args:
        model: The model.
        overrides: Client optimizer settings by parameter group.
    """
    return _layout(dict(model.named_parameters()), parameter_kinds(model), parameter_groups(model, overrides))


def buffer_layout(model: nn.Module) -> Layout:
    """The blocks of a model's buffers: one for each kind and type."""
    kinds = buffer_kinds(model)
    return _layout(dict(model.named_buffers()), kinds, kinds)


def _layout(tensors: Mapping[str, Tensor], kinds: Mapping[str, str], groups: Mapping[str, str]) -> Layout:
    main: dict[str, torch.dtype] = {}
    members: dict[str, list[str]] = {}
    for name, group in groups.items():
        dtype = tensors[name].dtype
        block = group if main.setdefault(group, dtype) == dtype else f"{group} {dtype}"
        members.setdefault(block, []).append(name)
    return {
        block: Block(
            kind=kinds[names[0]],
            group=groups[names[0]],
            dtype=tensors[names[0]].dtype,
            shapes={name: tensors[name].shape for name in names},
        )
        for block, names in members.items()
    }
