"""Runs of a LightningModule: ranks, resumed runs, checkpoints, configuration files and studies."""

import sys
from copy import deepcopy
from pathlib import Path

import lightning as L
import pandas as pd
import pytest
import torch
import yaml

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedDataModule,
    FederatedModule,
    Run,
    callbacks,
    load_model,
    load_study,
)
from fl_lightning.__main__ import main
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.experiments.studies.engines import local
from tests.support.helpers import SaveRounds, States, distance
from tests.support.lightning_sites import Lit, Site, federated, sites
from tests.support.outcomes import assert_same
from tests.support.study_in_process import InThisProcess


def numbers(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


METHODS = {"fedavg": list, "fixbn": lambda: [callbacks.FixBN()], "fedbn": lambda: [callbacks.FedBN()]}


class Metrics(FederatedCallback):
    """The metrics of the newest round, which rank 0 hands back to the process of the test."""

    role = "observer"

    def __init__(self, found):
        self.found = found

    def on_train_end(self, trainer, pl_module):
        self.found.update(numbers(pl_module.metrics))


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("metrics", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_bits_and_logged_values_are_those_of_one_process_on_any_number_of_ranks(methods, metrics):
    start = Lit(metrics=metrics)
    outcomes = []
    for ranks in (1, 2, 3):
        seen, found = States(), {}
        trainer = {"devices": ranks, "strategy": "cohort"}
        settings = {"data": sites(4, train=24), "rounds": 2, "participation": 3, "trainer": trainer}
        federated(deepcopy(start), *methods(), seen, Metrics(found), **settings)
        outcomes.append((seen.states, found))
    for states, found in outcomes[1:]:
        assert_same(outcomes[0][0], states)
        assert found == outcomes[0][1]
    assert "val_loss" in outcomes[0][1]


def test_a_rank_without_clients_adds_nothing_to_logged_values():
    """FedTAN's first step is computed on all ranks, here on three for two clients."""
    start, found = Lit(), [{}, {}]
    for metrics, ranks in zip(found, (1, 3), strict=True):
        trainer = {"devices": ranks, "strategy": "cohort"}
        federated(deepcopy(start), callbacks.FedTAN(), Metrics(metrics), rounds=2, trainer=trainer)
    assert found[0] == found[1]


def test_values_of_hooks_that_differ_between_ranks_are_an_error():
    class KnowsItsRank(Lit):
        def on_train_epoch_end(self):
            self.log("last", float(self.trainer.global_rank))

    with pytest.raises(
        ConfigurationError, match=r"round 1: rank 1 has another logged values\['last'\] than rank 0"
    ):
        federated(KnowsItsRank(), rounds=1, trainer={"devices": 2, "strategy": "cohort"})


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_a_resumed_run_equals_the_uninterrupted_one(methods, tmp_path):
    start = Lit(metrics=True)
    whole = federated(deepcopy(start), SaveRounds(tmp_path), *methods(), rounds=4)
    for number in (1, 2, 3):
        resumed = federated(deepcopy(start), *methods(), rounds=4, ckpt_path=tmp_path / f"{number}.ckpt")
        assert distance(whole.state_dict(), resumed.state_dict()) == 0
        assert numbers(whole.metrics) == numbers(resumed.metrics)


def test_checkpoints_load_into_the_users_class(tmp_path):
    module = Lit(lr=0.03, metrics=True)
    run = Run(
        FederatedModule(module, local_steps=2),
        sites(),
        callbacks=[callbacks.FixBN()],
        checkpoint=RoundCheckpoint(monitor="val_acc"),
        run_root=tmp_path,
        max_epochs=3,
    )
    result = run.fit()
    assert result["metrics"] == [name for name in result["metrics"] if name in result]
    assert {"val_loss", "val_acc", "test_loss"} <= {*result["metrics"]}
    last = Lit.load_from_checkpoint(run.path / "checkpoints" / "last.ckpt")
    assert dict(last.hparams) == {"lr": 0.03, "metrics": True, "optimizer": "sgd"}
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in last.state_dict().items())
    best = Lit.load_from_checkpoint(run.path / "checkpoints" / "best.ckpt")
    alone = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).validate(
        best, Site(99), verbose=False
    )
    lines = [yaml.safe_load(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert alone[0]["val_acc"] == max(line["val_acc"] for line in lines[1:])
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert config["model"]["model"]["init_args"] == {"lr": 0.03, "metrics": True, "optimizer": "sgd"}


def test_a_module_may_keep_state_of_its_own_in_checkpoints(tmp_path):
    class Remembers(Lit):
        rounds = 0

        def on_train_epoch_end(self):
            self.rounds += 1

        def on_save_checkpoint(self, checkpoint):
            checkpoint["rounds"] = self.rounds

        def on_load_checkpoint(self, checkpoint):
            self.rounds = checkpoint["rounds"]

    federated(Remembers(optimizer="plain"), SaveRounds(tmp_path), rounds=3)
    module = Remembers(optimizer="plain")
    federated(module, rounds=4, ckpt_path=tmp_path / "3.ckpt")
    assert module.rounds == 4


def test_a_schedule_that_ends_before_the_run_is_an_error(tmp_path):
    federated(Lit(), SaveRounds(tmp_path), rounds=3)
    with pytest.raises(ConfigurationError, match=r"OneCycleLR ends before the run: Tried to step 7 times"):
        federated(Lit(), rounds=4, ckpt_path=tmp_path / "3.ckpt")


class WithPath(Lit):
    def __init__(self, folder, lr=0.1):
        super().__init__(lr=lr)
        self.save_hyperparameters()


def test_hyperparameters_that_are_no_plain_values_are_given_again(tmp_path, capsys):
    module = FederatedModule(WithPath(Path("here"), lr=0.2), local_steps=1)
    run = Run(module, sites(), run_root=tmp_path, max_epochs=1)
    run.fit()
    assert "checkpoints leave out the hyperparameters folder of WithPath" in capsys.readouterr().out
    loaded = WithPath.load_from_checkpoint(run.path / "checkpoints" / "last.ckpt", folder=Path("there"))
    assert (loaded.hparams.folder, loaded.hparams.lr) == (Path("there"), 0.2)


def test_another_hyperparameter_is_refused_on_resume(tmp_path):
    def run(lr, rounds):
        return Run(FederatedModule(Lit(lr=lr), local_steps=2), sites(), run_root=tmp_path, max_epochs=rounds)

    run(0.1, 2).fit()
    with pytest.raises(ConfigurationError, match=r"model\.model.*lr"):
        run(0.2, 2).fit(resume=True)


CODE = """
from tests.support.lightning_sites import FederatedDataModule, Lit, Site


class Hospitals(FederatedDataModule):
    def __init__(self, count: int = 2, server: bool = True, seed: int = 0):
        clients = {f"site {number}": Site(number) for number in range(count)}
        super().__init__(clients, Site(99) if server else None, seed)
"""


def written_config():
    Path("mine.py").write_text(CODE)
    config = {
        "seed_everything": 0,
        "wandb": {"mode": "disabled"},
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {
            "model": {"class_path": "mine.Lit", "init_args": {"lr": 0.05, "metrics": True}},
            "local_steps": 2,
        },
        "data": {"class_path": "mine.Hospitals"},
    }
    Path("tiny.yaml").write_text(yaml.safe_dump(config))


def last(folder):
    """Arguments for the configuration and the newest checkpoint of a run."""
    return ["--config", f"{folder}/config.yaml", "--ckpt_path", f"{folder}/checkpoints/last.ckpt"]


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    written_config()
    yield
    sys.modules.pop("mine", None)


def test_the_command_line_trains_tests_and_tabulates_the_users_module(own_module, capsys):
    main(["fit", "--config", "tiny.yaml", "--trainer.callbacks", "FixBN"])
    told = capsys.readouterr().out
    assert "val_loss" in told
    assert "test_loss" in told
    (folder,) = Path("runs").glob("*/*s0")
    main(["test", *last(folder)])
    assert "test_loss" in capsys.readouterr().out
    main(["predict", str(folder)])
    assert "7 predictions written to" in capsys.readouterr().out
    main(["runs"])
    assert "val_acc" in capsys.readouterr().out


def test_clients_own_data_are_evaluated_and_predicted_where_there_is_no_server(own_module, capsys):
    main(["fit", "--config", "tiny.yaml", "--data.server", "false", "--checkpoint.monitor", "val_loss"])
    (folder,) = Path("runs").glob("*/*s0")
    main(["predict", str(folder)])
    assert "14 predictions written to" in capsys.readouterr().out


def test_with_a_limit_the_first_batches_of_each_clients_data_are_predicted(own_module):
    limit = ["--trainer.limit_predict_batches", "1"]
    main(["fit", "--config", "tiny.yaml", "--data.server", "false", *limit])
    (folder,) = Path("runs").glob("*/*s0")
    main(["predict", str(folder)])
    (file,) = folder.glob("predictions_*.csv")
    sites = [Site(0), Site(1)]
    for site in sites:
        site.setup("test")
    expected = torch.cat([site.held_out.tensors[1][:3] for site in sites]).tolist()
    assert pd.read_csv(file)["target"].tolist() == expected


@pytest.mark.parametrize(("metric", "best"), [("val_loss", min), ("val_acc", max)])
@pytest.mark.slow
def test_a_study_chooses_by_a_logged_name_and_tabulates_it(own_module, monkeypatch, metric, best):
    monkeypatch.setattr(local, "LocalEngine", InThisProcess)
    monkeypatch.setattr(InThisProcess, "ran", [], raising=False)
    study = {
        "title": "Rates",
        "axes": {"lr": {"0.0": {"model.model.init_args.lr": 0.0}, "0.9": {"model.model.init_args.lr": 0.9}}},
        "metrics": {"test_loss": "test loss"},
        "choose": [{"axis": "lr", "metric": metric}],
        "scales": {"quick": {"base": "tiny.yaml", "seeds": [0]}},
    }
    Path("s.yaml").write_text(yaml.safe_dump(study))
    main(["study", "s.yaml", "--jobs", "1"])
    results = load_study("runs/studies/s-quick")
    assert {*results.values["metric"]} == {"test_loss"}
    (choice,) = results.choices
    assert len({*choice.values.values()}) == 2
    assert choice.chosen == best(choice.values, key=choice.values.__getitem__)


OWN_STEP = """
from fl_lightning import FederatedDataModule as Sites
from tests.support.lightning_sites import CLASSES, Lit, Site
from torch.utils.data import DataLoader


class Softmax(Lit):
    def __init__(self, lr: float = 0.1, num_classes: int = CLASSES):
        super().__init__(lr)
        self.classes = num_classes

    def predict_step(self, batch, batch_idx):
        scores = self(batch if not isinstance(batch, list) else batch[0])
        return scores.softmax(1) + 100 * (self.classes - CLASSES)


class Pair(Softmax):
    def predict_step(self, batch, batch_idx):
        return {"scores": super().predict_step(batch, batch_idx)}


class NewSite(Site):
    def predict_dataloader(self):
        return DataLoader(self.held_out.tensors[0][:4], batch_size=3)
"""


@pytest.mark.parametrize("site", ["Site", "NewSite"])
def test_a_predict_step_decides_the_values_and_the_server_the_samples(own_module, site, capsys):
    Path("mine.py").write_text(CODE + OWN_STEP)
    server = {"class_path": f"mine.{site}", "init_args": {"seed": 99}}
    Path("server.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"model": {"class_path": "mine.Softmax", "init_args": {"lr": 0.05}}},
                "data": {
                    "class_path": "FederatedDataModule",
                    "init_args": {
                        "clients": {"a": {"class_path": "mine.Site", "init_args": {"seed": 1}}},
                        "server": server,
                    },
                },
            }
        )
    )
    tiny = yaml.safe_load(Path("tiny.yaml").read_text())
    tiny.pop("data")
    tiny["model"].pop("model")
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny))
    given = ["--config", "tiny.yaml", "--config", "server.yaml"]
    main(["fit", *given])
    (folder,) = Path("runs").glob("*/*s0")
    main(["predict", str(folder), "--checkpoint", "last"])
    assert f"{7 if site == 'Site' else 4} predictions" in capsys.readouterr().out
    (file,) = folder.glob("predictions_*_last_round_2.csv")
    table = pd.read_csv(file)
    values = [f"value_{number}" for number in range(3)]
    assert [*table.columns] == ["index", *["target"] * (site == "Site"), *values]
    module = sys.modules["mine"].Softmax.load_from_checkpoint(file.parent / "checkpoints/last.ckpt").eval()
    samples = Site(99)
    samples.setup("test")
    expected = module(samples.held_out.tensors[0]).softmax(1)[: len(table)]
    torch.testing.assert_close(torch.tensor(table[values].to_numpy()).float(), expected)
    main(["fit", *given, "--model.model", "mine.Pair", "--name", "pair"])
    with pytest.raises(SystemExit):
        main(["predict", "runs/pair"])
    assert "outputs are dict and batches" in capsys.readouterr().err


