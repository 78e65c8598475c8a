"""Tables of a study: mean and deviation, what was published, what it took, in every form."""

import csv
import re
from dataclasses import replace

import pandas as pd
import pytest

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.studies.latex_table import escaped, latex_table
from fl_lightning.experiments.studies.study_frame import Chosen, Verdict
from fl_lightning.experiments.studies.table_columns import FURTHER, check_columns, local_metrics
from fl_lightning.experiments.studies.tables import (
    best_rows,
    caption,
    choice_in_words,
    latex_tables,
    learning_rate,
    mean_and_deviation,
    remark_lines,
    remarks,
    seeds_of,
    spread_table,
    whole_table,
    write_tables,
)
from tests.support.study_frames import study_frame


def run(seed, phase="done", **more):
    took = {"samples": 1000, "upload_bytes": 2e6, "exchanges": 10, "train_seconds": 30.0, "diverged": False}
    took |= {"rounds": 10, "planned_rounds": 10, "run_model": "LeNet", "loaded": {"images": "a"}}
    return {
        "seed": seed,
        "phase": phase,
        "why": "",
        **(took if phase == "done" else {}),
        **more,
    }


def group(method, steps, values, published=None, runs=None):
    return {
        "labels": {"method": method, "E": steps, "model.client_optimizer.lr": "0.1"},
        "published": published,
        "learning_rate": 0.1,
        "values": {"test/accuracy": dict(enumerate(values))},
        "runs": runs or [run(seed) for seed in range(len(values))],
    }


AXES = {"method": ["BN", "GN"], "E": ["1", "100"], "model.client_optimizer.lr": ["0.1", "0.2"]}
METRICS = {"test/accuracy": "test accuracy"}
VALUES = {"0.05": 0.6, "0.1": 0.7, "0.2": 0.6}
CHOICE = Chosen(
    "model.client_optimizer.lr", {"method": "GN"}, {}, "val/accuracy", "0.1", VALUES, 1000, [], []
)
GROUPS = [
    group("BN", "1", [0.3, 0.4, 0.5], 0.45),
    group("BN", "100", [0.6], runs=[run(0, diverged=True), run(1, "failed", why="boom"), run(2, "missing")]),
    group("GN", "1", [0.7, 0.7, 0.7], runs=[run(0, why="torch 1, now 2"), run(1), run(2)]),
    group("GN", "100", [], runs=[run(seed, "stale") for seed in range(3)]),
]


def results(groups=GROUPS, axes=AXES, metrics=METRICS, **more):
    found = {
        "paper": "A paper, Table 1",
        "scale": "reduced",
        "choose": ["model.client_optimizer.lr"],
        "spread": "E",
        "choices": [CHOICE],
        "claims": [Verdict("GN > BN", "holds", "+0.1 in one pair")],
    }
    return study_frame(groups, axes, metrics, **{**found, **more})


def wide_table(found):
    return whole_table(found, [*found.metrics, *FURTHER])


def cells_of_table(table):
    """The header and the rows."""
    return [*table.columns], table.to_numpy().tolist()


SMALLER = "Values: after the last round, mean ± standard deviation over seeds. Smaller than in the paper (LeNet, 10 rounds): the order of methods can be compared, numbers cannot."


def test_a_bar_in_a_label_and_a_break_in_a_title_break_no_table(tmp_path):
    groups = [{**GROUPS[0], "labels": {**GROUPS[0]["labels"], "method": "a|b"}}]
    write_tables(tmp_path, results(groups, title="A\ntitle"))
    assert "| a\\|b " in (tmp_path / "table.md").read_text()
    words = escaped(f"A title (A paper, Table 1). Scale: reduced, seeds 0, 1, 2. {SMALLER}")
    assert rf"\caption{{{words}}}" in (tmp_path / "table.tex").read_text()
    assert "a|b," in (tmp_path / "table.csv").read_text()


def test_mean_and_standard_deviation():
    assert mean_and_deviation([0.3, 0.4, 0.5]) == "0.400 ± 0.100"
    assert mean_and_deviation([0.3]) == "0.300"
    assert mean_and_deviation([]) == ""


