"""Files of predictions: their rows, targets and names, and the messages of ``predict``."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import BasePredictionWriter

from fl_lightning import load_model
from fl_lightning.__main__ import main as command
from tests.support.command_line import main, message_of
from tests.support.trained_models import (
    fit,
    outputs_on_test_data,
    predicted,
    probabilities,
    table_of,
    write_table,
    write_test_rows,
)


@pytest.mark.slow
def test_no_file_is_overwritten(patients, capsys):
    _, run = fit()
    write_table("new.csv", 5, seed=1)
    first = predicted(capsys, run, "new.csv")
    write_table("new.csv", 6, seed=2)
    assert len(predicted(capsys, run, "new.csv")) == 7
    stem = f"{run}/predictions_new_{Path(run).name}_last_round_3"
    assert table_of(f"{stem}.csv") == first
    assert len(table_of(f"{stem}.2.csv")) == 7
    own = Path(run, f"predictions_{Path(run).name}_last_round_3.csv")
    predicted(capsys, run)
    content = own.read_bytes()
    own.write_bytes(b"mine")
    predicted(capsys, run)
    assert own.read_bytes() == b"mine"
    assert own.with_suffix(".2.csv").read_bytes() == content
    Path("here.csv").write_text("mine")
    assert len(predicted(capsys, run, "new.csv", "--output", "here.csv")) == 7
    assert Path("here.csv").read_text() == "mine"
    assert predicted(capsys, run, "--output", "here.csv") == table_of(own.with_suffix(".2.csv"))
    assert sorted(path.name for path in Path().glob("here*")) == ["here.2.csv", "here.3.csv", "here.csv"]


@pytest.mark.parametrize("method", ["FedBN", "FedBABU"])
def test_a_clients_model_predicts_the_runs_test_data(patients, capsys, method):
    cli, run = fit(callbacks=[method])
    (_, targets), *rest = cli.datamodule.test_dataloader()
    assert not rest
    servers = predicted(capsys, run)
    columns = ["index", "target", "prediction", "probability_ill", "probability_well"]
    for client in ("Bonn", "Oslo"):
        header, *rows = predicted(capsys, run, "--client", client)
        assert header == columns
        assert [row[1] for row in rows] == [cli.datamodule.class_names[target] for target in targets]
        assert rows != servers[1:]
        with torch.no_grad():
            scores = outputs_on_test_data(cli, load_model(run, client=client).model.state_dict())
        shares = torch.tensor([[float(x) for x in row[3:]] for row in rows])
        torch.testing.assert_close(shares, scores.softmax(1), rtol=0, atol=1e-6)


def test_a_prediction_on_changed_test_data_prints_a_line(patients, capsys):
    _, run = fit()
    predicted(capsys, run)
    assert "data: other" not in capsys.readouterr().out
    write_table("patients.csv", 60, seed=9)
    capsys.readouterr()
    command(["predict", run])
    assert "data: other evaluation data than those of" in capsys.readouterr().out


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("epoch")

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        Path("written.txt").write_text(str(sum(map(len, predictions))))


# Lightning cannot know the indices of batches that the data have drawn
@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
def test_a_runs_prediction_writer_gets_the_predictions(methods, patients, capsys):
    _, run = fit(callbacks=[f"{__name__}.Writer"])
    rows = predicted(capsys, run)
    assert Path("written.txt").read_text() == str(len(rows) - 1)


TWO_OUTPUTS = """
from torch import nn
from fl_lightning.clients.tasks import Classification

class Two(nn.Module):
    def __init__(self, in_features: int, num_classes: int):
        super().__init__()
        self.first, self.second = nn.Linear(in_features, num_classes), nn.Linear(in_features, num_classes)

    def forward(self, inputs):
        return self.first(inputs), self.second(inputs)

class Both(Classification):
    def loss(self, outputs, targets):
        return sum(super(Both, self).loss(scores, targets) for scores in outputs)
"""


def test_the_first_of_several_outputs_is_the_prediction(methods, patients, capsys):
    methods(TWO_OUTPUTS)
    cli, run = fit(model={"class_path": "methods.Two"}, task={"class_path": "methods.Both"})
    shares = outputs_on_test_data(cli)[0].softmax(1)
    write_test_rows(cli.datamodule)
    assert torch.equal(probabilities(predicted(capsys, run, "new.csv")), shares)
    own = torch.tensor([[float(x) for x in row[3:]] for row in predicted(capsys, run)[1:]])
    assert torch.equal(own, shares)


OWN_LOADER = """
import lightning as L
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset
from fl_lightning import FederatedDataModule

