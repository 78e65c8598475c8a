"""Which tensors of a model stand side by side in which block of a cohort."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl_lightning.batch_norm.kinds import parameter_kinds
from fl_lightning.cohort.rows import Layout


def parameter_blocks(model: nn.Module, overrides: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """The parameter group, and so the block, of each trainable parameter.

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


def block_layout(tensors: Mapping[str, Tensor], groups: Mapping[str, str]) -> Layout:
    """Which tensors stand side by side in which block of a cohort: those of one group and dtype.

    Args:
        tensors: Parameters or buffers by name.
        groups: Their groups, from :func:`parameter_blocks` or ``fl_lightning.batch_norm.kinds.buffer_kinds``.
    """
    main: dict[str, torch.dtype] = {}
    layout: dict[str, dict[str, torch.Size]] = {}
    for name, group in groups.items():
        dtype = tensors[name].dtype
        block = group if main.setdefault(group, dtype) == dtype else f"{group} {dtype}"
        layout.setdefault(block, {})[name] = tensors[name].shape
    return layout
