"""Every shipped configuration runs one whole round with its own model, method and partition."""

import shutil
from itertools import cycle, product
from pathlib import Path

import pytest
import yaml
from torch.nn.modules.batchnorm import _BatchNorm

import fl_lightning
from tests.support.command_line import main
from tests.support.helpers import write_cifar10_folders
from tests.support.layouts import write_feddrive, write_femnist, write_tiny_imagenet
from tests.support.pages import take_examples
from tests.support.street_scenes import write_scenes
from tests.support.sweeps import SWEEPS, command_line, grid

CONFIGS = Path(fl_lightning.__file__).parents[1] / "configs"
SMALLER = {
    "cifar10_": [
        *("--data.image_size", "8", "--data.batch_size", "20"),
        *("--model.model.init_args.width", "4"),
    ],
    "cifar10_participation_": [
        *("--data.image_size", "8", "--data.batch_size", "5", "--data.num_clients", "20"),
        *("--model.model.init_args.width", "4"),
    ],
    "cifar10_small_": [],
    "cifar10_small_participation_": ["--data.batch_size", "5", "--data.num_clients", "20"],
    "tiny_imagenet_": ["--data.image_size", "16", "--model.model.init_args.width", "4"],
    "cityscapes_": ["--data.batch_size", "2", "--data.crop_size", "[32, 32]", "--data.eval_batch_size", "3"],
    "imagenet_": [
        *("--data.data_dir", "data/cifar10", "--data.image_size", "32", "--data.batch_size", "5"),
        *("--data.num_clients", "20", "--data.partition.alpha", "1", "--model.model.init_args.width", "4"),
    ],
    "femnist_": ["--data.batch_size", "2", "--data.min_examples", "2"],
    "camvid_small_": [
        *("--data.batch_size", "2", "--data.image_size", "[16, 24]", "--data.crop_size", "[16, 16]"),
        *("--model.model.init_args.width", "4"),
    ],
    "image_folder_": [
        *("--data.data_dir", "data/cifar10", "--data.image_size", "8"),
        *("--model.model.init_args.width", "4"),
    ],
}
"""What a test changes: data directory, image size, batch size and width, by how the name begins (the longest counts)."""
PAPERS = [
    "cifar10_participation_bn",
    "cityscapes_bn",
    "femnist_bn",
    "tiny_imagenet_bn",
    "tiny_imagenet_small_bn",
]
"""What the overlays of a norm and a method are meant for."""
METHODS = {"gn.yaml": (False, []), "fixbn.yaml": (True, ["FixBN"])}
ATTACKS = ["sign_flip.yaml", "fall_of_empires.yaml", "a_little_is_enough.yaml"]
METRICS = "metrics.yaml"
DEFENCES = {"defence_median.yaml": "Median", "defence_trimmed_mean.yaml": "TrimmedMean"}
STEPS = 2
"""Of many local steps (E = 100 in the papers) so many are taken."""