def test_numbers_that_are_not_finite_are_words():
    nan, inf = float("nan"), float("inf")
    assert mean_and_deviation([0.3, nan, 0.5]) == "0.400 ± 0.141 (not finite in 1 of 3 runs)"
    assert mean_and_deviation([inf, nan]) == "not finite in 2 of 2 runs"
    assert mean_and_deviation([-inf]) == "not finite in 1 of 1 run"
    diverged = [
        run(0),
        run(1, diverged=True, diverged_round=17),
        run(2, "failed", diverged=True, diverged_round=9),
    ]
    groups = [
        group("BN", "1", [0.5, inf], 0.45, runs=diverged),
        group("GN", "1", [], runs=[run(0, "failed", diverged=True, diverged_round=17)]),
    ]
    header, rows = cells_of_table(wide_table(results(groups)))
    found = dict(zip(header, rows[0], strict=True))
    assert found["remarks"] == "diverged in 2 of 3 runs, round 9, 17"
    assert found["test accuracy"] == "0.500 (not finite in 1 of 2 runs)"
    assert "ours - published" not in header
    _, rows = cells_of_table(spread_table(results(groups)))
    assert rows[1] == ["GN", "diverged in 1 of 1 run, round 17"]
    choice = replace(CHOICE, values={"0.1": 0.5, "0.2": -inf})
    assert "(0.1: 0.500, 0.2: diverged)" in choice_in_words(choice)


def test_a_row_says_what_was_found_what_was_published_and_what_it_took():
    header, rows = cells_of_table(wide_table(results()))
    first = dict(zip(header, rows[0], strict=True))
    assert first == {
        "method": "BN", "E": "1", "test accuracy": "0.400 ± 0.100", "published": "0.45", "ours - published": "-0.050",
        "learning rate": "0.1, given", "seeds": "0, 1, 2", "samples": "1,000", "sent by clients": "2 MB", "exchanges": "10",
        "training": "30 s", "remarks": "",
    }  # fmt: skip
    remarks = [dict(zip(header, row, strict=True))["remarks"] for row in rows[1:]]
    assert remarks == [
        "diverged in 1 of 3 runs; failed: seed 1; missing: seed 2",
        "",
        "stale: seed 0, 1, 2",
    ]
    assert dict(zip(header, rows[2], strict=True))["learning rate"] == "0.1, by validation"


def test_one_axis_makes_the_columns():
    assert cells_of_table(spread_table(results())) == (
        ["method", "E = 1", "E = 100"],
        [["BN", "0.400 ± 0.100 (0.45)", "0.600, 1 of 3 runs"], ["GN", "0.700 ± 0.000", "-"]],
    )
    assert spread_table(results(spread=None)) is None


@pytest.mark.parametrize(
    ("tried", "edge"),
    [("0.1 0.2", True), ("0.02 0.1 0.2", False), ("0.1 0.02 0.01", True), ("1e-2 0.1 1", False), ("0.1 best", False)],
)  # fmt: skip
def test_a_number_at_the_edge_of_its_grid_is_called_so(tried, edge):
    found = results(choices=[replace(CHOICE, values=dict.fromkeys(tried.split(), 0.5))])
    said = learning_rate(found.rows[2], found)
    assert said == ("0.1, by validation, edge of the grid" if edge else "0.1, by validation")


def test_a_rate_is_chosen_also_where_its_axis_has_another_name(tmp_path):
    choice = replace(CHOICE, axis="speed", settings=["model.client_optimizer.lr"])
    found, other = (
        results(choices=[choice]),
        results(choices=[replace(choice, settings=["model.local_steps"])]),
    )
    assert learning_rate(found.rows[2], found).startswith("0.1, by validation")
    assert learning_rate(other.rows[2], other) == "0.1, given"
    write_tables(tmp_path, found)
    words = "speed of method=GN: 0.1, by val/accuracy"
    assert f"- {words}" in (tmp_path / "table.md").read_text()
    assert f"% {words}" in (tmp_path / "table.tex").read_text()


def test_a_rate_says_of_which_cell_it_is_the_best():
    found = results(choices=[replace(CHOICE, at={"model.E": "20", "T*": "0.5"})])
    said = learning_rate(found.rows[2], found)
    assert said == "0.1, by validation at E=20, T*=0.5"


def test_seeds_are_those_of_the_rows():
    one, three = group("BN", "1", [0.3]), group("GN", "1", [0.7] * 3)
    other, more = group("BN", "100", [0.3]), group("GN", "100", [0.7] * 3)
    assert seeds_of(results([one])) == "seed 0"
    assert seeds_of(results([three, more])) == "seeds 0, 1, 2"
    assert seeds_of(results([three, one, other])) == "seed 0 (2 rows) and seeds 0, 1, 2 (1 row)"


