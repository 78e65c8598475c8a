"""The report rule: which evaluation of a run is its value, and that every table says so."""

import json
from contextlib import nullcontext

import pytest

from fl_lightning import ConfigurationError
from fl_lightning.experiments.studies.collecting import collect, reported
from fl_lightning.experiments.studies.report_rule import check_rule
from fl_lightning.experiments.studies.tables import caption, whole_table, write_tables
from tests.support.untrained_cells import finish, study_cells

ROWS = [
    {"round": r, "test/accuracy": x, "test/loss": 1 - x}
    for r, x in ((0, 0.9), (10, 0.2), (20, 0.6), (30, 0.4))
]
RESULT = {"rounds": 40, "test/accuracy": 0.5, "test/loss": 0.5, "test/exchanges": 1.0}


@pytest.mark.parametrize(
    ("rule", "name", "value"),
    [
        ("last", "test/accuracy", 0.5),
        ("best", "test/accuracy", 0.6),  # not 0.9 of the initial model
        ("best", "test/loss", 0.4),
        ("mean of the last 2", "test/accuracy", 0.45),
        ("mean of the last 4", "test/accuracy", 0.425),
    ],
)
def test_a_rule_is_about_the_evaluations_of_trained_models_and_the_result(rule, name, value):
    assert reported(rule, name, RESULT, ROWS) == pytest.approx(value)
    logged_last = [*ROWS, {"round": 40, "test/accuracy": 0.5, "test/loss": 0.5}]
    assert reported(rule, name, RESULT, logged_last) == pytest.approx(value)


def test_what_was_evaluated_too_seldom_or_has_no_best_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"report: 'mean of the last 5' needs 5 evaluations .* only 4; reduce"
    ):
        reported("mean of the last 5", "test/accuracy", RESULT, ROWS)
    validation = [{"round": 10, "val/accuracy": 0.5}]
    with pytest.raises(
        ConfigurationError, match="report: 'best' needs 2 evaluations of test/accuracy in a run"
    ):
        reported("best", "test/accuracy", RESULT, validation)
    with pytest.raises(ConfigurationError, match="report: test/exchanges has no best value"):
        reported("best", "test/exchanges", RESULT, [{"round": 1, "test/exchanges": 2.0}])


@pytest.mark.parametrize(
    ("rule", "words", "value"),
    [
        ("last", "after the last round", "0.500"),
        ("best", "best on test data: optimistic", "0.600"),
        ("mean of the last 2", "mean of the last 2 evaluations", "0.450"),
    ],
)
def test_every_table_names_its_rule(tmp_path, monkeypatch, rule, words, value):
    monkeypatch.chdir(tmp_path)
    cells = study_cells(choose=[], axes={"method": {"BN": {}}}, report=rule)
    table = cells.table([])
    for one in table:
        (finish(one, **RESULT) / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    found = collect(cells.study, table, [], {})
    assert found.report == rule
    assert f"Values: {words}, mean ± standard deviation over seeds." in caption(found)
    (row,) = whole_table(found).to_numpy()
    assert row[1] == f"{value} ± 0.000"
    write_tables(tmp_path, found)
    for name in ("table.md", "table.tex"):
        assert words in (tmp_path / name).read_text()
    if rule != "last":
        assert f"test accuracy, {words}" in (tmp_path / "table.csv").read_text()


@pytest.mark.parametrize(
    ("rule", "of_clients", "of_server"),
    [("last", 0.75, 0.5), ("best", 1.0, 0.6), ("mean of the last 2", 0.875, 0.45)],
)
def test_columns_of_clients_and_server_models_follow_the_rule(
    tmp_path, monkeypatch, rule, of_clients, of_server
):
    monkeypatch.chdir(tmp_path)
    methods = {"FedBN": {}, "FedBN (clients)": {"metric": "test/personal_accuracy"}}
    cells = study_cells(choose=[], axes={"method": methods}, report=rule)
    table = cells.table([])
    rows = [row | {"test/personal_accuracy": 1.0} for row in ROWS]
    for one in table[:2]:  # both labels have the same runs
        folder = finish(one, **RESULT, **{"test/personal_accuracy": 0.75})
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    server, clients = collect(cells.study, table, [], {}).rows
    assert [*server.of("test/accuracy")] == pytest.approx([of_server, of_server])
    assert [*server.of("test/personal_accuracy")] == pytest.approx([of_clients, of_clients])
    assert clients.of("test/accuracy").equals(server.of("test/personal_accuracy"))
    assert clients.of("server/test/accuracy").equals(server.of("test/accuracy"))


@pytest.mark.parametrize(("rule", "shared"), [("last", True), ("mean of the last 4", False), ("best", False)])
def test_cells_that_are_evaluated_more_often_are_others_unless_the_last_value_counts(
    tmp_path, monkeypatch, rule, shared
):
    monkeypatch.chdir(tmp_path)
    settings = {"choose": [], "axes": {"method": {"BN": {}}}, "report": rule}
    options = ("--data.val_fraction=0",)
    seldom, often = (
        study_cells([f"--trainer.check_val_every_n_epoch={n}", *options], **settings) for n in (10, 1)
    )
    for one in seldom.table([]):
        finish(one)
    phases = {one.state().phase for one in often.table([])}
    assert phases == {"done" if shared else "missing"}


@pytest.mark.parametrize(
    ("rule", "rounds", "every", "fraction", "told"),
    [
        ("best", 20, 5, 0.1, "report: 'best' needs evaluations of test data in training, but data.val_fraction is 0.1"),
        ("mean of the last 5", 20, 5, 0, "report: 'mean of the last 5' needs 5 evaluations in a run, but .* gives 4 in 20"),
        ("best", 20, 5, 0, ""),
        ("mean of the last 5", 21, 5, 0, ""),
        ("last", 1, 1, 0.1, ""),
    ],
)  # fmt: skip
def test_a_rule_that_a_run_cannot_follow_is_refused_before_training(rule, rounds, every, fraction, told):
    trainer = {"max_epochs": rounds, "check_val_every_n_epoch": every}
    config = {"trainer": trainer, "data": {"init_args": {"val_fraction": fraction}}}
    with pytest.raises(ConfigurationError, match=told) if told else nullcontext():
        check_rule(rule, ["test/accuracy"], config)
