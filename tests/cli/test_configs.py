"""Every shipped configuration runs one whole round with its own model, method and partition."""

from pathlib import Path

import pytest
import yaml
from command_line import main
from helpers import write_cifar10_folders

import fl_lightning

CONFIGS = Path(fl_lightning.__file__).parents[1] / "configs"
SMALLER = {
    "cifar10_": [
        *("--data.image_size", "8", "--data.batch_size", "20"),
        *("--model.model.init_args.width", "4"),
    ],
    "cifar10_small_": [],
    "image_folder_": [
        *("--data.data_dir", "data/cifar10", "--data.image_size", "8"),
        *("--model.model.init_args.width", "4"),
    ],
}
"""All that a test changes: data directory, image size, batch size and width, by how the name begins (the longest counts)."""


def names():
    return sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))


@pytest.fixture(autouse=True)
def class_folders():
    """A small data set in class folders, where the configurations expect the user's."""
    write_cifar10_folders()


def arguments(name):
    start = max((start for start in SMALLER if name.startswith(start)), key=len, default=None)
    return ["fit", "--config", str(CONFIGS / name), "--trainer.accelerator", "cpu", *SMALLER.get(start, [])]


def test_there_are_configurations():
    assert "quickstart.yaml" in names()


@pytest.mark.parametrize("name", names())
def test_configuration_runs_one_whole_round(name):
    cli = main([*arguments(name), "--trainer.fast_dev_run", "true"])
    assert cli.trainer.global_step == 1
    plan = cli.model.plan
    steps = sum(plan.steps(client, 1) for client in plan.cohort(1))
    assert cli.model.record.samples == steps * cli.datamodule.batch_size


@pytest.mark.parametrize("name", names())
def test_configuration_survives_being_printed_and_read_back(name, capsys):
    given = arguments(name)
    printed = []
    for config in (given, ["fit", "--config", "printed.yaml"]):
        with pytest.raises(SystemExit):
            main([*config, "--print_config"])
        printed.append(capsys.readouterr().out)
        Path("printed.yaml").write_text(printed[0])
    assert yaml.safe_load(printed[0]) == yaml.safe_load(printed[1])
    assert yaml.safe_load(printed[0])["model"]["client_optimizer"]["init_args"]["lr"] > 0