def test_runs_that_were_not_computed_alike_are_named():
    here = {
        "device": "cpu",
        "threads": 1,
        "cpu_capability": "AVX2",
        "executor": "SequentialExecutor()",
        "compiled": False,
    }
    runs = [run(0, directory="a", computed_by=here), run(1, directory="b", computed_by=here)]
    assert "alike" not in caption(results([group("BN", "1", [0.3, 0.4], runs=runs)]))
    runs.append(run(2, directory="c", computed_by={**here, "threads": 2}))
    groups = [
        group("BN", "1", [0.3, 0.4, 0.5], runs=runs),
        group("BN", "100", [0.5], runs=runs[:1]),
    ]  # one run, read twice
    assert "Not all computed alike: threads 1 (2 runs), 2 (1 run)." in caption(results(groups))
    runs = [run(seed, directory=str(seed), loaded={"images": x}) for seed, x in enumerate("aab")]
    groups = [group("BN", "1", [0.3, 0.4, 0.5], runs=runs)]
    words = caption(results(groups))
    assert "Not all on the same data: images a (2 runs), b (1 run)." in words
    assert "Not known" not in words
    runs[0]["loaded"] = {}
    words = caption(results(groups))
    assert "Not known to be on the same data: 1 run." in words
    for one in runs:
        one.update(loaded={}, data={"training": "a"})
    assert "Not known" not in caption(results(groups))


def test_a_row_that_is_read_of_other_runs_says_so():
    shared = {"runs": [run(0, directory="a")]}
    silo = {**shared, "metric": "test/accuracy_silobn"}
    groups = [group("BN", "1", [0.3]) | shared]
    groups += [group("SiloBN", steps, [0.4]) | silo for steps in ("1", "100")]
    assert remarks(results(groups)) == [
        [],
        ["costs are those of method=BN"],
        [
            "the same runs as method=SiloBN E=1 model.client_optimizer.lr=0.1",
            "costs are those of method=BN E=1",
        ],
    ]


def test_a_row_whose_runs_lack_the_metric_says_so():
    groups = [group("BN", "1", [0.3]), group("FixBN", "1", [], runs=[run(0), run(1)])]
    assert remarks(results(groups)) == [[], ["the runs have no test/accuracy"]]


def test_one_line_names_the_cells_of_other_code():
    def line(*runs):
        groups = [
            group(m, "1", [0.3] * len(own), runs=own) for m, own in zip(("BN", "GN"), runs, strict=True)
        ]
        found = remark_lines(results(groups, choose=[]))
        return [one.removeprefix("computed by other code: ") for one in found]

    old, older = "torch 1, now 2", "torch 0, now 2"
    assert line([run(0), run(1)], [run(0)]) == []
    assert line([run(0, why=old), run(1, why=old)], [run(0, why=old)]) == [f"all cells ({old})"]
    assert line([run(0, why=old), run(1)], [run(0)]) == [f"BN, E = 1, lr = 0.1, seed 0 ({old})"]
    both = line([run(0, why=old), run(1, why=older), run(2, why=old)], [run(0, why=old)])
    assert both == [
        f"BN, E = 1, lr = 0.1, seed 0, 2; GN, E = 1, lr = 0.1 ({old}); BN, E = 1, lr = 0.1, seed 1 ({older})"
    ]
    failed = line([run(0, "failed", why="boom"), run(1, why=old)], [run(0, why=old)])
    assert failed[-1] == f"all cells ({old})"


def test_columns_that_nobody_fills_are_left_out():
    one, bare = results([group("GN", "1", [0.7])]), results([group("GN", "1", [], runs=[run(0, "missing")])])
    header, _ = cells_of_table(wide_table(one))
    assert "published" not in header
    assert "remarks" not in header
    assert cells_of_table(whole_table(one, ["published", "seeds"])) == (
        ["method", "E", "seeds"],
        [["GN", "1", "0"]],
    )
    assert [*spread_table(one).columns] == ["method", "E = 1"]
    assert spread_table(bare) is None
    assert cells_of_table(whole_table(bare)) == (["method", "E", "remarks"], [["GN", "1", "missing: seed 0"]])
    assert " & - " not in latex_tables(bare)


def test_a_table_is_narrow_by_default_and_remarks_stand_below_it(tmp_path):
    metrics = {**METRICS, "test/loss": "test loss"}
    groups = [{**each, "values": {**each["values"], "test/loss": {0: 1.5}}} for each in GROUPS]
    found = results(groups, metrics=metrics)
    assert [*whole_table(found).columns] == ["method", "E", "test accuracy", "published"]
    assert {"test loss", "seeds", "training", "remarks"} < {*wide_table(found).columns}
    write_tables(tmp_path, found)
    assert (
        "\n- computed by other code: GN, E = 1, lr = 0.1, seed 0 (torch 1, now 2)\n"
        in (tmp_path / "table.md").read_text()
    )
    assert cells_of((tmp_path / "table.tex").read_text())[1][0] == [
        "method",
        "E",
        "test accuracy",
        "published",
    ]