class Drawn(L.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(37, 2, generator=generator)
        self.samples = TensorDataset(inputs, (inputs[:, 0] > 0).long())

    def train_dataloader(self):
        return DataLoader(self.samples, 4)

    val_dataloader = train_dataloader

    def predict_dataloader(self):
        return DataLoader(self.samples, batch_size=10, shuffle=True)

class Sites(FederatedDataModule):
    def __init__(self, seed: int = 0):
        super().__init__({"a": Drawn()}, Drawn(), seed)

class Own(L.LightningModule):
    def __init__(self, form: str = "inputs"):
        super().__init__()
        self.net, self.form = torch.nn.Linear(2, 2), form

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def predict_step(self, batch, batch_idx):
        inputs = batch[0]
        return {
            "inputs": inputs,
            "number": inputs.sum(),
            "rows": inputs[:3],
            "width": inputs[:, : 1 + batch_idx % 2],
            "half": inputs.bfloat16(),
        }[self.form]
"""


def fit_own(methods, form):
    methods(OWN_LOADER)
    config = {
        "wandb": {"mode": "disabled"},
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {
            "model": {"class_path": "methods.Own", "init_args": {"form": form}},
            "local_steps": 1,
            "check_first_steps": False,
        },
        "data": {"class_path": "methods.Sites"},
    }
    Path("own.yaml").write_text(yaml.safe_dump(config))
    return str(main(["fit", "--config", "own.yaml"]).attempt.path)


# Lightning's advice on loaders of predictions
@pytest.mark.filterwarnings("ignore:.*shuffling enabled")
@pytest.mark.parametrize("form", ["inputs", "half"])
def test_targets_are_those_of_the_predicted_batches_also_if_the_loader_shuffles(methods, capsys, form):
    header, *rows = predicted(capsys, fit_own(methods, form))
    assert (header, len(rows)) == (["index", "target", "value_0", "value_1"], 37)
    assert all(int(target) == (float(value) > 0) for _, target, value, _ in rows)


@pytest.mark.filterwarnings("ignore:.*shuffling enabled")
@pytest.mark.parametrize("form", ["number", "rows", "width"])
def test_outputs_without_a_row_for_each_sample_are_told(methods, capsys, form):
    run = fit_own(methods, form)
    message = message_of(capsys, lambda: command(["predict", run]))
    assert (
        "predict: the outputs are no tensors with a row for each sample, all of one shape; return" in message
    )
    assert not [*Path(run).glob("predictions*")]


def test_a_limit_of_0_is_told(patients, capsys):
    fit()
    main(["fit", "--config", "run.yaml", "--name", "none", "--trainer.limit_predict_batches", "0"])
    message = message_of(capsys, lambda: command(["predict", "runs/none"]))
    assert (
        "predict: no batch is predicted; give the run test data, and leave trainer.limit_predict_batches: 0"
        in message
    )


@pytest.mark.parametrize(("name", "written"), [("here.txt", "here.txt"), ("there.csv", "there.csv")])
def test_the_output_has_the_given_name_with_and_without_a_file(patients, capsys, name, written):
    _, run = fit()
    Path("there").touch()
    write_table("new.csv", 5, seed=1)
    for words in ([run], [run, "new.csv"]):
        Path(written).unlink(missing_ok=True)
        rows = predicted(capsys, *words, "--output", name)
        assert rows == table_of(written)


def test_a_run_that_is_not_there_is_told_as_run(capsys):
    assert "run: nosuch is no run directory" in message_of(capsys, lambda: command(["predict", "nosuch"]))


def test_a_checkpoint_of_another_version_is_told(patients, capsys):
    _, run = fit()
    path = Path(run, "checkpoints/last.ckpt")
    content = torch.load(path, weights_only=True)
    content["fl_lightning"]["left_out"] = content["fl_lightning"].pop("unsaved")
    torch.save(content, path)
    message = message_of(capsys, lambda: command(["predict", run]))
    assert (
        "ckpt_path: another version of fl_lightning wrote the checkpoint, which has no unsaved; use"
        in message
    )


def test_a_class_that_is_gone_is_told_with_the_runs_config(methods, capsys):
    run = fit_own(methods, "inputs")
    sys.modules.pop("methods")
    Path("methods.py").unlink()
    message = message_of(capsys, lambda: command(["predict", run]))
    assert f"({run}/config.yaml)" in message
    assert "/tmp/" not in message.replace(run, "")
