"""The workspace shows what runs log, and nothing else."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_lightning import Segmentation
from fl_lightning.__main__ import main
from fl_lightning.cli.dashboard import _metrics
from fl_lightning.experiments.run_directory.describe import shown_metrics
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.weights_and_biases.workspace import make_workspace
from tests.support.command_line import message_of, run, write_config
from tests.support.wandb_files import offline_runs, read_run

pytest.importorskip("wandb_workspaces")
# the library's own, while it is imported
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")

DOCTOR = {
    "class_path": "BatchNormDiagnostics",
    "init_args": {"every_n_rounds": 1, "measure": ["statistics", "gradients", "gap", "bias"]},
}
HEALTHY = {
    "trainer.callbacks": [DOCTOR, {"class_path": "CommunicationLedger"}, {"class_path": "ClientEvaluation"}],
    "trainer.max_epochs": 2,
    "trainer.check_val_every_n_epoch": 1,
    "data.init_args.val_fraction": 0.0,
}
HUGE = {"class_path": "Gaussian", "init_args": {"std": 1e38}}  # some of its floats are infinite
ATTACKED = {
    "trainer.callbacks": [
        {"class_path": "Byzantine", "init_args": {"attack": HUGE, "clients": 1, "target": "parameters"}},
        {"class_path": "AggregationDiagnostics"},
        DOCTOR,
        {"class_path": "ClientEvaluation"},
    ],
    "trainer.max_epochs": 2,
    "trainer.check_val_every_n_epoch": 1,
    "model.aggregator": {"class_path": "Median"},
    "model.failures": {"class_path": "ClientFailures", "init_args": {"stragglers": 0.5}},
    "model.on_divergence": "drop",
}


def made(*attempts):
    """The workspace of runs, as W&B gets it."""
    workspace = make_workspace("mine", "me", _metrics([str(attempt.path) for attempt in attempts]))
    return json.loads(workspace._to_model().model_dump_json(by_alias=True))


def panels(workspace):
    """The kind and the settings of each panel, by the name of its section."""
    sections = workspace["spec"]["section"]["panelBankConfig"]["sections"]
    return {
        section["name"]: [(panel["viewType"], panel["config"]) for panel in section["panels"]]
        for section in sections
    }


@pytest.mark.slow
def test_every_metric_of_a_panel_is_one_that_runs_log(offline):
    history, summary = set(), set()
    for name, changes in {"healthy": HEALTHY, "attacked": ATTACKED}.items():
        attempt = run(config=write_config(changes, f"{name}.yaml")).attempt
        found = read_run(offline_runs(attempt)[0])
        history |= {metric for row in found.history for metric in row}
        summary |= set(found.summary)
    shown = [panel for section in panels(made()).values() for panel in section]
    for kind, known in (("Run History Line Plot", history), ("Bar Chart", summary)):
        metrics = {metric for view, config in shown if view == kind for metric in config["metrics"]}
        assert metrics - known == set()
        assert len(metrics) > 3
    assert {view for view, _ in shown} == {"Run History Line Plot", "Bar Chart"}


def test_curves_have_the_round_as_their_axis_and_a_mean_and_deviation_of_each_group(offline):
    workspace = made()
    assert (workspace["project"], workspace["entity"]) == ("mine", "me")
    assert list(panels(workspace)) == ["Accuracy", "BN doctor", "Communication", "Time", "Byzantine"]
    for view, config in (panel for section in panels(workspace).values() for panel in section):
        assert (config["groupBy"], config["groupAgg"], config["groupArea"]) == ("group", "mean", "stddev")
        assert view == "Bar Chart" or config["xAxis"] == "round"
    (runs,) = workspace["spec"]["section"]["runSets"]
    assert runs["grouping"] == [{"section": "run", "name": "group"}]


def test_panels_of_a_run_are_those_of_its_task_and_metrics(offline):
    macro = {"class_path": "torchmetrics.F1Score", "init_args": {"task": "multiclass", "average": "macro"}}
    changes = {
        "model.metrics": {"macro_f1": macro},
        "trainer.max_epochs": 1,
        "data.init_args.val_fraction": 0.2,
    }
    attempt = run(config=write_config(changes)).attempt
    found = read_run(offline_runs(attempt)[0])
    assert found.summary["test/macro_f1"] == dict.fromkeys(
        ["max", "last"], found.summary["final/test/macro_f1"]
    )
    sections = panels(made(attempt))
    drawn = {config["chartTitle"]: config["metrics"] for _, config in sections["Accuracy"]}
    assert drawn["validation macro f1"] == ["val/macro_f1"]
    assert drawn["final macro f1"] == ["final/val/macro_f1", "final/test/macro_f1"]
    assert {"validation accuracy", "test accuracy", "learning rates"} < drawn.keys()


def test_panels_of_a_segmentation(offline, capsys):
    Path("segmented").mkdir()
    Path("segmented/run.json").write_text(json.dumps({"metrics": shown_metrics(Segmentation())}))
    sections = panels(made(Attempt(Path("segmented"))))
    assert next(iter(sections)) == "Mean IoU"
    drawn = {
        config["chartTitle"]: config["metrics"] for section in sections.values() for _, config in section
    }
    assert drawn["test pixel accuracy"] == ["test/pixel_accuracy"]
    assert "val/mean_iou_recalibrated" in drawn["mean IoU under other statistics"]
    assert "val/client_mean_iou_worst" in drawn["clients' mean IoU: mean and worst tenth"]
    assert not any(
        "accuracy" in metric.partition("pixel_")[0] for names in drawn.values() for metric in names
    )
    assert "nowhere is no run: it has no run.json" in message_of(
        capsys, lambda: main(["dashboard", "nowhere"])
    )


def test_without_a_key_one_line_says_how_it_comes_to_wandb(offline, capsys):
    line = message_of(capsys, lambda: main(["dashboard"]))
    assert "dashboard: W&B is not online; store an API key by wandb login" in line


@pytest.fixture
def online(offline, monkeypatch):
    """A key, and what W&B is sent."""
    import wandb
    from wandb_workspaces.workspaces import interface, internal

    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 3)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    sent = []

    def take(view):
        sent.append(view)
        return {"upsertView": {"view": {"name": "nw-abc-v", "id": "1"}}}

    monkeypatch.setattr(internal, "upsert_view2", take)
    # the real one asks the server who this is
    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(default_entity="me"))
    monkeypatch.setattr(interface, "get_app_url", lambda api: "https://there")
    yield sent
    wandb.teardown()


def test_with_a_key_it_is_saved_and_the_address_printed(online, capsys):
    main(["dashboard", "--project", "mine"])
    (view,) = online
    assert (view.project, view.entity) == ("mine", "me")
    assert capsys.readouterr().out == "W&B: https://there/me/mine?nw=abc\n"


def test_what_wandb_says_is_one_line(online, monkeypatch, capsys):
    def refuse(view):
        raise ValueError("no such\nproject")

    monkeypatch.setattr("wandb_workspaces.workspaces.internal.upsert_view2", refuse)
    line = message_of(capsys, lambda: main(["dashboard"]))
    assert line.endswith("did not save the workspace: no such project\n")


def test_library_that_is_not_installed_is_one_line(online, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    line = message_of(capsys, lambda: main(["dashboard"]))
    assert "pip install 'fl_lightning[dashboard]'" in line