def test_the_files_hold_the_same_table(tmp_path):
    write_tables(tmp_path, results())
    header, rows = cells_of_table(whole_table(results()))
    assert [*csv.reader((tmp_path / "table.csv").read_text().splitlines())] == [header, *rows]
    markdown, latex = (tmp_path / "table.md").read_text(), (tmp_path / "table.tex").read_text()
    seeds = "seed 0 (1 row) and seeds 0, 1, 2 (2 rows)"  # those that are done
    assert markdown.startswith(f"A title (A paper, Table 1). Scale: reduced, {seeds}. {SMALLER}\n")
    assert "- `GN > BN`: **holds** (+0.1 in one pair)" in markdown
    assert "| BN       | 0.400 ± 0.100 (0.45) | 0.600" in markdown
    assert latex.count("\n\\toprule") == 2
    assert r"0.400 $\pm$ 0.100 & " in latex


def test_a_subset_is_called_one(tmp_path):
    write_tables(tmp_path, results(scale="quick"))
    assert (
        "A declared subset that shows that the study works; its results are no evidence for or against the paper."
        in (tmp_path / "table.md").read_text()
    )
    write_tables(tmp_path, results(scale="quick", paper=""))  # a study of one's own
    assert "evidence" not in (tmp_path / "table.md").read_text()


def test_latex_explains_bold_and_published_values():
    by_steps, whole = re.findall(r"\\caption\{(.*)\}", latex_tables(results()))
    bold = "Bold: the best mean among rows of equal E, compared with three digits."
    assert by_steps.endswith(f"{bold} In parentheses: published values.")
    assert whole.endswith(bold)
    alike = [group(method, "1", [0.5]) for method in ("BN", "GN")]
    (alone,) = re.findall(r"\\caption\{(.*)\}", latex_tables(results(alike, spread=None)))
    assert "Bold" not in alone
    unpublished = [group(method, steps, [0.5]) for method in ("BN", "GN") for steps in ("1", "100")]
    assert "parentheses" not in latex_tables(results(unpublished))


def cells_of(latex):
    """The columns of the last ``tabular``, and the cells of its rows, which fill the columns."""
    tabular = latex.rpartition(r"\begin{tabular}{")[2].partition(r"\end{tabular}")[0]
    columns, *lines = tabular.splitlines()
    rows = [re.split(r"(?<!\\) ?& ?", line.removesuffix(r" \\")) for line in lines if line.endswith(r" \\")]
    assert {len(row) for row in rows} == {len(columns.removesuffix("}"))}
    return columns, rows


def test_latex_has_aligned_numbers_units_in_the_head_and_the_best_in_bold():
    columns, (head, *rows) = cells_of(
        latex_tables(results(), ["test/accuracy", "sent by clients", "training"])
    )
    assert columns == "llrrr}"
    assert head == [
        "method",
        "E",
        "test accuracy",
        r"\shortstack[r]{sent by\\clients (MB)}",
        "training (s)",
    ]
    assert rows[0] == ["BN", "1", r"0.400 $\pm$ 0.100", "2.00", "30"]
    bold = r"{\bfseries\boldmath "
    assert rows[2][2] == bold + r"0.700 $\pm$ 0.000}"
    assert rows[3][2:] == ["-", "-", "-"]
    assert sum(cell.startswith(bold) for row in rows for cell in row) == 1


def test_latex_has_a_minus_before_a_negative_number_and_bold_for_the_best_part_of_a_cell():
    cells = ["-0.125", "1e-05", "**-0.5 ± 0.1** (-0.4)", "**0.5**, 2 of 3 runs"]
    _, (_, *rows) = cells_of(latex_table(pd.DataFrame({"x": cells}), [], "caption", "label"))
    bold = r"{\bfseries\boldmath "
    assert [cell for (cell,) in rows] == [
        "$-$0.125",
        "1e-05",
        bold + r"$-$0.5 $\pm$ 0.1} ($-$0.4)",
        bold + "0.5}, 2 of 3 runs",
    ]


