"""Every shipped configuration runs one whole round with its own model, method and partition."""

from pathlib import Path

import pytest
import torch
import yaml
from command_line import main

import fl_lightning

CONFIGS = Path(fl_lightning.__file__).parents[1] / "configs"
SMALLER: dict[str, list[str]] = {}
"""Arguments that shrink data, images or network of a configuration, by its path below ``configs``."""


def names():
    return sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))


@pytest.fixture
def class_folders():
    """A small data set in class folders, where a configuration expects the user's."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)

    def make(root):
        for split, count in (("train", 60), ("test", 4)):
            for label in range(10):
                folder = Path(root) / split / f"class{label}"
                folder.mkdir(parents=True)
                for index in range(count):
                    pixels = torch.randint(256, (8, 8, 3), generator=generator, dtype=torch.uint8)
                    Image.fromarray(pixels.numpy()).save(folder / f"{index}.png")

    return make


def arguments(name, class_folders):
    data = yaml.safe_load((CONFIGS / name).read_text()).get("data", {})
    given = list(SMALLER.get(name, []))
    if data.get("class_path", "").endswith("ImageFolder"):
        class_folders("images")
        given += ["--data.init_args.data_dir", "images", "--data.init_args.image_size", "8"]
    return ["fit", "--config", str(CONFIGS / name), "--trainer.accelerator", "cpu", *given]


def test_there_are_configurations():
    assert "quickstart.yaml" in names()


@pytest.mark.parametrize("name", names())
def test_configuration_runs_one_whole_round(name, class_folders):
    cli = main([*arguments(name, class_folders), "--trainer.fast_dev_run", "true"])
    assert cli.trainer.global_step == 1
    plan = cli.model.plan
    steps = sum(plan.steps(client, 1) for client in plan.cohort(1))
    assert cli.model.record.samples == steps * cli.datamodule.batch_size


@pytest.mark.parametrize("name", names())
def test_configuration_survives_being_printed_and_read_back(name, class_folders, capsys):
    given = arguments(name, class_folders)
    printed = []
    for config in (given, ["fit", "--config", "printed.yaml"]):
        with pytest.raises(SystemExit):
            main([*config, "--print_config"])
        printed.append(capsys.readouterr().out)
        Path("printed.yaml").write_text(printed[0])
    assert yaml.safe_load(printed[0]) == yaml.safe_load(printed[1])
    assert yaml.safe_load(printed[0])["model"]["client_optimizer"]["init_args"]["lr"] > 0
