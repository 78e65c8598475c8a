"""The commands ``predict RUN [FILE]``, ``test RUN FILE`` and ``export RUN``."""

import copy
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fl_lightning.cli.load_model import RestoredRun
from fl_lightning.cli.mistakes import imported
from fl_lightning.cli.options import CommandParser
from fl_lightning.cli.print_errors import command
from fl_lightning.client_data.new_samples import NewSamples
from fl_lightning.errors import ConfigurationError, counted
from fl_lightning.experiments.run_directory.predictions import write_predictions, write_rows
from fl_lightning.files import atomic_write, unused, user_file, user_path

_DESCRIPTION = """\
Use a run's model on new data. predict writes a line for each sample of FILE, a table, .npz, .pt or folder of images in the
form of the run's data. Without FILE, it predicts the run's test data. test prints the metrics on a FILE with targets.
export writes the model as one file that takes raw inputs and needs no fl_lightning: for torch.export.load, or for ONNX if
--output ends with .onnx."""


def main(args: Sequence[str]) -> None:
    """Predict or test samples, or export a model.

    Args:
        args: ``predict``, ``test`` or ``export``, and the arguments after it.

    Raises:
        ConfigurationError: The run, the checkpoint, the client or the file cannot be used.
    """
    act, *given = args
    with command():
        parser = CommandParser(act, _DESCRIPTION)
        parser.add_argument("run", metavar="RUN", help="run directory, or folder runs/NAME of a single run")
        if act != "export":
            words = "samples in the form of the run's data"
            may_lack = act == "predict"
            words += " (default: the run's test data)" if may_lack else ""
            parser.add_argument("file", metavar="FILE", nargs="?" if may_lack else None, help=words)
        words = "best, last, or the path of a checkpoint (default: best, or last if no metric is monitored)"
        parser.add_argument("--checkpoint", default="best", help=words)
        parser.add_argument("--client", metavar="NAME", help="use the client's model, as in FedBN")
        if act != "test":
            parser.add_argument("--output", metavar="FILE", help="default: a file in the run directory")
        options = parser.parse_args(given)
        own_data = act == "predict" and options.file is None
        each = act == "predict" and not own_data and options.client is None
        restored = RestoredRun(options.run, options.checkpoint, options.client, own_data)
        whose = "server" if options.client is None else options.client
        model = "models" if each and restored.personal is not None else f"model of {whose}"
        print(f"{model}, round {restored.data.round}, from {restored.path}", flush=True)
        if options.client is None and not each:
            _tell_of_clients(restored)
        words = f"{restored.run.path.resolve().name}_{restored.path.stem}_round_{restored.data.round}"
        words += "" if options.client is None else f"_{options.client.replace('/', '-')}"
        if act == "export":
            place = options.output
            _export(restored, restored.run.path / f"model_{words}.pt2" if place is None else place)
        elif own_data:
            _predict_test_data(restored, options.output, restored.run.path / f"predictions_{words}")
        else:
            place = options.output if act == "predict" else None
            _use_file(restored, user_path("file", options.file), words, act, place, each)


def _use_file(
    restored: RestoredRun, file: Path, words: str, act: str, output: str | None, each: bool
) -> None:
    """Test the samples of a file, or write their predictions."""
    config = restored.run.config["data"]
    if act == "test":
        _refuse_trained(file, config.get("init_args", {}))
    kind = imported(config["class_path"], "data")
    samples = restored.data.samples = kind.new_samples(file, restored.data, act == "test")
    for note in samples.notes:
        print(note)
    if act == "test":
        print(f"{len(samples.places):,} samples of {file}", flush=True)
        if hasattr(kind, "is_training_sample"):
            _tell_trained(restored, file, samples)
        restored.trainer.test(restored.module, datamodule=restored.data)
        return
    columns: dict[str, Sequence[str]] = {}
    if each and restored.personal is not None and samples.clients is not None:
        outputs, columns["model"] = _of_each_client(restored, samples)
    else:
        if each:
            _tell_of_clients(restored)
        outputs = _predicted(restored)
    names = None if restored.module.client.predicts else restored.data.class_names
    place = restored.run.path / f"predictions_{file.stem}_{words}.csv" if output is None else output
    print(write_rows(user_file("output", place), samples, outputs, names, columns))


def _tell_of_clients(restored: RestoredRun) -> None:
    if restored.personal is not None:
        kind = type(restored.personal).__name__
        print(f"with {kind}, each client uses a model of its own: choose it by --client NAME")