def test_the_best_is_of_whole_rows_and_of_equal_settings_else():
    def best(*values, metric="test/accuracy", **more):
        groups = [group(name, "1", x) for name, x in zip("ABC", values, strict=False)]
        for each in groups:
            each["values"] = {metric: each["values"]["test/accuracy"]}
        found = results(groups, {**AXES, "method": [*"ABC"]}, {metric: "x"}, **more)
        return [found.rows[number].labels["method"] for number in best_rows(found, metric)]

    nan = float("nan")
    assert best([0.3, 0.4], [0.5, 0.6]) == ["B"]
    assert best([0.3, 0.4], [0.5, 0.6], metric="test/loss") == ["A"]
    assert best([0.50001], [0.5], [0.4]) == ["A", "B"]  # equal as printed
    assert best([0.3, 0.4], [0.9, nan], [0.2, 0.2]) == ["A"]
    assert best([0.5], [0.5]) == []
    assert best([0.3], [0.2], metric="test/ece") == []
    assert best([0.3], [0.2], metric="test/ece", best={"ece": "min"}) == ["B"]
    assert best([0.3], [0.2], metric="test/personal_ece", best={"ece": "min"}) == ["B"]
    cells = [("A", "1", 0.3), ("A", "100", 0.9), ("B", "1", 0.4), ("B", "100", 0.2)]
    apart = [group(method, steps, [value]) for method, steps, value in cells]
    found = best_rows(results(apart, {**AXES, "method": ["A", "B"]}), "test/accuracy")
    assert [cells[number][:2] for number in found] == [("B", "1"), ("A", "100")]


def test_latex_escapes_all_that_it_would_read_otherwise():
    assert escaped(r"a_b & 5 % #1 {x} $y$ [z] T* ~^\ <|>") == (
        r"a\_b \& 5 \% \#1 \{x\} \$y\$ {[}z] T{*} \textasciitilde{}\textasciicircum{}\textbackslash{} $<$$|$$>$"
    )
    assert escaped("--lr ± \N{GREEK SMALL LETTER ALPHA} λ Σ é Þ 中") == (
        r"-{}-lr $\pm$ $\alpha$ $\lambda$ $\Sigma$ é {[}U+00DE] {[}U+4E2D]"
    )
    assert escaped("5 \N{MICRO SIGN}s, \N{OHM SIGN}, 10² ± ½, x₂, ő, ﬁ") == (
        r"5 $\mu$s, $\Omega$, 10$^{2}$ $\pm$ 1/2, x$_{2}$, o, fi"
    )
    groups = [{**GROUPS[0], "labels": {**GROUPS[0]["labels"], "method": "[a] & b"}}]
    _, rows = cells_of(latex_tables(results(groups)))
    assert rows[1][0] == r"{[}a] \& b"


def test_columns_are_chosen_by_name_or_metric_and_a_wrong_one_is_refused(tmp_path):
    write_tables(tmp_path, results(), ["training", "test/accuracy"])
    header, *rows = csv.reader((tmp_path / "table.csv").read_text().splitlines())
    assert header == ["method", "E", "training", "test accuracy"]
    assert rows[0] == ["BN", "1", "30 s", "0.400 ± 0.100"]
    assert "| training " in (tmp_path / "table.md").read_text()
    check_columns(["seeds", "test accuracy", "test/personal_accuracy"], METRICS)
    with pytest.raises(
        ConfigurationError, match=r"^--columns: there is no column 'seed'; did you mean seeds"
    ):
        check_columns(["seed"], METRICS)


def test_a_method_with_state_at_clients_shows_whose_models_are_measured():
    metrics = {**METRICS, **local_metrics(METRICS)}
    one = group("FedBN", "1", [0.125, 0.25])
    one["values"] |= {"test/personal_accuracy": {0: 0.5, 1: 0.75}}
    other = group("FedBN (clients)", "1", [0.5, 0.75])
    other["metric"] = "test/personal_accuracy"
    other["values"] |= {"test/personal_accuracy": {0: 0.5}, "server/test/accuracy": {0: 0.125, 1: 0.25}}
    plain = group("BN", "1", [0.25, 0.25])
    found = results([one, other, plain], metrics=metrics)
    header, rows = cells_of_table(wide_table(found))
    table = [dict(zip(header, row, strict=True)) for row in rows]
    assert table[0]["clients' models"] == "0.625 ± 0.177"
    assert table[1]["server's model"] == "0.188 ± 0.088"
    why = "the server's model has the mean of the clients' local state, which no client uses"
    assert [row["remarks"] for row in table] == [why, why, ""]
    assert cells_of_table(spread_table(found)) == (
        ["method", "E = 1"],
        [
            ["FedBN", "0.188 ± 0.088"],
            ["FedBN: clients' models", "0.625 ± 0.177"],
            ["FedBN (clients)", "0.625 ± 0.177"],
            ["FedBN (clients): server's model", "0.188 ± 0.088"],
            ["BN", "0.250 ± 0.000"],
        ],
    )