def names(folder=CONFIGS):
    return sorted(path.name for path in folder.glob("*.yaml"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_cifar10_folders(folder / "cifar10")
    write_scenes(folder / "camvid", {"train/0016e5": 5, "train/0001tp": 4, "train/seq05vd": 3})
    write_scenes(folder / "cityscapes", size=(32, 32))
    write_feddrive(folder / "feddrive/heterogeneous/train", folder / "cityscapes", images=2)
    write_tiny_imagenet(folder / "tiny-imagenet-200", folder / "cifar10")
    write_femnist(folder / "femnist", writers=10, images=4)
    return folder


@pytest.fixture(autouse=True)
def class_folders(pictures):
    """Small data sets where the configurations expect the user's."""
    shutil.copytree(pictures, "data")


def arguments(name, *overlays):
    if name.startswith("cityscapes_"):
        pytest.importorskip("segmentation_models_pytorch", reason="needs the extra segmentation")
    start = max((start for start in SMALLER if name.startswith(start)), key=len, default=None)
    smaller = SMALLER.get(start, [])
    if (yaml.safe_load((CONFIGS / name).read_text())["model"].get("local_steps") or 0) > STEPS:
        smaller = [*smaller, "--model.local_steps", str(STEPS)]
    files = [argument for path in (name, *overlays) for argument in ("--config", str(CONFIGS / path))]
    return ["fit", *files, "--trainer.accelerator", "cpu", *smaller]


def test_there_are_configurations():
    assert "quickstart.yaml" in names()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "quickstart.yaml" else pytest.mark.slow) for name in names()],
)
def test_configuration_runs_one_whole_round_and_survives_being_printed_and_read_back(name, capsys):
    def printed(*given):
        with pytest.raises(SystemExit):
            main([*given, "--print_config"])
        return capsys.readouterr().out

    Path("printed.yaml").write_text(printed(*arguments(name)))
    settings = yaml.safe_load(Path("printed.yaml").read_text())
    assert settings["model"]["client_optimizer"]["init_args"]["lr"] > 0
    cli = main(["fit", "--config", "printed.yaml", "--trainer.fast_dev_run", "true"])
    settings["trainer"]["fast_dev_run"] = True
    assert cli.resolved == {**settings, "name": cli.config.fit.name}
    assert cli.trainer.global_step == 1
    plan = cli.model.plan
    steps = sum(plan.steps(client, 1) for client in plan.cohort(1))
    poisson = getattr(cli.datamodule, "sampling", "epochs") == "poisson"  # batches differ in size
    expected = pytest.approx(steps * cli.datamodule.batch_size, rel=0.2 if poisson else 0)
    assert cli.model.record.samples == expected


def nightly(*rows, stays):
    """Rows of a cross product, of which all but some are nightly."""
    stay = {*stays}
    assert stay < {*rows}
    return [pytest.param(*row, marks=() if row in stay else pytest.mark.nightly) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overlay"),
    # a norm changes each model, a method only the callbacks
    nightly(*product(PAPERS, METHODS), stays=[(PAPERS[0], "fixbn.yaml"), *product(PAPERS, ["gn.yaml"])]),
)
def test_an_overlay_changes_the_norm_or_the_method_of_a_configuration(name, overlay):
    given = arguments(f"{name}.yaml", f"overlays/{overlay}")
    cli = main([*given, "--trainer.fast_dev_run", "true"])
    assert cli.trainer.global_step == 1
    has_bn = any(isinstance(layer, _BatchNorm) for layer in cli.model.model.modules())
    methods = [type(callback).__name__ for callback in cli.model.federated_callbacks]
    assert (has_bn, methods) == METHODS[overlay]


def test_there_is_no_other_overlay():
    assert {*names(CONFIGS / "overlays")} == {*METHODS, *ATTACKS, *DEFENCES, METRICS}


ATTACKED = ["cifar10_fbn", "cifar10_small_fbn"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attack", "defence"),
    nightly(
        *product(ATTACKED, ATTACKS, DEFENCES),
        stays=zip(cycle(ATTACKED), ATTACKS, cycle(DEFENCES), strict=False),
    ),
)
def test_overlays_attack_and_defend_a_configuration(name, attack, defence):
    given = arguments(f"{name}.yaml", f"overlays/{attack}", f"overlays/{defence}")
    cli = main([*given, "--trainer.fast_dev_run", "true"])
    assert cli.trainer.global_step == 1
    assert type(cli.model.federated_callbacks[-1]).__name__ == "Byzantine"
    assert cli.model.federated_callbacks[-1].attackers == [7, 8, 9]
    assert type(cli.model.statistics.rule).__name__ == DEFENCES[defence]
    assert type(cli.model.aggregator).__name__ == "WeightedMean"


@pytest.mark.parametrize("name", SWEEPS)
def test_the_command_of_a_sweep_takes_its_parameters(name, capsys, monkeypatch):
    take_examples(monkeypatch)
    assert len(grid(name)) >= 6
    words = command_line(name, grid(name)[-1])
    assert words[:6] == ["/usr/bin/env", "python", "-m", "fl_lightning", "fit", "--config"]
    assert (CONFIGS.parent / words[6]).is_file()
    with pytest.raises(SystemExit) as stop:
        main([*words[4:], "--print_config"])
    assert not stop.value.code
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["seed_everything"] == grid(name)[-1]["seed_everything"]
