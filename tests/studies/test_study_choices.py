"""What is chosen on validation data: by which metric, of which trials, and what no trial can decide."""

import shutil
from dataclasses import replace

import pytest

from fl_lightning import ConfigurationError
from fl_lightning.experiments.studies.choosing import chosen, is_chosen
from fl_lightning.experiments.studies.tables import choice_in_words
from tests.support.untrained_cells import LR, STUDY, finish, study_cells


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_label_is_chosen_by_validation_and_never_by_test():
    cells = study_cells()
    ((*own,),) = cells.trials
    assert len(own) == 6
    assert {one.seed for one in own} == {1000}  # no seed of the table
    assert cells.table(chosen(cells.study, cells.trials)) == []
    val = {
        ("BN", "0.1"): 0.3,
        ("BN", "0.2"): 0.5,
        ("BN", "0.4"): 0.5,
        ("GN", "0.1"): 0.1,
        ("GN", "0.2"): 0.2,
        ("GN", "0.4"): 0.9,
    }
    for one in own:
        found = val[tuple(one.labels.values())]
        finish(
            one,
            **{
                "val/accuracy": found,
                "test/accuracy": 1 - found,
                "diverged": one.labels["method"] == "GN" and found > 0.5,
            },
        )
    choices = chosen(cells.study, cells.trials)
    assert [(one.by, one.chosen) for one in choices] == [
        ({"method": "BN"}, "0.2"),
        ({"method": "GN"}, "0.2"),
    ]
    assert choices[0].values == {"0.1": 0.3, "0.2": 0.5, "0.4": 0.5}
    table = cells.table(choices)
    assert [(*one.labels.values(), one.seed) for one in table] == [
        ("BN", "0.2", 0),
        ("BN", "0.2", 1),
        ("GN", "0.2", 0),
        ("GN", "0.2", 1),
    ]
    assert not {*table} & {*own}
    assert not is_chosen({"method": "BN", "model.client_optimizer.lr": "0.1"}, choices)


@pytest.mark.parametrize(
    ("metric", "best"),
    [("val/client_loss_worst", {}), ("val/personal_mae", {"mae": "min"}), ("val/client_mae", {"mae": "min"})],
)
def test_the_least_error_of_clients_is_chosen(metric, best):
    cells = study_cells(
        axes={"method": {"BN": {}}, LR[2:]: [0.1, 0.2, 0.4]}, choose=[{"axis": LR[2:], "metric": metric}]
    )
    for one, value in zip(cells.trial_cells, (0.9, 0.3, 0.6), strict=True):
        finish(one, **{metric: value, "best": best})
    assert chosen(cells.study, cells.trials)[0].chosen == "0.2"


@pytest.mark.parametrize("worst", [{"val/accuracy": float("nan")}, {"diverged": True}, None])
def test_a_trial_without_a_number_is_the_worst_and_the_first_label_stays_where_all_are(worst):
    """A method that diverges with every learning rate, or fails, keeps its row, and all that is claimed of it."""
    cells = study_cells(
        axes={"model.client_optimizer.lr": [0.1, 0.2]}, choose=[{"axis": "model.client_optimizer.lr"}]
    )
    (first, second), *_ = cells.trials

    def end_worst(one):
        if worst is not None:
            finish(one, **worst)
        else:
            one.key.mkdir(parents=True)
            (one.key / "config.yaml").write_text("")
            (one.key / "error.txt").write_text("Diverged: round 3: the update is not finite\n")

    end_worst(first)
    assert [one.chosen for one in chosen(cells.study, cells.trials)] == [None]
    finish(second)
    (choice,) = chosen(cells.study, cells.trials)
    assert choice.chosen == "0.2"
    assert choice.values == {"0.1": float("-inf"), "0.2": 0.5}
    shutil.rmtree(second.key)
    end_worst(second)
    (choice,) = chosen(cells.study, cells.trials)
    assert "val/accuracy of seed 1000, the first, since all diverged (" in choice_in_words(choice)
    assert choice.chosen == "0.1"
    assert len(cells.table([choice])) == 2


def test_what_is_read_by_a_metric_of_its_own_is_chosen_by_it():
    axes = {**STUDY["axes"], "method": {"BN": {}, "silo": {"metric": "test/accuracy_silobn"}}}
    cells = study_cells(axes=axes)
    for one in {one.key: one for one in cells.trials[0]}.values():
        lr = float(one.labels["model.client_optimizer.lr"])
        finish(one, **{"val/accuracy": lr, "val/accuracy_silobn": 1 - lr})
    bn, silo = chosen(cells.study, cells.trials)
    assert (bn.chosen, bn.metric) == ("0.4", "val/accuracy")
    assert (silo.chosen, silo.metric) == ("0.1", "val/accuracy_silobn")


def test_the_loss_of_a_variant_is_best_when_it_is_smallest():
    axes = {**STUDY["axes"], "method": {"silo": {"metric": "test/loss_silobn"}}}
    cells = study_cells(axes=axes)
    for one in cells.trials[0]:
        finish(one, **{"val/loss_silobn": float(one.labels["model.client_optimizer.lr"])})
    (silo,) = chosen(cells.study, cells.trials)
    assert silo.chosen == "0.1"


