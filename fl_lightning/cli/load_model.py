"""``load_model``: the model of a run, outside of the run."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
import yaml
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.seed import isolate_rng

from fl_lightning.cli.command_line import build
from fl_lightning.cli.mistakes import imported
from fl_lightning.cli.print_errors import refusals
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run.trainer import as_list, make_trainer, on_cpu
from fl_lightning.experiments.run_directory.config_digest import class_path, full_name
from fl_lightning.experiments.run_directory.load_run import loaded_run
from fl_lightning.experiments.run_directory.predictions import KeptBatches
from fl_lightning.experiments.run_directory.trained_model import TrainedModel, _RecalledData
from fl_lightning.files import user_path
from fl_lightning.methods.local_state import LocalState
from fl_lightning.methods.personal_evaluation import PersonalEvaluation
from fl_lightning.round.declarations import Declarations, in_order

_KEPT = ("accelerator", "precision", "callbacks", "limit_predict_batches")
_QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def _predicts(callback: Any) -> bool:
    """Return whether a callback of a run affects its predictions.

    Callbacks such as ``EarlyStopping`` do not. Those of a run from Python may lack arguments in its
    ``config.yaml``, so they could not be made.
    """
    kind = imported(class_path(callback)) if class_path(callback) else None
    return not isinstance(kind, type) or issubclass(kind, Declarations | BasePredictionWriter)


def load_model(
    run: str | os.PathLike[str], checkpoint: str = "best", client: str | None = None
) -> TrainedModel:
    """Load the model of a run. The run's data are not needed, except for clients' models of FedBABU.

    ::

        model = load_model("runs/mine/1f0c9a7e-s0")
        scores = model(torch.tensor([[63.0, 2.5]]))  # raw features, as in the table
        model.class_names[scores.argmax()]

    The model takes raw inputs:

    - The features of a table, in the order of ``model.normalize.table.columns``. They may have any
      number type. Give large numbers, such as times in seconds, as float64. NaN is a missing value.
    - In a column of categories, the position of the category in
      ``model.normalize.table.categories[name]``, from 0. -1 is an unknown category.
    - The pixels of an image, from 0 to 255, in the size of the run.

    The outputs are those of the network. For class scores, ``scores.softmax(1)`` gives the
    probabilities that ``predict`` writes.

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
        return RestoredRun(run, checkpoint, client).model()