def test_a_setting_of_the_modules_own_is_kept_by_a_study_and_mistakes_are_named(
    own_module, monkeypatch, capsys
):
    """Data without num_classes decide none: the user's value, or the module's default, does."""
    Path("mine.py").write_text(CODE + OWN_STEP)
    monkeypatch.setattr(local, "LocalEngine", InThisProcess)
    monkeypatch.setattr(InThisProcess, "ran", [], raising=False)
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    config["model"]["model"] = {"class_path": "mine.Softmax", "init_args": {"num_classes": 4}}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    study = {
        "title": "Classes",
        "axes": {"lr": {"0.1": {"model.model.init_args.lr": 0.1}}},
        "metrics": {"test_loss": "test loss"},
        "scales": {"quick": {"base": "tiny.yaml", "seeds": [0]}},
    }
    Path("s.yaml").write_text(yaml.safe_dump(study))
    main(["study", "s.yaml", "--jobs", "1"])
    (cell,) = Path("runs/cells").glob("*/*/config.yaml")
    assert yaml.safe_load(cell.read_text())["model"]["model"]["init_args"]["num_classes"] == 4
    config["data"] = {"class_path": "FederatedDataModule", "init_args": {"clients": {"a": "mine.Site"}}}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["fit", "--config", "tiny.yaml", "--model.local_step", "3"])
    assert "did you mean model.local_steps" in capsys.readouterr().err


