"""``list``: every name that a configuration can use, and no other."""

import pytest

from fl_lightning.__main__ import main
from fl_lightning.cli.listing import KINDS, named

NAMES = {
    "methods": "AggregationDiagnostics BatchNormDiagnostics Byzantine ClientEvaluation ClientGradientClipping CommunicationLedger FBN FedBABU FedBN FedDNA FedExFixBN FedPer FedProx FedRep FedTAN FixBN "
    "MaintainedMomentum MomentMatching MTFL SCAFFOLD SiloBN SlidingWindowFixBN StaticBN StatisticsSources",
    "models": "BNProbe CIFARResNet fl_lightning.models.deeplab_v3_plus FBNCNN LeNet fl_lightning.models.library_model ResNet18 ResNet20 ResNet32 ResNet8 SmallDeepLab TabularMLP",
    "data": "CIFAR10 CIFAR100 Cityscapes Digits FashionMNIST FEMNIST Gaussians HuggingFaceImages ImageDomains ImageFolder ImageNet ScikitLearn StreamedImages TensorData TinyImageNet TorchvisionImages",
    "partitions": "Dirichlet FromFile GammaSimilarity HonestOnly IID Natural Shards",
    "norms": "bn gn ln in gn_ws weight_norm scaled_ws none",
    "aggregators": "CenteredClipping GeometricMedian Krum MeanAroundMedian Median MultiKrum TrimmedMean WeightedMean",
    "attacks": "ALittleIsEnough Backdoor FallOfEmpires Gaussian GradientAscent LabelFlip Mimic ModelReplacement NonFinite SignFlip",
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_names_with_a_line_each(kind, capsys):
    found = named(kind)
    assert " ".join(found) == NAMES[kind]
    for line in found.values():
        assert line.endswith(".")
        assert "`" not in line
    main(["list", kind])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{kind.capitalize()} ({KINDS[kind]})"
    assert [line.split(maxsplit=1) for line in lines] == [[name, line] for name, line in found.items()]


def test_without_a_kind_all_are_listed_and_an_unknown_one_is_refused(capsys):
    main(["list"])
    shown = capsys.readouterr().out
    assert all(f"{kind.capitalize()} (" in shown for kind in KINDS)
    with pytest.raises(SystemExit) as stop:
        main(["list", "method"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: list: 'method' must be one of methods, models, data, partitions, norms, aggregators, attacks\n"
    )
