"""``python -m fl_lightning list``: list class names, shipped files, or a model's parameters."""

import re
from collections.abc import Sequence
from inspect import isabstract, isfunction
from typing import get_type_hints

import lightning as L
from tabulate import tabulate
from torch import nn

from fl_lightning import aggregation, attacks, callbacks, datamodules, models
from fl_lightning.batch_norm.kinds import buffer_kinds, parameter_kinds
from fl_lightning.cli.command_line import build
from fl_lightning.cli.federated_cli import FederatedCLI
from fl_lightning.cli.mistakes import base_classes
from fl_lightning.cli.print_errors import command
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.console import print_table
from fl_lightning.errors import ConfigurationError, check_choice
from fl_lightning.experiments.run.trainer import as_list
from fl_lightning.folders import folder_of
from fl_lightning.models.norm import NORMS
from fl_lightning.round.declarations import Declarations, in_order
from fl_lightning.round.hooks import configure_batch_norm, extend_model
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import stages_in_words, treatment_table
from fl_lightning.yaml_file import read_yaml

LISTS = {
    "methods": "trainer.callbacks",
    "models": "model.model",
    "data": "data",
    "partitions": "data.partition",
    "norms": "model.model.norm",
    "aggregators": "model.aggregator",
    "attacks": "trainer.callbacks.attack",
}
"""Settings that accept a class, keyed by the kind of class, such as ``attacks``."""


FILES = {"configs": "fit --config", "studies": "study"}
"""Commands that accept a shipped file, keyed by the kind of file."""


@command()
def main(args: Sequence[str]) -> None:
    """Print names and descriptions of methods, models and so on, or print a model's parameters.

    Args:
        args: Kinds such as ``methods`` (default: all kinds), or the word ``parameters`` followed by
            arguments of ``fit``.
    """
    if args[:1] == ["parameters"]:
        if not args[1:]:
            raise ConfigurationError(
                "list parameters needs a model: add --config FILE, such as --config configs/quickstart.yaml"
            )
        print(list_parameters(build(args[1:])))
        return
    kinds = LISTS | FILES
    for kind in args:
        check_choice("list", kind, (*kinds, "parameters"))
    for kind in args or kinds:
        print_table(f"{kind.capitalize()} ({kinds[kind]})", files(kind) if kind in FILES else named(kind))


def files(kind: str) -> dict[str, str]:
    """Return a description of each shipped file of a kind.

    The description of a study is its title. The description of a configuration is the comment in
    the file's first line.

    Args:
        kind: Key of :data:`FILES`.
    """
    home = folder_of("configs").parent
    folders = ("configs", "configs/overlays") if kind == "configs" else ("configs/studies",)
    lines = {}
    for path in (path for folder in folders for path in sorted((home / folder).glob("*.yaml"))):
        text = path.read_text(encoding="utf-8")
        title = read_yaml(text).get("title") if kind == "studies" else None
        lines[path.relative_to(home).as_posix()] = title or text.partition("\n")[0].removeprefix("# ")
    return lines


def list_parameters(cli: FederatedCLI) -> str:
    """Return a table with the name, shape, kind and treatment of a model's parameters and buffers.

    Args:
        cli: Command line with a model, from :func:`~fl_lightning.cli.command_line.build`.

    Raises:
        ConfigurationError: The number of rounds is unknown, or two methods' treatments conflict.
    """
    module: FederatedModule = cli.model
    callbacks = in_order(as_list(cli.config_init.fit.trainer.callbacks))
    module.trainer = L.Trainer(callbacks=[*callbacks], logger=False, enable_checkpointing=False)
    extend_model(module.model, callbacks, module.seed)
    # skip methods without a policy: their setup may need data, and has no effect on the table
    configure_batch_norm(module, [cb for cb in callbacks if type(cb).policy is not Declarations.policy])
    treatments = treatment_table(module.model, callbacks, _rounds(cli))
    kinds = {**parameter_kinds(module.model), **buffer_kinds(module.model)}
    rows = [
        (
            name,
            list(tensor.shape),
            kinds.get(name, "not trainable"),
            stages_in_words(treatments[name]) if name in kinds else "not sent",
        )
        for name, tensor in (*module.model.named_parameters(), *module.model.named_buffers())
    ]
    return tabulate(rows, ("name", "shape", "kind", "treatment"), "simple")


def _rounds(cli: FederatedCLI) -> int:
    module: FederatedModule = cli.model
    data: FederatedDataModule = cli.datamodule
    if module.budget_epochs is None:
        rounds: int = cli.config_init.fit.trainer.max_epochs
        if rounds in (None, -1):
            raise ConfigurationError("trainer.max_epochs: set the number of rounds, or model.budget_epochs")
        return rounds
    data.prepare_data()
    data.setup("fit")
    return module.make_plan(data).limit(module.budget_epochs)


def named(kind: str) -> dict[str, str]:
    """Return the name and the first line of the docstring of each class of a kind.

    Args:
        kind: Key of :data:`LISTS`.
    """
    if kind == "norms":
        return dict(NORMS)
    module, base = {
        "methods": (callbacks, L.Callback),
        "models": (models, nn.Module),
        "data": (datamodules, FederatedDataModule),
        "partitions": (datamodules, datamodules.Partition),
        "aggregators": (aggregation, aggregation.Aggregator),
        "attacks": (attacks, attacks.Attack),
    }[kind]
    lines = {}
    for name in sorted(module.__all__, key=str.lower):
        thing = getattr(module, name)
        made = get_type_hints(thing).get("return") if isfunction(thing) else thing
        is_base = thing in base_classes() or isabstract(thing)
        if isinstance(made, type) and issubclass(made, base) and not is_base:
            # a configuration must name a function by its dotted path
            name = f"{module.__name__}.{name}" if isfunction(thing) else name
            line = (thing.__doc__ or "").partition("\n")[0]
            lines[name] = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", line).replace("``", "")
    return lines