def test_who_has_no_validation_data_is_said(capsys):
    bare = type("Bare", (Site,), {"val_dataloader": L.LightningDataModule.val_dataloader})
    federated(Lit(), data=FederatedDataModule([Site(0), bare(1)]), rounds=1)
    told = capsys.readouterr().out
    assert "validation is the mean over the other clients: 1 of 2 have no val_dataloader: client 1" in told
    nothing = {"data": FederatedDataModule([Site(0)], server=bare(1)), "trainer": {"limit_val_batches": 0}}
    federated(Lit(), **nothing, rounds=1)
    assert len(nothing["data"].notes) == 1
    federated(Lit(), **nothing, rounds=1)
    assert len(nothing["data"].notes) == 1
    assert "training evaluates nothing, as the server has no val_dataloader" in capsys.readouterr().out
    federated(Lit(), data=FederatedDataModule([Site(0)], server=Site(1)), rounds=1)
    assert "val_dataloader" not in capsys.readouterr().out


def test_classes_in_place_of_objects_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"model: <class .*Lit'> is no model; give an object"):
        FederatedModule(Lit, local_steps=1)
    with pytest.raises(
        ConfigurationError, match=r"data: clients\[0\] is <class .*Site'>; give a LightningDataModule"
    ):
        FederatedDataModule([Site])
    with pytest.raises(ConfigurationError, match=r"trainer.callbacks: <class .*FixBN'> is no callback"):
        Run(
            FederatedModule(Lit(), local_steps=1),
            sites(),
            callbacks=[callbacks.FixBN],
            run_root=tmp_path,
            max_epochs=1,
        ).fit()


def test_a_wrong_monitor_ends_the_run_after_its_first_evaluation(tmp_path):
    run = Run(
        FederatedModule(Lit(metrics=True), local_steps=1),
        sites(),
        run_root=tmp_path,
        max_epochs=4,
        check_val_every_n_epoch=2,
        checkpoint=RoundCheckpoint(monitor="val_accuracy"),
    )
    with pytest.raises(ConfigurationError, match=r"'val_accuracy' was never logged; logged are: .*val_acc"):
        run.fit()
    rows = (run.path / "metrics.jsonl").read_text().splitlines()
    assert yaml.safe_load(rows[-1])["round"] == 2


def test_a_clients_model_is_loaded_if_configure_optimizers_uses_the_trainer(own_module):
    scheduled = """
class Scheduled(Lit):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]
"""
    Path("mine.py").write_text(f"import torch\n{CODE}{scheduled}")
    main(["fit", "--config", "tiny.yaml", "--model.model", "mine.Scheduled", "--trainer.callbacks", "FedBN"])
    loaded = load_model("runs/tiny", client="site 1").model.state_dict()
    server = load_model("runs/tiny").model.state_dict()
    differing = {name for name, value in loaded.items() if not torch.equal(value, server[name])}
    assert differing == {f"net.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