def test_a_choice_says_at_which_labels_of_other_axes_it_was_tried():
    axes = {**STUDY["axes"], "model.local_steps": [1, 2], "model.participation": [0.5]}
    choose = [{**STUDY["choose"][0], "at": {"model.local_steps": "2"}}]
    cells = study_cells(axes=axes, choose=choose)
    assert [(one.by, one.at) for one in chosen(cells.study, cells.trials)] == [
        ({"method": method}, {"model.local_steps": "2"}) for method in ("BN", "GN")
    ]
    words = choice_in_words(chosen(cells.study, cells.trials)[0])
    assert "of seed 1000 at local_steps=2, used at every local_steps (" in words


def test_each_combination_needs_a_trial():
    axes = {**STUDY["axes"], "model.local_steps": [1, 2]}
    left_out = [{"method": "GN", "model.local_steps": 1}]
    with pytest.raises(
        ConfigurationError, match=r"choose: no trial chooses .*lr for .*'GN'.*; name labels of other axes"
    ):
        _ = study_cells(axes=axes, without=left_out).trials
    at = [{**STUDY["choose"][0], "at": {"model.local_steps": "2"}}]
    assert len(study_cells(axes=axes, without=left_out, choose=at).trials[0]) == 6


def chosen_with_extensions(cells, quality):
    """The choices once all trials have the ``quality`` of their method and rate."""

    def run(trials):
        for one in trials:
            if not one.key.exists():
                value = quality(one.labels["method"], float(one.labels["model.client_optimizer.lr"]))
                finish(one, **({"diverged": True} if value is None else {"val/accuracy": value}))

    return cells.choose(run)


def test_a_rate_at_the_edge_extends_its_grid_by_its_own_ratio_and_for_its_method_alone():
    """BN's best rate is 1.2, beyond the bound; GN's 0.05 is one step below; both grids are 0.1, 0.2, 0.4."""
    best = {"BN": 1.2, "GN": 0.05}
    cells = study_cells(choose=[{**STUDY["choose"][0], "extend": 1}])
    bn, gn = chosen_with_extensions(cells, lambda method, lr: -abs(lr - best[method]))
    assert [*bn.values] == ["0.1", "0.2", "0.4", "0.8"]
    assert [*gn.values] == ["0.05", "0.1", "0.2", "0.4"]
    assert (bn.chosen, bn.extended, gn.chosen, gn.extended) == ("0.8", ["0.8"], "0.05", ["0.05"])
    assert "val/accuracy of seed 1000, grid extended by 0.8, edge of the grid (" in choice_in_words(bn)
    cells = study_cells()
    bn, gn = chosen_with_extensions(cells, lambda method, lr: -abs(lr - best[method]))
    assert (bn.chosen, bn.extended) == ("0.8", ["0.8", "1.6"])  # 1.6 is tried, and worse
    assert (gn.chosen, gn.extended) == ("0.05", ["0.05", "0.025"])
    assert "grid extended by 0.05, 0.025 (" in choice_in_words(gn)
    rates = {one.labels["model.client_optimizer.lr"] for one in cells.table([bn, gn])}
    assert rates == {"0.8", "0.05"}
    assert len(cells.trial_cells) == 10  # five for each method: no method tries the other's values


def test_where_all_diverge_smaller_rates_are_tried_and_no_other_axis_is_extended():
    cells = study_cells()
    (bn, _) = chosen_with_extensions(cells, lambda method, lr: None if lr > 0.05 else lr)
    assert (bn.chosen, bn.extended) == ("0.05", ["0.05", "0.025"])
    none = study_cells(choose=[{**STUDY["choose"][0], "extend": 0}])
    assert chosen_with_extensions(none, lambda method, lr: lr)[0].values.keys() == {"0.1", "0.2", "0.4"}
    axes = {"model.local_steps": [2, 4, 8], "method": {"BN": {}}, "model.client_optimizer.lr": [0.1]}
    steps = study_cells(axes=axes, choose=[{"axis": "model.local_steps"}])
    ((choice),) = chosen_with_extensions(steps, lambda method, lr: 0.5)
    assert choice.extended == []
    assert "edge of the grid" in choice_in_words(choice)


def test_trials_of_other_code_choose_unless_they_are_computed_anew():
    cells = study_cells()
    for one in cells.trials[0]:
        finish(one, provenance=[{**one.now, "fl_lightning": "0ld"}])
    assert {one.chosen for one in chosen(cells.study, cells.trials)} == {"0.1"}
    anew = [[replace(one, rerun=True) for one in trial] for trial in cells.trials]
    assert {one.chosen for one in chosen(cells.study, anew)} == {None}


@pytest.mark.parametrize(
    ("options", "changes", "told"),
    [
        ([f"{LR}=0.3"], {}, r"^choose: the labels of model.client_optimizer.lr give equal runs such as"),
        ([], {"seed": 1}, r"^choose: seed 1 of the trials is a seed of the table too.* as 2$"),
        (["--data.val_fraction=0.0"], {}, r"data.val_fraction: 0 leaves .* no validation data to choose model.client_optimizer.lr on"),
        ([], {"metric": "val/norm"}, r"^choose: val/norm does not say whether large .* are best; choose by"),
        ([], {"metric": "val/iou"}, "choose: the runs have no metric val/iou; there are val/accuracy"),
    ],
)  # fmt: skip
def test_trials_that_can_choose_nothing_are_refused(options, changes, told):
    cells = study_cells(options, choose=[{**STUDY["choose"][0], **changes}])

    def choose():
        for one in cells.trial_cells:
            finish(one, **{"val/norm": 1.0})
        chosen(cells.study, cells.trials)

    with pytest.raises(ConfigurationError, match=told):
        choose()
