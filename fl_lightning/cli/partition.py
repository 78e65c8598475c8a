"""``python -m fl_lightning partition``: show a configuration's clients, without training."""

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from fl_lightning import __version__
from fl_lightning.cli.command_line import main as run
from fl_lightning.cli.federated_cli import FederatedCLI
from fl_lightning.cli.options import CommandParser
from fl_lightning.cli.parser import ConciseParser
from fl_lightning.cli.print_errors import command
from fl_lightning.client_data.federated import FederatedDataModule, PartitionRecord
from fl_lightning.console import print_table
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import user_file, user_path, write_text
from fl_lightning.pictures.federation import clients_figure
from fl_lightning.pictures.style import write_figure

_DESCRIPTION = """\
Show the clients of a configuration, without a model and without training: their sizes, the differences between their classes,
and a picture. All options of fit are accepted, such as --data.partition.alpha 0.1."""


class DataCLI(FederatedCLI):
    """Command line that reads all settings of ``fit``, but creates only the data module."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the settings of ``fit``. All settings of the model are optional."""
        super().add_arguments_to_parser(parser)
        for action in parser._actions:
            action.required &= not action.dest.startswith("model.")

    def instantiate_classes(self) -> None:
        """Create the data module."""
        parser = ConciseParser()
        parser.add_subclass_arguments(FederatedDataModule, "data")
        self.datamodule = parser.instantiate(parser.parse_object({"data": self.config.fit.data})).data

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing, because there is no trainer."""


@command()
def main(args: Sequence[str]) -> None:
    """Print a table of the clients, and write a picture. With ``--save``, write a partition file.

    Args:
        args: Arguments after ``partition``.
    """
    parser = CommandParser(
        "partition", _DESCRIPTION, "--config FILE [--output FOLDER] [--save FILE.json] [options of fit]"
    )
    words = "folder of partition.png (default: here)"
    parser.add_argument("--output", metavar="FOLDER", default=".", help=words)
    words = "write the partition to a file, for the setting partition: FromFile(FILE.json)"
    parser.add_argument("--save", metavar="FILE.json", help=words)
    options, fit_options = parser.parse_known_args(args)
    saved = None if options.save is None else user_file("save", options.save)
    cli = run(["fit", *fit_options], cli_class=DataCLI)
    data: FederatedDataModule = cli.datamodule
    data.prepare_data()
    data.setup("fit")
    distribution: Any = getattr(data, "distribution", None)
    if saved is not None and distribution is None:
        raise ConfigurationError(
            f"save: {type(data).__name__} does not number its samples, but the file lists numbers; leave --save out"
        )
    record = data.partition_record()
    rows = partition_rows(data, record)
    if distribution is not None:
        rows["server"] = f"{len(distribution.val):,} validation and {len(distribution.test):,} test examples"
        holders = {split: sum(map(bool, map(len, parts))) for split, parts in distribution.own.items()}
        if holders:
            rows["data of their own"] = ", ".join(f"{split}: {n:,} clients" for split, n in holders.items())
    rows["picture"] = str(picture := user_path("output", options.output) / "partition.png")
    title = [
        f"{type(data).__name__}: {data.describe_partition()}",
        f"{cli.config.fit.name}; seed {data.seed}",
    ]
    if saved is not None:
        settings = {"partition": str(record["partition"]), "seed": data.seed}
        origin = {"program": f"fl_lightning {__version__}", "settings": settings}
        rows["saved"] = str(saved)
        write_text(saved, json.dumps(distribution.as_file(type(data).__name__, origin)) + "\n")
    write_figure(picture, clients_figure(record, data.class_names, title))
    print_table("Clients", rows)
    for note in data.notes:
        print(note)


def partition_rows(data: FederatedDataModule, record: PartitionRecord) -> dict[str, str]:
    """Return the rows of the table. Values that are not known have no row.

    Args:
        data: Data module after its setup.
        record: Result of the data module's ``partition_record()``.
    """
    sizes = record["sizes"]
    rows = {
        "partition": str(record["partition"]),
        "examples": f"{sum(sizes):,} of {len(sizes):,} clients",
        "examples per client": f"min {min(sizes):,}, median {median(sizes):,.10g}, max {max(sizes):,}",
    }
    if "heterogeneity" in record:
        texts = {
            name: ", ".join(f"{kind} {value:.4g}" for kind, value in values.items())
            for name, values in record["heterogeneity"].items()
        }
        rows["classes per client"] = f"{texts['classes']} of {len(record['class_histogram'][0])}"
        rows["effective classes"] = f"{texts['effective_classes']} (exp of the entropy)"
        rows["distance to the union"] = f"{texts['distance_to_union']} (total variation, in [0, 1])"
    if "sha256" in record:
        rows["SHA-256"] = record["sha256"]["total"]
    return rows
