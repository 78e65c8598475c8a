"""A run's model outside of its run: ``load_model``, ``predict RUN [FILE]``, ``test RUN FILE``, ``export RUN``."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.seed import isolate_rng

from fl_lightning.cli.command_line import build
from fl_lightning.cli.messages import command, refusals
from fl_lightning.cli.mistakes import imported
from fl_lightning.cli.options import CommandParser
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run.trainer import as_list, make_trainer, on_cpu
from fl_lightning.experiments.run_directory.config_digest import full_name
from fl_lightning.experiments.run_directory.load_run import load_run
from fl_lightning.experiments.run_directory.predictions import write_predictions, write_rows
from fl_lightning.experiments.run_directory.trained_model import TrainedModel, _RecalledData
from fl_lightning.files import atomic_write, unused, user_file, user_path
from fl_lightning.methods.local_state import LocalState
from fl_lightning.methods.personal_evaluation import PersonalEvaluation
from fl_lightning.round.declarations import in_order

_KEPT = ("accelerator", "precision", "callbacks", "limit_predict_batches")
_QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

_DESCRIPTION = """\
Use a run's model on new data. predict writes a line for each sample of FILE, a table, .npz, .pt or folder of images in the
form of the run's data. Without FILE, it predicts the run's test data. test prints the metrics on a FILE with targets.
export writes the model as one file that takes raw inputs and needs no fl_lightning: for torch.export.load, or for ONNX if
--output ends with .onnx."""


def load_model(
    run: str | os.PathLike[str], checkpoint: str = "best", client: str | None = None
) -> TrainedModel:
    """Load the model of a run. The run's data are not needed.

    ::

        model = load_model("runs/mine/1f0c9a7e-s0")
        scores = model(torch.tensor([[63.0, 2.5]]))  # raw features, as in the table
        model.class_names[scores.argmax()]

    Args:
        run: The run directory, or the folder ``runs/NAME`` of a single run.
        checkpoint: ``"last"``, ``"best"``, or the path of a checkpoint. If the run has monitored no
            metric, ``"best"`` is the last checkpoint.
        client: Name of a client, or its id if the clients have no names. Only with a method that
            gives each client a separate model, such as ``FedBN``. Default: the server's model.

    Returns:
        The model in eval mode on the CPU. It normalises raw inputs, and has ``class_names``.

    Raises:
        ConfigurationError: There is no such run, checkpoint or client, the client has never
            trained, or a class that the run's ``config.yaml`` names cannot be made.
    """
    with refusals():
        return _Restored(run, checkpoint, client).model()


class _Restored:
    """A run's module with the state of a checkpoint, and a trainer without methods.

    Attributes:
        data: What the checkpoint knows about the run's data.
        own_data: The run's data module; None unless it is asked for, or the client's model needs it.
    """

    own_data: Any = None

    def __init__(
        self, run: str | os.PathLike[str], checkpoint: str, client: str | None, own_data: bool = False
    ) -> None:
        runs = [config.parent for config in user_path("run", run).glob("*/config.yaml")]
        self.run = load_run(runs[0] if len(runs) == 1 else run)
        best, last = (self.run.path / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
        named = {"best": best if best.is_file() else last, "last": last}
        self.path = named.get(checkpoint) or user_path("checkpoint", checkpoint)
        if self.path.is_file() and self.path.resolve().parent != last.parent.resolve():
            raise ConfigurationError(
                f"checkpoint: {self.path} is no checkpoint of the run {self.run.path}; give one in {last.parent}, or its own run"
            )
        kind, arguments = full_name(_RecalledData), {"checkpoint": str(self.path)}
        self.data: _RecalledData = self._restore({"class_path": kind, "init_args": arguments})
        number = None if client is None else self.data.client_number(client)
        if client is not None and self.personal is None:
            raise ConfigurationError(
                f"client: {client}, but all clients of {self.run.path} use the server's model; leave client out"
            )
        fine_tunes = client is not None and not isinstance(self.personal, LocalState)
        if own_data or fine_tunes:
            self.own_data = self._restore(self.run.config["data"])
        if number is None or self.personal is None:
            return
        if fine_tunes:  # the client's model is trained on the client's data
            self.own_data.setup("fit")
        # configure_optimizers, which decides the layout, may use the trainer
        self.module.client.attach(max(int(self.run.config["trainer"]["max_epochs"]), 1))
        of_server = self.module.model.state_dict()
        own_state = self.personal.state_of_client(self.module, number)
        absent = isinstance(self.personal, LocalState) and number not in self.personal.memory
        if absent and any(not torch.equal(x, of_server[name].cpu()) for name, x in own_state.items()):
            raise ConfigurationError(
                f"client: {client} has trained in no round up to {self.data.round}, so its own state is that before training, which does not "
                "fit the server's weights; leave client out to use the server's model"
            )
        self.module.model.load_state_dict(own_state, strict=False)

    def _restore(self, data: Any) -> Any:
        """Make the run's objects with these data, load the checkpoint, and return the data module."""
        kept = {x: self.run.config["trainer"][x] for x in _KEPT if x in self.run.config["trainer"]}
        with TemporaryDirectory() as folder, isolate_rng():
            file = Path(folder) / "config.yaml"
            changes = {"data": data, "trainer": kept, "threads": None}
            file.write_text(yaml.safe_dump({**self.run.config, **changes}))
            cli = build(["--config", str(file)])
            given = vars(cli.config_init.fit.trainer)
            methods = in_order(as_list(given["callbacks"]))
            device = "cpu" if on_cpu(given["accelerator"]) else "auto"
            used = {**_QUIET, "accelerator": device, "precision": given["precision"]}
            self.limit = given["limit_predict_batches"]
            writers = [x for x in as_list(given["callbacks"]) if isinstance(x, BasePredictionWriter)]
            self.module, self.trainer = cli.model, make_trainer(used, callbacks=writers)
            self.personal = next((x for x in methods if isinstance(x, PersonalEvaluation)), None)
            restored = [*methods, cli.config_init.fit.checkpoint]
            restoring = make_trainer(used, callbacks=restored, limit_predict_batches=0)
            restoring.predict(self.module, datamodule=cli.datamodule, ckpt_path=str(self.path))
        return cli.datamodule

    def model(self) -> TrainedModel:
        return TrainedModel(self.module.model.cpu(), self.data.normalized, self.data.class_names).eval()


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
        restored = _Restored(options.run, options.checkpoint, options.client, own_data)
        whose = "server" if options.client is None else options.client
        print(f"model of {whose}, round {restored.data.round}, from {restored.path}", flush=True)
        if restored.personal is not None and options.client is None:
            kind = type(restored.personal).__name__
            print(f"with {kind}, each client uses a model of its own: choose it by --client NAME")
        words = f"{restored.run.path.resolve().name}_{restored.path.stem}_round_{restored.data.round}"
        words += "" if options.client is None else f"_{options.client.replace('/', '-')}"
        if act == "export":
            _export(restored, options.output or restored.run.path / f"model_{words}.pt2")
        elif own_data:
            _predict_test_data(restored, options.output or restored.run.path / f"predictions_{words}")
        else:
            place = options.output if act == "predict" else None
            _use_file(restored, user_path("file", options.file), words, act, place)


