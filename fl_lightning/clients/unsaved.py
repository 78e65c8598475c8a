"""Tensors that a LightningModule leaves out of its checkpoints, such as frozen weights."""

from collections.abc import Container, Mapping

from torch import Tensor, nn

from fl_lightning.client_data.fingerprint import digest
from fl_lightning.errors import ConfigurationError


def unsaved(
    module: nn.Module, saved: Container[str], merged: Mapping[str, Tensor] | None = None
) -> dict[str, str]:
    """Return a digest of each tensor of a module that a checkpoint leaves out, by name.

    Digests of float32 and float64 tensors are equal if the values are equal in float32.

    Args:
        module: The module.
        saved: Names of the tensors in the checkpoint.
        merged: Values in training of tensors that ``eval()`` has changed.
    """
    state: dict[str, Tensor] = nn.Module.state_dict(module)  # not the module's own, which leaves out
    return {
        name: digest(value.float() if value.is_floating_point() else value)
        for name, value in (state | dict(merged or {})).items()
        if name not in saved and isinstance(value, Tensor)
    }


def check_unsaved(module: nn.Module, loaded: Container[str], known: Mapping[str, str]) -> None:
    """Check that the tensors that a checkpoint leaves out are those of the checkpoint's run.

    Args:
        module: The module, with the checkpoint's tensors.
        loaded: Names of the tensors in the checkpoint.
        known: What :func:`unsaved` returned for the checkpoint.

    Raises:
        ConfigurationError: A tensor differs, is missing or is new.
    """
    found = unsaved(module, loaded)
    for name in {**known, **found}:
        if known.get(name) != found.get(name):
            raise ConfigurationError(
                f"ckpt_path: {name!r} of {type(module).__name__} is not in the checkpoint, and differs from that of the checkpoint's "
                "run; make the module with the same frozen weights or the same seed as in that run"
            )