def _predicted(restored: RestoredRun) -> list[Any]:
    outputs: Any = restored.trainer.predict(restored.module, datamodule=restored.data)
    return _scores(restored, outputs)


def _of_each_client(restored: RestoredRun, samples: NewSamples) -> tuple[list[Any], list[str]]:
    """Predict each sample by the model of its client. Return the outputs and the names of the models.

    A client that the run does not have, or that has never trained, gets the server's model.
    """
    parts: dict[str, list[int]] = {}
    for index, client in enumerate(samples.clients or ()):
        parts.setdefault(client, []).append(index)
    known = [client for client in parts if client in restored.data.client_names]
    states = restored.client_states(known, skip_untrained=True)
    of_server = copy.deepcopy(restored.module.model.state_dict())
    outputs: list[Any] = [None] * len(samples.places)
    models = [client if client in states else "(server)" for client in samples.clients or ()]
    for client, indices in parts.items():
        restored.module.model.load_state_dict(states.get(client, of_server))
        restored.data.samples = samples.some(indices)
        rows = torch.cat(_predicted(restored))[:, None]
        for index, row in zip(indices, rows, strict=True):
            outputs[index] = row
    without = {client or "empty": len(rows) for client, rows in parts.items() if client not in states}
    print(f"each sample by the model of its client ({len(states)} clients)")
    if without:
        print(f"by the server's model, as the run has no model of these clients: {counted(without)}")
    return outputs, models


def _predict_test_data(restored: RestoredRun, output: str | None, default: Path) -> None:
    """Write predictions of the run's test data, or of its ``predict_dataloader``."""
    folder, table = (
        (default, default.with_name(f"{default.name}.csv"))
        if output is None
        else 2 * (user_file("output", output),)
    )
    trainer = restored.trainer
    trainer.limit_predict_batches = 1.0 if restored.limit is None else restored.limit
    parts: list[Any] = trainer.predict(restored.module, datamodule=restored.own_data) or []
    if parts and isinstance(loaders := trainer.predict_dataloaders, list) and len(loaders) > 1:
        parts = [*chain.from_iterable(parts)]  # Lightning returns a list for each loader
    outputs, own = _scores(restored, parts), restored.module.client.predicts
    print(write_predictions(folder, table, outputs, restored.kept.batches, restored.own_data, own))


def _scores(restored: RestoredRun, outputs: list[Any]) -> list[Any]:
    return outputs if restored.module.client.predicts else [*map(restored.module.task.scores, outputs)]


def _tell_trained(restored: RestoredRun, file: Path, samples: NewSamples) -> None:
    """Print how many samples of a file are training samples of the run. Refuse a file of such samples."""
    try:
        trained = sum(restored.run_data().is_training_sample(samples))
    except ConfigurationError as error:
        print(f"not compared with the run's training samples: {error}")
        return
    if trained == len(samples.places):
        raise ConfigurationError(
            f"test: all {trained:,} samples of {file} are training samples of the run; give others"
        )
    if trained:
        print(f"{trained:,} of them equal a training sample of the run in all features and the target")


def _refuse_trained(file: Path, settings: Mapping[str, Any]) -> None:
    own = Path(str(settings.get("features") or settings.get("data_dir"))).expanduser()
    trained = own / "train" if (own / "train").is_dir() else own
    is_copy = file.is_file() and own.is_file() and file.read_bytes() == own.read_bytes()
    inside = trained.is_dir() and trained.resolve() in file.resolve().parents
    if is_copy or inside or file.resolve() in (own.resolve(), trained.resolve()):
        raise ConfigurationError(
            f"test: {file} holds samples that trained the model; give others, or use test --config for the run's test data"
        )


def _export(restored: RestoredRun, output: str | Path) -> None:
    model, shape = restored.model(), restored.data.input_shape
    path = unused(user_file("output", output))
    if shape is None:
        raise ConfigurationError(
            f"export: the data of {restored.run.path} have no input_shape; define it in the data module, or export load_model(RUN)"
        )
    program = torch.export.export(
        model, (torch.zeros(2, *shape),), dynamic_shapes=[{0: torch.export.Dim("samples")}]
    )
    if path.suffix == ".onnx":
        torch.onnx.export(program, verbose=False).save(path)  # type: ignore[union-attr]  # a program, without a file
    else:
        with atomic_write(path) as file:
            table = getattr(model.normalize, "table", None)
            names = {} if table is None else {"columns": table.columns, "categories": table.categories}
            facts = {"class_names": "\n".join(model.class_names or []), "inputs": json.dumps(names)}
            torch.export.save(program, file, extra_files=facts)
    print(f"model written to {path}")
