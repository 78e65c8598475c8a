"""Functions that load the initial weights of a model from a file."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.batch_norm.kinds import buffer_kinds
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import user_path

_EXTRA_STATE = "_extra_state"
"""End of the names under which ``state_dict`` has what ``get_extra_state`` returns."""

_Shapes = dict[str, tuple[list[int] | None, list[int] | None]]


def load_weights(
    model: nn.Module, path: str, setting: str = "initial_weights", without: tuple[str, ...] = ()
) -> str:
    """Load the weights of a file into a model.

    If the file has another number of classes than the model, the model's classifier keeps its
    initial values.

    Args:
        model: The model, changed in place.
        path: File with a state dict (``torch.save`` or ``.safetensors``), or checkpoint of a run
            with the server's model.
        setting: Name of the setting with the path, for error messages.
        without: Prefixes of tensor names to ignore, such as ``("fc.",)`` for a classifier.

    Returns:
        A line of text with the name of the file and of the tensors that keep their initial values.

    Raises:
        ConfigurationError: The file is missing or damaged, or its content does not fit the model.
    """
    read = _read(setting, user_path(setting, path))
    weights = {name: value for name, value in read.items() if not name.startswith(without)}
    counters = {name for name, kind in buffer_kinds(model).items() if kind == "counter"} - weights.keys()
    # early releases of torch have no batch counters
    differing = {name: shapes for name, shapes in misfits(weights, model).items() if name not in counters}
    if differing and not _are_heads(differing):
        raise misfit_error(f"{setting}: {path}", "file", model, differing)
    try:
        model.load_state_dict({n: x for n, x in weights.items() if n not in differing}, strict=False)
    except RuntimeError as error:  # such as sparse or quantized tensors
        words = " ".join(str(error).split())
        raise ConfigurationError(
            f"{setting}: {path} cannot be loaded: {words}; give dense tensors"
        ) from error
    line = f"{setting}: the model starts from {path}"
    for old, new in [*differing.values()][:1]:
        line += f", except that {', '.join(differing)} keep their initial values: {old} in the file, {new} in the model"
    return line


def read_weights(model: nn.Module, path: str, setting: str) -> Mapping[str, Tensor]:
    """Return the weights of a file that fits a model exactly.

    Args:
        model: The model, which does not change.
        path: A file as in :func:`~fl_lightning.models.weights.load_weights`.
        setting: Name of the setting with the path, for error messages.

    Raises:
        ConfigurationError: The file is missing or damaged, or its content does not fit the model.
    """
    weights = _read(setting, user_path(setting, path))
    if differing := misfits(weights, model):
        raise misfit_error(f"{setting}: {path}", "file", model, differing)
    return weights


def _read(setting: str, path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise ConfigurationError(
            f"{setting}: {path} {'is no file' if path.exists() else 'does not exist'}; give a state dict (.pt, .pth, "
            ".safetensors), or a last.ckpt or best.ckpt"
        )
    if path.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError as error:
            raise ConfigurationError(f"{setting}: {path} needs pip install safetensors") from error
        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise ConfigurationError(f"{setting}: {path} is truncated or damaged: {error}") from error
    content = load_whole(f"{setting}:", path)
    weights = content.get("state_dict", content) if isinstance(content, Mapping) else {}
    tensors = {name: value for name, value in weights.items() if not str(name).endswith(_EXTRA_STATE)}
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ConfigurationError(
            f"{setting}: {path} holds no weights; give a state dict, or a last.ckpt or best.ckpt that fit wrote"
        )
    return {str(name): value for name, value in weights.items()}


def load_whole(what: str, path: Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Check that a file of ``torch.save`` is intact, and load it.

    Args:
        what: Noun for the file in error messages.
        path: The file.
        map_location: As in ``torch.load``. None (default) means the CPU.
        weights_only: As in ``torch.load``. None (default) means True: only tensors and plain values
            are allowed.

    Raises:
        ConfigurationError: The file is damaged, or contains objects that ``weights_only`` forbids.
    """
    try:
        with path.open("rb") as file:
            is_legacy = file.read(2) == b"\x80\x02"  # the file is a pickle, torch's format until release 1.5
        if not is_legacy:
            with zipfile.ZipFile(path) as archive:
                # torch.load ignores CRC errors, and returns random memory for "folder" entries
                entries = archive.infolist()
                folder = any(entry.external_attr & 0x10 for entry in entries)
                # torch.save does not compress; the content of a compressed file may exceed the memory
                inflated = sum(entry.file_size for entry in entries) > path.stat().st_size
                if folder or inflated or archive.testzip() is not None:
                    raise zipfile.BadZipFile
        return torch.load(path, map_location=map_location or "cpu", weights_only=weights_only is not False)
    except Exception as error:
        raise ConfigurationError(
            f"{what} {path} is truncated, damaged or holds more than tensors and plain values "
            f"({path.stat().st_size:,} bytes, {type(error).__name__}); use another one"
        ) from error


def misfits(weights: Mapping[str, Any], model: nn.Module) -> _Shapes:
    """Return tensor shapes that differ between the weights and the model.

    Returns:
        For each tensor name, the shape in the weights and the shape in the model. The shape of a
        missing tensor is None.
    """
    current = model.state_dict()
    shapes = [{name: _shape(name, value) for name, value in state.items()} for state in (weights, current)]
    pairs = {name: (shapes[0].get(name), shapes[1].get(name)) for name in {**current, **weights}}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def _shape(name: str, value: Any) -> list[int]:
    return [*value.shape] if isinstance(value, Tensor) and not name.endswith(_EXTRA_STATE) else []


def misfit_error(place: str, noun: str, model: nn.Module, differing: _Shapes) -> ConfigurationError:
    """Return an error that names what is missing, what is left over, and what has another shape.

    Args:
        place: Description of the file, such as ``"checkpoint last.ckpt"``.
        noun: Noun for the file: ``"checkpoint"`` or ``"file"``.
        model: The model that the weights do not fit.
        differing: Result of :func:`misfits`.
    """
    parts = {
        f"missing in the {noun}": [name for name, (old, _) in differing.items() if old is None],
        f"only in the {noun}": [name for name, (_, new) in differing.items() if new is None],
        "of another shape": [
            f"{name} ({old} in the {noun}, {new} in the model)"
            for name, (old, new) in differing.items()
            if old is not None and new is not None
        ],
    }
    words = "; ".join(f"{what}: {_first_three(names)}" for what, names in parts.items() if names)
    return ConfigurationError(
        f"{place} does not fit model.model {type(model).__name__}: {words}; use the model settings of the training run, or another {noun}"
    )


def _first_three(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


def _are_heads(differing: _Shapes) -> bool:
    """Return whether the tensors may be classifiers with different numbers of classes.

    The first dimension of a classifier is the number of classes. All tensors of the file must have
    the same number of classes, and all tensors of the model, too. All other dimensions must be
    equal.
    """
    shapes = [(old, new) for old, new in differing.values() if old and new]
    alike = {(old[0], new[0]) for old, new in shapes}
    return (
        len(shapes) == len(differing) and len(alike) == 1 and all(old[1:] == new[1:] for old, new in shapes)
    )
