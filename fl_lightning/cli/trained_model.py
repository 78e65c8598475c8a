"""``load_model``: the model of a run, without the run's data."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.utilities.seed import isolate_rng

from fl_lightning.cli.command_line import build
from fl_lightning.cli.messages import refusals
from fl_lightning.cli.options import CommandParser
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run.trainer import as_list, make_trainer
from fl_lightning.experiments.run_directory.checkpoint_io import check_run, load_checkpoint
from fl_lightning.experiments.run_directory.config_digest import full_name
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.load_run import load_run
from fl_lightning.experiments.run_directory.trained_model import RecalledData, TrainedModel
from fl_lightning.files import unused, user_file, user_path
from fl_lightning.methods.local_state import LocalState
from fl_lightning.methods.personal_evaluation import PersonalEvaluation
from fl_lightning.round.hooks import extend_model, in_order
from fl_lightning.round.module import FederatedModule

_KEPT = ("accelerator", "precision", "plugins", "callbacks")
"""Settings of the run's trainer on which predictions depend."""

_QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@dataclass(frozen=True)
class Restored:
    """A run's module with the state of a checkpoint.

    Attributes:
        run: The run directory.
        config: The run's configuration.
        checkpoint: The checkpoint.
        round: The checkpoint's round.
        client: The client whose model it is; None for the server's model.
        personal: Name of the method that gives each client a separate model, or None.
        module: The module.
        data: What the checkpoint keeps of the data.
        trainer: A trainer without callbacks.
    """

    run: Path
    config: Config
    checkpoint: Path
    round: int
    client: str | None
    personal: str | None
    module: FederatedModule
    data: RecalledData
    trainer: L.Trainer

    def model(self) -> TrainedModel:
        """Return the model, in eval mode, with the normalisation of its inputs."""
        return TrainedModel(self.module.model.cpu(), self.data.normalize, self.data.names_of_classes).eval()

    def new_file(self, output: str | None, stem: str, suffix: str) -> Path:
        """Return the path of a new file, by default in the run directory and named by the model."""
        if output is not None:
            return unused(user_file("output", output))
        words = [stem, self.run.resolve().name, self.checkpoint.stem, f"round_{self.round}"]
        words += [] if self.client is None else [re.sub(r"[^\w.-]+", "-", self.client)]
        return unused(self.run / f"{'_'.join(words)}{suffix}")

    def print_origin(self) -> None:
        """Print which model it is."""
        whose = "server" if self.client is None else self.client
        print(f"model of {whose}, round {self.round}, from {self.checkpoint}", flush=True)
        if self.personal is not None and self.client is None:
            print(f"with {self.personal}, each client uses a model of its own: choose it by --client NAME")


