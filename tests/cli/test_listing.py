"""``list``: every name that a configuration can use, and no other."""

import pytest
from torch import nn

from fl_lightning.__main__ import main
from fl_lightning.callbacks import FedBN, FixBN, SlidingWindowFixBN
from fl_lightning.cli.listing import FILES, LISTS, files, named
from fl_lightning.round.policy import treatment_table
from tests.support.command_line import write_config

NAMES = {
    "methods": "AdaBN AggregationDiagnostics BatchNormDiagnostics BatchRenormalization BNSCAFFOLD Byzantine ClassifierBias ClientEvaluation ClientGradientClipping CommunicationLedger FBN FedBABU FedBN FedDNA FedDyn FedExFixBN FedNova FedPer FedProx FedRep FedTAN FixBN "
    "GradientInversion HybridBN LabelInference MaintainedMomentum MomentMatching MTFL ParticipationGap PrivateFedAvg PrivateSGD SCAFFOLD SiloBN SlidingWindowFixBN StaticBN StatisticsSources",
    "models": "BNProbe CIFARResNet fl_lightning.models.deeplab_v3_plus FBNCNN LeNet fl_lightning.models.library_model ResNet18 ResNet20 ResNet32 ResNet8 SmallDeepLab TabularMLP",
    "data": "CIFAR10 CIFAR100 Cityscapes Digits FashionMNIST FEMNIST Gaussians HuggingFaceImages ImageDomains ImageFolder ImageNet ScikitLearn StreamedImages TensorData TinyImageNet TorchvisionImages",
    "partitions": "Dirichlet ExtendedDirichlet FromFile GammaSimilarity HonestOnly IID Natural Shards",
    "norms": "bn gn ln in gn_ws fed_ws weight_norm scaled_ws fn none",
    "aggregators": "CenteredClipping GeometricMedian Krum MeanAroundMedian Median MultiKrum TrimmedMean WeightedMean",
    "attacks": "ALittleIsEnough Backdoor FallOfEmpires Gaussian GradientAscent LabelFlip Mimic ModelReplacement NonFinite SignFlip",
}


@pytest.mark.parametrize("kind", LISTS)
def test_each_kind_has_its_names_with_a_line_each(kind, capsys):
    found = named(kind)
    assert " ".join(found) == NAMES[kind]
    for line in found.values():
        assert line.endswith(".")
        assert "`" not in line
    main(["list", kind])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{kind.capitalize()} ({LISTS[kind]})"
    assert [line.split(maxsplit=1) for line in lines] == [[name, line] for name, line in found.items()]


def test_without_a_kind_all_are_listed_and_an_unknown_one_is_refused(capsys):
    main(["list"])
    shown = capsys.readouterr().out
    assert all(f"{kind.capitalize()} (" in shown for kind in LISTS | FILES)
    with pytest.raises(SystemExit) as stop:
        main(["list", "method"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: list: 'method' must be one of methods, models, data, partitions, norms, aggregators, attacks, "
        "configs, studies, parameters\n"
    )


def test_shipped_files_are_listed_under_the_names_that_commands_take(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    main(["list", "configs", "studies"])
    shown = capsys.readouterr().out.splitlines()
    for name, line in (
        (
            "configs/quickstart.yaml",
            "FixBN on label-skewed clients of real images, offline, in about 20 seconds.",
        ),
        ("configs/studies/methods.yaml", "Every method, E = 1"),
    ):
        assert name in [row.split(maxsplit=1)[0] for row in shown]
        assert line in [row.split(maxsplit=1)[1] for row in shown]
    assert all(line.endswith(".") for line in files("configs").values())
    assert not list(tmp_path.iterdir())


def test_parameters_have_their_kind_and_the_treatment_of_the_policy(capsys):
    write_config(
        {"trainer.callbacks": ["FedProx", {"class_path": "FixBN", "init_args": {"freeze_round": 2}}]}
    )
    main(["list", "parameters", "--config", "tiny.yaml", "--model.model.norm", "bn"])
    head, _, *rows = [row.split(maxsplit=3) for row in capsys.readouterr().out.splitlines() if row]
    assert head == ["name", "shape", "kind", "treatment"]
    by_name = {row[0]: " ".join(row[1:]).replace("  ", " ") for row in rows}
    assert by_name["classifier.bias"] == "[10] weight averaged"
    assert by_name["features.2.weight"] == "[32] affine averaged"
    assert by_name["features.2.running_var"] == "[32] var averaged; frozen from round 3"
    assert by_name["features.2.num_batches_tracked"].startswith("[] counter max")


def test_treatments_change_with_the_rounds_and_methods():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    plain = {"0.weight": "averaged", "0.bias": "averaged"}
    assert treatment_table(model, [FedBN()], 4) == {
        **{name: [(1, how)] for name, how in plain.items()},
        **{
            f"1.{name}": [(1, "local")]
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        },
    }
    assert treatment_table(model, [FixBN(freeze_round=2)], 4)["1.running_mean"] == [
        (1, "averaged"),
        (3, "frozen"),
    ]
    found = treatment_table(model, [SlidingWindowFixBN(window=3, threshold=0.1)], 4)
    assert found["1.running_var"] == [(1, "averaged"), ("SlidingWindowFixBN", "frozen")]
    assert found["0.bias"] == [(1, "averaged")]


def test_parameters_need_a_configuration_and_its_rounds(capsys):
    for arguments, line in (
        (
            ["list", "parameters"],
            "list parameters needs a model: add --config FILE, such as --config configs/quickstart.yaml",
        ),
        (
            ["list", "parameters", "--config", write_config({"trainer.max_epochs": -1})],
            "trainer.max_epochs: set the number of rounds, or model.budget_epochs",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"error: {line}\n"


def test_parameters_of_a_budget_count_the_rounds_of_the_data(capsys):
    # 240 training examples in three clients; 2 steps of batches of 10 are 60 a round: 8 rounds are two epochs
    write_config({"trainer.max_epochs": -1, "model.budget_epochs": 2})
    main(["list", "parameters", "--config", "tiny.yaml", "--trainer.callbacks.freeze_round", "0.5"])
    assert "averaged; frozen from round 5" in capsys.readouterr().out
