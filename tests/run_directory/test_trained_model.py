"""A run's model used outside of its run: predictions and metrics of a new file, ``load_model`` and ``export``."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_lightning import ConfigurationError, load_model
from fl_lightning.__main__ import main as command
from fl_lightning.methods import fine_tuned
from tests.support.command_line import message_of
from tests.support.helpers import write_cifar10_folders
from tests.support.trained_models import (
    SITES,
    accuracy_on,
    fit,
    outputs_on_test_data,
    predicted,
    probabilities,
    write_table,
    write_test_rows,
)


def test_rows_of_a_file_are_predicted_as_inside_the_runs_test_data_bit_for_bit(patients, capsys):
    cli, run = fit()
    write_test_rows(cli.datamodule)
    scores = outputs_on_test_data(cli)
    Path("patients.csv").unlink()  # the checkpoint has mean and standard deviation
    rows = predicted(capsys, run, "new.csv")
    assert rows[0] == ["line", "prediction", "probability_ill", "probability_well"]
    assert [row[0] for row in rows[1:]] == [str(line) for line in range(2, len(scores) + 2)]
    assert torch.equal(probabilities(rows), scores.softmax(1))
    assert [row[1] for row in rows[1:]] == [["ill", "well"][guess] for guess in scores.argmax(1)]


@pytest.mark.slow
def test_missing_values_and_categories_are_those_of_the_training_data(capsys):
    draws = np.random.default_rng(1)
    lines = [
        f"{number % 3};{draws.normal(60, 9):.4f};{draws.normal(2, 1):.2f};{['I', 'II', ''][number % 3]};{'ab'[number % 2]}"
        for number in range(90)
    ]
    lines[::7] = [";".join([*line.split(";")[:2], "", *line.split(";")[3:]]) for line in lines[::7]]
    Path("patients.csv").write_text("\n".join(["site;age;dose;stage;outcome", *lines]))
    cli, run = fit(impute="median")
    data = cli.datamodule
    ages = data._data["features"][:, 0].tolist()
    tested = [ages.index(age) for age in data._split()["test_features"][:, 0].tolist()]
    scores = outputs_on_test_data(cli)
    new = [
        "name;stage;age;dose",
        *(";".join([str(i), *(lines[i].split(";")[x] for x in (3, 1, 2))]) for i in tested),
    ]
    Path("patients.csv").unlink()
    Path("new.csv").write_text("\n".join(new))
    assert torch.equal(probabilities(predicted(capsys, run, "new.csv")), scores.softmax(1))
    Path("new.csv").write_text("stage;age;dose\nIII;50;\nI;60,5;2,5\n")
    command(["predict", run, "new.csv"])
    said = capsys.readouterr().out
    assert "missing values, replaced by median of the training samples: dose: 1 of 2 samples\n" in said
    assert "values that are no category of the training samples: stage: 1 of 2 samples\n" in said
    # raw features of a loaded model: a missing value is NaN, and a category is its position
    raw = data._split()["test_features"]
    assert torch.isnan(raw[:, 1]).any()
    assert set(raw[:, 2].nan_to_num(-1).tolist()) == {-1, 0, 1}
    assert torch.equal(load_model(run)(raw), scores)
    command(["export", run])
    exported = torch.export.load(next(Path(run).glob("*.pt2"))).module()
    torch.testing.assert_close(exported(raw.float()), scores, rtol=0, atol=1e-6)


def test_a_personal_method_predicts_with_the_clients_model_bit_for_bit(patients, capsys):
    cli, run = fit(callbacks=["FedBN"])
    (method,) = cli.model.federated_callbacks
    states = method.variants(cli.trainer, cli.model)
    write_test_rows(cli.datamodule)
    capsys.readouterr()
    command(["predict", run, "new.csv"])
    assert (
        "with FedBN, each client uses a model of its own: choose it by --client NAME"
        in capsys.readouterr().out
    )
    own = [probabilities(predicted(capsys, run, "new.csv", "--client", name)) for name in ("Bonn", "Oslo")]
    expected = [outputs_on_test_data(cli, states[client]).softmax(1) for client in ("1", "3")]
    assert all(map(torch.equal, own, expected))
    assert not torch.equal(own[0], own[1])
    names = sorted(path.name for path in Path(run).glob("predictions_*"))
    stem = f"predictions_new_{Path(run).name}_last_round_3"
    assert names == sorted([f"{stem}.csv", f"{stem}_Bonn.csv", f"{stem}_Oslo.csv"])


def test_a_method_that_fine_tunes_trains_the_clients_model_again(patients):
    cli, run = fit(callbacks=["FedBABU"])
    expected = fine_tuned(cli.model, 2, 1)
    loaded = load_model(run, client="Lund").model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


def test_a_loaded_model_takes_raw_features_without_the_data(patients):
    cli, run = fit()
    raw, scores = cli.datamodule._split()["test_features"], outputs_on_test_data(cli)
    Path("patients.csv").unlink()
    state = torch.get_rng_state()
    model = load_model(run)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in model.modules())
    assert model.class_names == ["ill", "well"]
    with torch.no_grad():
        assert torch.equal(model(raw), scores)
        torch.testing.assert_close(model(raw.double()), scores, rtol=0, atol=1e-6)
    assert (
        Path(run, "config.yaml")
        .read_text()
        .startswith("# decided by the data: num_classes: 2, in_features: 2, num_clients: 4\n")
    )


@pytest.mark.slow
def test_an_exported_model_gives_the_runs_outputs_without_this_package(patients, capsys):
    cli, run = fit(callbacks=["FedBN"])
    (method,) = cli.model.federated_callbacks
    own = method.variants(cli.trainer, cli.model)["3"]
    expected = [outputs_on_test_data(cli), outputs_on_test_data(cli, own)]
    torch.save(cli.datamodule._split()["test_features"].float(), "raw.pt")
    files = []
    for client in ([], ["--client", "Oslo"]):
        command(["export", run, *client])
        files.append(capsys.readouterr().out.splitlines()[-1].removeprefix("model written to "))
    assert files[1] == f"{run}/model_{Path(run).name}_last_round_3_Oslo.pt2"
    script = (
        "import sys, torch\n"
        "outputs = []\n"
        "for file in sys.argv[1:]:\n"
        "    names = {'class_names': ''}\n"
        "    model = torch.export.load(file, extra_files=names).module()\n"
        "    assert names['class_names'].split() == ['ill', 'well'], names\n"
        "    outputs.append(model(torch.load('raw.pt')))\n"
        "assert not [name for name in sys.modules if name.startswith('fl_lightning')]\n"
        "torch.save(outputs, 'outputs.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script, *files], check=True)
    for found, scores in zip(torch.load("outputs.pt"), expected, strict=True):
        torch.testing.assert_close(found, scores, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_new_labelled_file_is_tested_with_the_runs_classes(patients, capsys):
    _, run = fit()
    write_table("new.csv", 40, seed=1)
    rows = predicted(capsys, run, "new.csv")
    targets = [line.split(",")[2].strip() for line in Path("new.csv").read_text().splitlines()[1:]]
    right = [row[1] == target for row, target in zip(rows[1:], targets, strict=True)]
    assert 0 < sum(right) < 40
    assert accuracy_on(capsys, run, "new.csv") == pytest.approx(sum(right) / 40)
    # a file may lack a class: "well" is class 1 of the run, and not class 0 of this file
    kept = [
        line
        for line, target in zip(Path("new.csv").read_text().splitlines()[1:], targets, strict=True)
        if target == "well"
    ]
    Path("well.csv").write_text("\n".join(["site,age,outcome,dose", *kept]) + "\n")
    share = np.mean([yes for yes, target in zip(right, targets, strict=True) if target == "well"])
    assert accuracy_on(capsys, run, "well.csv") == pytest.approx(share)
    Path("other.csv").write_text("site,age,outcome,dose\nBonn,60,dead,2\n")
    message = message_of(capsys, lambda: command(["test", run, "other.csv"]))
    assert "other.csv: the target dead is no class of the run; its classes are ill, well" in message


def test_the_table_that_trained_the_model_is_no_test(patients, capsys):
    _, run = fit()
    Path("copy.csv").write_bytes(Path("patients.csv").read_bytes())
    message = message_of(capsys, lambda: command(["test", run, "copy.csv"]))
    assert "test: copy.csv holds samples that trained the model" in message


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--client", "Bonn"],
            "client: Bonn, but all clients of .* use the server's model; leave client out",
        ),
        (
            ["--checkpoint", "other.ckpt"],
            "checkpoint: other.ckpt does not exist; give best, last or a file in .*checkpoints",
        ),
        (
            ["--model.local_steps", "2"],
            "unrecognized arguments: --model.local_steps 2; see .* predict --help",
        ),
    ],
)
def test_a_model_that_is_not_there_is_told_in_a_line(patients, capsys, words, told):
    _, run = fit(callbacks=["FixBN"])
    write_table("new.csv", 5, seed=1)
    predicted(capsys, run, "new.csv")
    message = message_of(capsys, lambda: command(["predict", run, "new.csv", *words]))
    assert re.search(told, message)


def test_a_checkpoint_of_another_run_is_refused(patients, capsys):
    (_, one), (_, other) = fit(callbacks=["FedBN"]), fit()
    write_table("new.csv", 5, seed=1)
    path = f"{other}/checkpoints/last.ckpt"
    told = message_of(capsys, lambda: command(["predict", one, "new.csv", "--checkpoint", path]))
    assert f"checkpoint: {path} is no checkpoint of the run {one}" in told
    assert load_model(other, checkpoint=path)


def test_a_client_that_is_not_there_is_told_with_the_clients(patients):
    _, run = fit(callbacks=["FedPer"])
    with pytest.raises(
        ConfigurationError,
        match=r"^client: 'Olso' is no client of the run.*Oslo.* are Bergen, Bonn, Lund, Oslo$",
    ):
        load_model(run, client="Olso")
    with pytest.raises(ConfigurationError, match=r"^client: '1' is no client"):
        load_model(run, client="1")  # not the client with the id 1, which has a name


def test_arrays_without_classes_are_predicted_as_values(methods, capsys):
    methods(
        "from torch.nn.functional import mse_loss\n"
        "from fl_lightning import Task\n"
        "class Regression(Task):\n"
        "    quality = 'r2'\n"
        "    def loss(self, outputs, targets):\n"
        "        return mse_loss(outputs, targets)\n"
        "    def measurable(self, scores, targets):\n"
        "        return scores, targets\n"
    )
    draws = np.random.default_rng(0)
    parts = {name: draws.normal(size=(size, 3)) for name, size in (("features", 60), ("test_features", 9))}
    targets = {name.replace("features", "targets"): x.sum(1, keepdims=True) for name, x in parts.items()}
    np.savez("measured.npz", **parts, **targets)
    np.savez("new.npz", features=parts["test_features"])
    np.savez("wrong.npz", features=parts["test_features"][:, :2])
    linear = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 3, "out_features": 1}}
    metrics = {"r2": {"class_path": "torchmetrics.R2Score"}}
    settings = {"features": "measured.npz", "standardize": True, "batch_size": 8, "num_clients": 3}
    cli, run = fit(model=linear, task={"class_path": "methods.Regression"}, metrics=metrics, **settings)
    rows = predicted(capsys, run, "new.npz")
    assert rows[0] == ["index", "value_0"]
    values = outputs_on_test_data(cli).flatten().tolist()
    assert [int(place) for place, _ in rows[1:]] == [*range(9)]
    assert torch.equal(torch.tensor([float(value) for _, value in rows[1:]]), torch.tensor(values))
    message = message_of(capsys, lambda: command(["predict", run, "wrong.npz"]))
    assert (
        "wrong.npz: samples have the shape [2], but [3] in the run; give the features of the run" in message
    )


@pytest.mark.slow
def test_images_of_a_folder_are_predicted_and_tested_as_inside_the_run(capsys):
    write_cifar10_folders("images", train=6, test=2)
    settings = {"data_dir": "images", "image_size": 8, "num_clients": 2, "batch_size": 10}
    cli, run = fit("ImageFolder", model="LeNet", **settings)
    rows = predicted(capsys, run, "images/test")
    assert [row[0] for row in rows[1:3]] == ["airplane/0.png", "airplane/1.png"]
    assert torch.equal(probabilities(rows), outputs_on_test_data(cli).softmax(1))
    right = [row[0].partition("/")[0] == row[1] for row in rows[1:]]
    assert accuracy_on(capsys, run, "images/test") == pytest.approx(np.mean(right))
    for trained in ("images", "images/train", "images/train/airplane"):
        message = message_of(capsys, lambda trained=trained: command(["test", run, trained]))
        assert f"{trained} holds samples that trained the model" in message
    Path("new/zebra").mkdir(parents=True)
    message = message_of(capsys, lambda: command(["test", run, "new"]))
    assert "new: the folder zebra is no class of the run; its classes are airplane" in message
    message = message_of(capsys, lambda: command(["predict", run, "new"]))
    assert "new holds no images to read; give a folder with images" in message


def test_streamed_images_are_predicted_as_inside_the_run(capsys):
    write_cifar10_folders("images", train=6, test=2)
    settings = {"data_dir": "images", "image_size": 8, "num_clients": 2, "batch_size": 10}
    cli, run = fit("StreamedImages", model="LeNet", **settings)
    rows = predicted(capsys, run, "images/test")
    assert torch.equal(probabilities(rows), outputs_on_test_data(cli).softmax(1))


LIT = """
import lightning as L
import torch
import yaml
from torch.nn.functional import cross_entropy


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        inputs, _ = batch
        return self(inputs).argmax(1) + 100 * batch_idx

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def test_a_lightning_module_keeps_its_predict_step(methods, patients, capsys):
    methods(LIT)
    cli, run = fit(model={"class_path": "methods.Lit"}, eval_batch_size=4)
    write_test_rows(cli.datamodule, "new.csv")
    raw = cli.datamodule._split()["test_features"]
    rows = predicted(capsys, run, "new.csv")
    assert rows[0] == ["line", "value_0"]
    model = load_model(run)
    guesses = model(raw).argmax(1).tolist()
    assert [int(row[1]) for row in rows[1:]] == [x + 100 * (i // 4) for i, x in enumerate(guesses)]
    write_table("labelled.csv", 12, seed=1)
    command(["test", run, "labelled.csv"])
    assert "test_loss" in capsys.readouterr().out
    command(["export", run])
    exported = torch.export.load(capsys.readouterr().out.splitlines()[-1].partition(" to ")[2]).module()
    torch.testing.assert_close(exported(raw.float()), model(raw), rtol=0, atol=1e-6)


def test_data_that_cannot_read_a_new_file_say_so(patients, capsys):
    _, run = fit("Digits", model="LeNet", num_clients=2, max_examples=100)
    message = message_of(capsys, lambda: command(["predict", run, "patients.csv"]))
    assert (
        "patients.csv: Digits cannot read new files; define Digits.new_samples, or call fl_lightning.load_model"
        in message
    )
    _, run = fit()
    message = message_of(capsys, lambda: command(["predict", run, "nowhere.csv"]))
    assert "nowhere.csv does not exist; give a .csv, .parquet, .npz or .pt file" in message


def test_onnx_takes_raw_features_or_its_packages_are_named(patients, capsys):
    _, run = fit()
    if find_spec("onnxscript") is None:
        message = message_of(capsys, lambda: command(["export", run, "--output", "model.onnx"]))
        assert "onnx" in message
        assert "pip install" in message
        return
    command(["export", run, "--output", "model.onnx"])
    raw = torch.tensor([[60.0, 2.0], [70.0, 1.0], [50.0, 3.0]])
    (scores,) = (
        pytest.importorskip("onnxruntime").InferenceSession("model.onnx").run(None, {"inputs": raw.numpy()})
    )
    torch.testing.assert_close(torch.tensor(scores), load_model(run)(raw), rtol=0, atol=1e-6)


def test_a_network_that_the_configuration_does_not_describe_is_told(patients, capsys):
    _, run = fit()
    file = Path(run, "config.yaml")
    file.write_text(file.read_text().replace("fl_lightning.models.TabularMLP", "script.Net"))
    with pytest.raises(ConfigurationError, match=r"script"):
        load_model(run)


def test_the_folder_of_a_single_run_stands_for_the_run(patients):
    fit()
    assert load_model("runs/run").class_names == ["ill", "well"]
    fit(standardize=False)
    with pytest.raises(ConfigurationError, match=r"runs/run is no run directory .*; it has runs/run/"):
        load_model("runs/run")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["FedBN", "SiloBN", "FedPer"])
def test_a_client_that_has_never_trained_has_no_model(method, patients, capsys):
    cli, run = fit(callbacks=[method], participation=1)
    (personal,) = cli.model.federated_callbacks
    trained = [name for number, name in enumerate(SITES) if number in personal.memory]
    absent = [name for name in SITES if name not in trained]
    assert trained
    assert absent
    write_test_rows(cli.datamodule)
    told = f"client: {absent[0]} has trained in no round up to 3, so its own state is that before training"
    with pytest.raises(ConfigurationError, match=told):
        load_model(run, client=absent[0])
    assert told in message_of(capsys, lambda: command(["predict", run, "new.csv", "--client", absent[0]]))
    assert load_model(run, client=trained[0])
    assert predicted(capsys, run, "new.csv")


def test_a_client_that_has_never_trained_may_use_a_state_that_is_the_servers(patients):
    cli, run = fit(callbacks=["FedPer"], participation=1, lr=0)
    (personal,) = cli.model.federated_callbacks
    absent = next(name for number, name in enumerate(SITES) if number not in personal.memory)
    found, expected = (load_model(run, client=x).state_dict() for x in (absent, None))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