def model_parser(command: str, description: str, arguments: Sequence[str]) -> CommandParser:
    """Return the parser of a command that uses a run's model.

    Args:
        command: Name of the command.
        description: Text of its help.
        arguments: Names of its arguments.
    """
    usage = f"{' '.join(arguments)} [--checkpoint best|last|PATH] [--client NAME] [--output FILE] [settings of the run]"
    parser = CommandParser(command, description, usage)
    for name in arguments:
        parser.add_argument(name.lower(), metavar=name)
    words = "best, last, or the path of a checkpoint (default: best, or last if no metric is monitored)"
    parser.add_argument("--checkpoint", default="best", help=words)
    words = "use the model of this client, for methods such as FedBN"
    parser.add_argument("--client", metavar="NAME", help=words)
    parser.add_argument(
        "--output", metavar="FILE", help="file to write (default: a name in the run directory)"
    )
    return parser


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
        client: Name or number of a client. Only with a method that gives each client a separate
            model, such as ``FedBN``. Default: the server's model.

    Returns:
        The model in eval mode on the CPU. It normalises raw inputs, and has ``class_names``.

    Raises:
        ConfigurationError: There is no such run, checkpoint or client, or a class that the run's
            ``config.yaml`` names cannot be made.
    """
    threads = torch.get_num_threads()
    try:
        with refusals():
            return restore(run, checkpoint, client).model()
    finally:
        torch.set_num_threads(threads)  # the run's setting threads is no setting of the caller


def restore(
    run: str | os.PathLike[str],
    checkpoint: str = "best",
    client: str | None = None,
    settings: Sequence[str] = (),
) -> Restored:
    """Make the module of a run, and load its checkpoint.

    Args:
        run: See :func:`load_model`.
        checkpoint: See :func:`load_model`.
        client: See :func:`load_model`.
        settings: Arguments of ``fit`` that override the run's settings, such as
            ``["--trainer.accelerator", "cpu"]``.

    Raises:
        ConfigurationError: See :func:`load_model`.
    """
    runs = [config.parent for config in user_path("run", run).glob("*/config.yaml")]
    loaded = load_run(runs[0] if len(runs) == 1 else run)
    attempt = Attempt(loaded.path)
    path = _checkpoint(attempt, checkpoint)
    content = load_checkpoint(path)
    config = {**loaded.config, "trainer": {x: loaded.config["trainer"].get(x) for x in _KEPT}}
    recalled = {"class_path": full_name(RecalledData), "init_args": {"checkpoint": str(path)}}
    module, data, kept = _loaded({**config, "data": recalled}, path, content, settings)
    assert isinstance(data, RecalledData)
    methods = module.federated_callbacks
    personal = next((method for method in methods if isinstance(method, PersonalEvaluation)), None)
    if client is not None:
        if personal is None:
            names = ", ".join(type(method).__name__ for method in methods) or "FedAvg"
            raise ConfigurationError(
                f"client: {client}, but in {attempt.path} all clients use the server's model ({names}); leave client out"
            )
        number = data.client_number(client)
        if not isinstance(personal, LocalState):  # the client's model is trained on the client's data
            module, own, kept = _loaded({**config, "data": loaded.config["data"]}, path, content, settings)
            own.setup("fit")
            personal = next(x for x in module.federated_callbacks if isinstance(x, PersonalEvaluation))
        tensors = {**dict(module.model.named_parameters()), **dict(module.model.named_buffers())}
        with torch.no_grad():
            for name, value in personal.state_of_client(module, number).items():
                tensors[name].copy_(value)
    trainer = make_trainer(kept, **_QUIET)
    kind = None if personal is None else type(personal).__name__
    facts = attempt.path, loaded.config, path, content["global_step"], client, kind
    return Restored(*facts, module, data, trainer)


def _checkpoint(attempt: Attempt, checkpoint: str) -> Path:
    if checkpoint not in ("best", "last"):
        return user_path("checkpoint", checkpoint)
    names = ["best.ckpt", "last.ckpt"] if checkpoint == "best" else ["last.ckpt"]
    paths = [attempt.checkpoints / name for name in names]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise ConfigurationError(
            f"checkpoint: {attempt.path} has no {names[-1]}; resume the run, or give the path of a checkpoint"
        )
    return found


def _loaded(
    config: Config, path: Path, checkpoint: Mapping[str, Any], settings: Sequence[str]
) -> tuple[FederatedModule, FederatedDataModule, Config]:
    """Make the objects of a configuration, and load a checkpoint.

    Returns:
        The module, its data, and the settings of the trainer.
    """
    with TemporaryDirectory() as folder, isolate_rng():
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        try:
            cli = build(["--config", str(file), *settings])
        except ConfigurationError as error:
            if settings:
                raise
            place = path.parents[1] / "config.yaml"
            raise ConfigurationError(
                f"{error}; {place} must name classes that can be imported here, with their arguments"
            ) from error
        given = vars(cli.config_init.fit.trainer)
        methods = in_order(as_list(given["callbacks"]))
        kept = {name: given[name] for name in _KEPT if name != "callbacks"}
        extend_model(cli.model.model, methods, cli.model.seed)
        check_run(path, checkpoint, cli.model.model)
        trainer = make_trainer(kept, **_QUIET, callbacks=methods, limit_predict_batches=0)
        trainer.predict(cli.model, datamodule=cli.datamodule, ckpt_path=str(path))
    return cli.model, cli.datamodule, kept
