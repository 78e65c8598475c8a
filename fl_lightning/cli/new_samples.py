"""``test RUN FILE`` and ``predict RUN FILE``: a run's model on samples of a new file."""

import filecmp
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.cli.messages import command
from fl_lightning.cli.mistakes import imported
from fl_lightning.cli.trained_model import model_parser, restore
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.predictions import write_rows
from fl_lightning.files import user_path

_DESCRIPTION = {
    "predict": """\
Write predictions for a new file: a table, a .npz, a .pt or a folder of images, in the form of the run's data. Targets are
not read. The file of predictions is new, lies in the run directory, and has a line for each sample.""",
    "test": """\
Print the metrics of a run's model on a new file with targets: a table, a .npz, a .pt or a folder of images with a folder for
each class, in the form of the run's data.""",
}


@command()
def main(args: Sequence[str]) -> None:
    """Evaluate or predict the samples of a file.

    Args:
        args: ``test`` or ``predict``, and the arguments after it.

    Raises:
        ConfigurationError: The run, the checkpoint, the client or the file cannot be used.
    """
    act = args[0]
    parser = model_parser(act, _DESCRIPTION[act], ["RUN", "FILE"])
    options, settings = parser.parse_known_args(args[1:])
    path = user_path("file", options.file)
    if not path.exists():
        raise ConfigurationError(f"{act}: {path} does not exist; give a file, or a folder of images")
    restored = restore(options.run, options.checkpoint, options.client, settings)
    data = restored.config["data"]
    arguments = data.get("init_args", {})
    if act == "test":
        _refuse_trained(path, arguments)
    kind = imported(data["class_path"], "data")
    samples = kind.new_samples(path, arguments, restored.data.known, act == "test")
    restored.data.evaluate_on(samples)
    module, trainer = restored.module, restored.trainer
    restored.print_origin()
    if act == "test":
        trainer.test(module, datamodule=restored.data)
        return
    outputs: Any = trainer.predict(module, datamodule=restored.data)
    names = restored.data.names_of_classes
    if module.client_module is not None and module.client_module.overrides("predict_step"):
        names = None  # the module decides what its values mean
    else:
        outputs = [module.task.scores(output) for output in outputs]
    target = restored.new_file(options.output, f"predictions_{path.stem}", ".csv")
    written = write_rows(target, samples, outputs, names)
    print(f"{len(samples.places):,} predictions written to {written}")


def _refuse_trained(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise an error if the file is that of the run, of which a part has trained the model."""
    given = [
        Path(x).expanduser() for name in ("features", "data_dir") if isinstance(x := settings.get(name), str)
    ]
    for own in (known for known in given if known.exists()):
        if own.is_dir():
            inside = path.resolve().is_relative_to(own.resolve())
            parts = path.resolve().relative_to(own.resolve()).parts if inside else ("test",)
            trained = not {"test", "val"} & {*parts}
        else:
            trained = path.is_file() and filecmp.cmp(path, own, shallow=False)
        if trained:
            raise ConfigurationError(
                f"test: {path} holds samples that trained the model; give other samples, or evaluate the run's test data by test --config "
                "and --ckpt_path"
            )
