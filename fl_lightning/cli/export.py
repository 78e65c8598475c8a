"""``export RUN``: a run's model as one file that needs no fl_lightning."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from fl_lightning.cli.messages import command
from fl_lightning.cli.trained_model import model_parser, restore
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import atomic_write

_DESCRIPTION = """\
Write a run's model as one file that needs no fl_lightning: for torch.export.load, or for ONNX if --output ends with .onnx.
The model takes raw inputs [N, ...] as in the data, normalises them, and has the names of its classes."""


@command()
def main(args: Sequence[str]) -> None:
    """Write the file of a run's model.

    Args:
        args: Arguments after ``export``.

    Raises:
        ConfigurationError: The run, the checkpoint or the client cannot be used, the shape of the
            inputs is unknown, or the packages for ONNX are missing.
    """
    options, settings = model_parser("export", _DESCRIPTION, ["RUN"]).parse_known_args(args)
    restored = restore(options.run, options.checkpoint, options.client, settings)
    shape, path = restored.data.input_shape, restored.new_file(options.output, "model", ".pt2")
    if shape is None:
        raise ConfigurationError(
            f"export: the data of {restored.run} define no input_shape; define it in the data module, or export the model of "
            "fl_lightning.load_model from Python"
        )
    if path.suffix == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise ConfigurationError(
            f"output: {path} needs the packages onnx and onnxscript; pip install onnx onnxscript, or write a .pt2 file"
        )
    restored.print_origin()
    model = restored.model()
    program = torch.export.export(
        model, (torch.zeros(2, *shape),), dynamic_shapes=[{0: torch.export.Dim("samples")}]
    )
    if path.suffix == ".onnx":
        torch.onnx.export(program, verbose=False).save(path)  # type: ignore[union-attr]  # None only for a file's name
    else:
        with atomic_write(path) as file:
            names = {"class_names": "\n".join(model.class_names or [])}
            torch.export.save(program, file, extra_files=names)
    print(f"model written to {path}")