def _use_file(restored: _Restored, file: Path, words: str, act: str, output: str | None) -> None:
    """Test the samples of a file, or write their predictions."""
    config = restored.run.config["data"]
    if act == "test":
        _refuse_trained(file, config.get("init_args", {}))
    new_samples = imported(config["class_path"], "data").new_samples
    samples = restored.data.samples = new_samples(file, restored.data, act == "test")
    for note in samples.notes:
        print(note)
    if act == "test":
        print(f"{len(samples.places):,} samples of {file}", flush=True)
        restored.trainer.test(restored.module, datamodule=restored.data)
        return
    outputs = _outputs(restored, restored.data)
    names = None if restored.module.client.predicts else restored.data.class_names
    place = output or restored.run.path / f"predictions_{file.stem}_{words}.csv"
    print(write_rows(user_file("output", place), samples, outputs, names))


def _predict_test_data(restored: _Restored, output: str | Path) -> None:
    """Write predictions of the run's test data, or of its ``predict_dataloader``."""
    data, path = restored.own_data, user_file("output", output)
    restored.trainer.limit_predict_batches = 1.0 if restored.limit is None else restored.limit
    outputs = _outputs(restored, data)
    batches: Iterable[Any] = data.predict_dataloader()
    if isinstance(batches, list):  # the loaders of all clients
        batches = chain.from_iterable(batches)
    # with limit_predict_batches, the last batches have no predictions
    batches = islice(batches, len(outputs))
    path = path.with_suffix("") if path.suffix == ".csv" else path
    print(write_predictions(path, outputs, batches, data, restored.module.client.predicts))


def _outputs(restored: _Restored, data: Any) -> list[Any]:
    raw: list[Any] = restored.trainer.predict(restored.module, datamodule=data) or []
    loaders = restored.trainer.predict_dataloaders
    if isinstance(loaders, list) and len(loaders) > 1:
        raw = [*chain.from_iterable(raw)]
    return raw if restored.module.client.predicts else [*map(restored.module.task.scores, raw)]


def _refuse_trained(file: Path, settings: Mapping[str, Any]) -> None:
    own = Path(str(settings.get("features") or settings.get("data_dir"))).expanduser()
    trained = own / "train" if (own / "train").is_dir() else own
    is_copy = file.is_file() and own.is_file() and file.read_bytes() == own.read_bytes()
    inside = trained.is_dir() and trained.resolve() in file.resolve().parents
    if is_copy or inside or file.resolve() in (own.resolve(), trained.resolve()):
        raise ConfigurationError(
            f"test: {file} holds samples that trained the model; give others, or use test --config for the run's test data"
        )


def _export(restored: _Restored, output: str | Path) -> None:
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