class RestoredRun:
    """A run's module with the state of a checkpoint, and a trainer without methods.

    Args:
        run: The run directory, or the folder of a single run.
        checkpoint: ``"last"``, ``"best"``, or the path of a checkpoint.
        client: Name of the client whose model is restored; None for the server's model.
        own_data: Whether to restore the run's data module (default False).

    Attributes:
        data: What the checkpoint knows about the run's data.
        limit: The run's ``trainer.limit_predict_batches``.
        kept: Callback with the batches that ``trainer`` predicts.
        own_data: The run's data module; None unless it is asked for, or the client's model needs it.
    """

    own_data: Any = None

    def __init__(
        self,
        run: str | os.PathLike[str],
        checkpoint: str,
        client: str | None,
        own_data: bool = False,
    ) -> None:
        self.kept = KeptBatches()
        runs = [config.parent for config in user_path("run", run).glob("*/config.yaml")]
        self.run = loaded_run("run", runs[0] if len(runs) == 1 else run)
        best, last = (self.run.path / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
        named = {"best": best if best.is_file() else last, "last": last}
        self.path = named.get(checkpoint) or user_path("checkpoint", checkpoint)
        if not self.path.is_file():
            raise ConfigurationError(
                f"checkpoint: {self.path} does not exist; give best, last or a file in {last.parent}"
            )
        if self.path.resolve().parent != last.parent.resolve():
            raise ConfigurationError(
                f"checkpoint: {self.path} is no checkpoint of the run {self.run.path}; give one in {last.parent}, or its own run"
            )
        kind, arguments = full_name(_RecalledData), {"checkpoint": str(self.path)}
        self.data: _RecalledData = self._restore({"class_path": kind, "init_args": arguments})
        if client is not None:
            self.data.client_number(client)
        if client is not None and self.personal is None:
            raise ConfigurationError(
                f"client: {client}, but all clients of {self.run.path} use the server's model; leave client out"
            )
        if own_data:
            self.own_data = self._restore(self.run.config["data"])
        if client is not None:
            states = self.client_states([client])  # which may make the module anew
            self.module.model.load_state_dict(states[client])

    def client_states(
        self, clients: Iterable[str], skip_untrained: bool = False
    ) -> dict[str, Mapping[str, torch.Tensor]]:
        """Return all weights of the models of some clients, by name.

        Args:
            clients: Names of the clients.
            skip_untrained: Whether to leave out clients that have never trained.

        Raises:
            ConfigurationError: There is no such client, or a client has never trained.
        """
        if not isinstance(self.personal, LocalState):  # a client's model is trained on its data
            self.own_data = self._restore(self.run.config["data"])
            self.own_data.setup("fit")
        # configure_optimizers, which decides the layout, may use the trainer
        self.module.client.attach(max(int(self.run.config["trainer"]["max_epochs"]), 1))
        states = {client: self._client_state(client, skip_untrained) for client in clients}
        return {client: state for client, state in states.items() if state is not None}

    def _client_state(self, client: str, skip_untrained: bool) -> Mapping[str, torch.Tensor] | None:
        assert self.personal is not None
        of_server = self.module.model.state_dict()
        number = self.data.client_number(client)
        own_state = self.personal.state_of_client(self.module, number)
        absent = isinstance(self.personal, LocalState) and number not in self.personal.memory
        if absent and any(not torch.equal(x, of_server[name].cpu()) for name, x in own_state.items()):
            if skip_untrained:
                return None
            raise ConfigurationError(
                f"client: {client} has trained in no round up to {self.data.round}, so its own state is that before training, which does not "
                "fit the server's weights; leave client out to use the server's model"
            )
        return {**of_server, **own_state}

    def run_data(self) -> Any:
        """Return the run's data module, set up to train.

        Raises:
            ConfigurationError: The data cannot be read.
        """
        with isolate_rng():
            data = self._built(self.run.config["data"]).datamodule
            data.setup("fit")
        return data

    def _built(self, data: Any) -> Any:
        """Make the run's objects with these data."""
        kept = {x: self.run.config["trainer"][x] for x in _KEPT if x in self.run.config["trainer"]}
        with TemporaryDirectory() as folder:
            file = Path(folder) / "config.yaml"
            kept["callbacks"] = [x for x in as_list(kept.get("callbacks")) if _predicts(x)]
            changes = {"data": data, "trainer": kept, "threads": None}
            file.write_text(yaml.safe_dump({**self.run.config, **changes}))
            try:
                return build(["--config", str(file)])
            except ConfigurationError as error:
                place = re.sub(
                    rf"\({re.escape(str(file))}, line \d+\)", f"({self.run.path / 'config.yaml'})", str(error)
                )
                raise ConfigurationError(place) from error

    def _restore(self, data: Any) -> Any:
        """Make the run's objects with these data, load the checkpoint, and return the data module."""
        with isolate_rng():
            cli = self._built(data)
            given = vars(cli.config_init.fit.trainer)
            methods = in_order(as_list(given["callbacks"]))
            device = "cpu" if on_cpu(given["accelerator"]) else "auto"
            used = {**_QUIET, "accelerator": device, "precision": given["precision"]}
            self.limit = given["limit_predict_batches"]
            writers = [x for x in as_list(given["callbacks"]) if isinstance(x, BasePredictionWriter)]
            self.module, self.trainer = cli.model, make_trainer(used, callbacks=[*writers, self.kept])
            self.personal = next((x for x in methods if isinstance(x, PersonalEvaluation)), None)
            restored = [*methods, cli.config_init.fit.checkpoint]
            restoring = make_trainer(used, callbacks=restored, limit_predict_batches=0)
            with catch_warnings():
                # the callbacks that are left out, such as EarlyStopping, only train
                filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")
                restoring.predict(self.module, datamodule=cli.datamodule, ckpt_path=str(self.path))
        return cli.datamodule

    def model(self) -> TrainedModel:
        """Return the model on the CPU, in eval mode, with its preprocessing."""
        return TrainedModel(self.module.model.cpu(), self.data.normalized, self.data.class_names).eval()
