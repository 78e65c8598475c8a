"""The shipped data sets from the command line: each takes the settings that it documents."""

from pathlib import Path

import pytest
import yaml

from fl_lightning import datamodules
from fl_lightning.datamodules import (
    ImageFiles,
    InMemoryDataModule,
    Natural,
    PartitionedDataModule,
    TensorData,
)
from tests.support.command_line import main, write_config

NAMES = sorted(
    name
    for name in datamodules.__all__
    if isinstance(getattr(datamodules, name), type)
    and issubclass(getattr(datamodules, name), PartitionedDataModule)
    and getattr(datamodules, name) not in (PartitionedDataModule, InMemoryDataModule, ImageFiles)
)
NEEDED = {
    **{
        key: ["--data.data_dir", "x", "--data.image_size", "8"]
        for key in ["HuggingFaceImages", "ImageDomains", "ImageFolder", "StreamedImages"]
    },
    "TorchvisionImages": ["--data.dataset", "SVHN", "--data.num_classes", "10"],
}


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_the_base_reach_every_data_set(name, capsys):
    write_config({"data": {"class_path": name}})
    given = {"batch_size": 3, "num_clients": 7, "val_fraction": 0.25}
    if issubclass(getattr(datamodules, name), InMemoryDataModule):
        given["crop_padding"] = 1
    arguments = [part for key, value in given.items() for part in (f"--data.{key}", str(value))]
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "tiny.yaml", *NEEDED.get(name, []), *arguments, "--print_config"])
    assert stop.value.code in (0, None)
    settings = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    assert given.items() <= settings.items()


@pytest.mark.parametrize("held_out", ["[10]", "['10']", "[10, b]"])
def test_names_of_held_out_clients_may_be_numbers(held_out, capsys):
    rows = [f"{site},{number},{number % 2}" for number in range(40) for site in (10, "b", 3)]
    Path("sites.csv").write_text("\n".join(["site,x,y", *rows]))
    init = {"features": "sites.csv", "targets": "y", "groups": "site"}
    write_config({"data": {"class_path": "TensorData", "init_args": {**init, "partition": "Natural"}}})
    with pytest.raises(SystemExit):
        main(["fit", "--config", "tiny.yaml", "--data.held_out", held_out, "--print_config"])
    parsed = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["held_out"]
    data = TensorData(**init, partition=Natural(), held_out=parsed)
    data.setup("fit")
    assert data.client_names[data.num_clients :] == [x for x in ("10", "b") if x in held_out]
