"""Tables of a study as text, Markdown, LaTeX and CSV."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path

import pandas as pd
from tabulate import tabulate

from fl_lightning.clients.tasks import best_is
from fl_lightning.console import format_bytes, time_in_words
from fl_lightning.experiments.studies import axis_labels
from fl_lightning.experiments.studies.axis_labels import compared, short
from fl_lightning.experiments.studies.choosing import edge_of
from fl_lightning.experiments.studies.columns import COSTS
from fl_lightning.experiments.studies.definition import FOLD
from fl_lightning.experiments.studies.latex_table import BOOKTABS, latex_table
from fl_lightning.experiments.studies.report_rule import LAST, rule_in_words
from fl_lightning.experiments.studies.study_frame import Chosen, Row, StudyFrame
from fl_lightning.experiments.studies.table_columns import (
    COST_COLUMNS,
    FURTHER,
    TEXTS,
    UNITS,
    begins_with,
    local_metrics,
    of_any_model,
)
from fl_lightning.files import write_text


def mean_and_deviation(values: Iterable[float]) -> str:
    """Return mean and standard deviation, such as ``"0.528 ± 0.006"``; empty without a value.

    The standard deviation has the divisor n - 1. Non-finite values are excluded, and the text gives
    their number.
    """
    values = [*values]
    finite = [*filter(isfinite, values)]
    parts = [f"{statistics.mean(finite):.3f}"] if finite else []
    parts += [f"± {statistics.stdev(finite):.3f}"] if len(finite) > 1 else []
    if len(finite) < len(values):
        words = f"not finite in {of_runs(len(values) - len(finite), len(values))}"
        parts.append(f"({words})" if finite else words)
    return " ".join(parts)


def of_runs(count: int, runs: int) -> str:
    """Return a number of runs in words, such as ``"2 of 3 runs"``."""
    return f"{count} of {runs} run{'s' * (runs > 1)}"


def shown_axes(results: StudyFrame) -> list[str]:
    """Return the axes whose labels a table shows: all axes without a choice."""
    return [axis for axis in results.axes if axis not in results.choose]


def best_rows(results: StudyFrame, metric: str) -> list[int]:
    """Return the numbers of the rows with the best mean of a metric.

    Rows are compared if only one axis differs. ``axis_labels.compared`` chooses this axis. Means
    are compared after rounding to three digits. A row is excluded if the value of a seed is missing
    or not finite.
    """
    direction = best_is(of_any_model(metric), results.best)
    others = [axis for axis in shown_axes(results) if axis not in compared(results)]
    means: dict[tuple[str, ...], dict[int, float]] = {}
    for number, row in enumerate(results.rows if direction else ()):
        values = [*filter(isfinite, row.of(metric))]
        if len(values) == len(row.cells):
            block = means.setdefault(tuple(row.labels[axis] for axis in others), {})
            block[number] = round(statistics.mean(values), 3)
    best = min if direction == "min" else max
    differing = (block for block in means.values() if len({*block.values()}) > 1)
    return [number for block in differing for number, mean in block.items() if mean == best(block.values())]


def whole_table(results: StudyFrame, columns: Sequence[str] = (), latex: bool = False) -> pd.DataFrame:
    """Return the table with a row for each combination, as text.

    Args:
        results: Results of a study.
        columns: Columns after the labels (default: the first metric and its published value). A
            column without any value is left out. If no column is left, the table has remarks.
        latex: Whether the header names units and ``**`` encloses the best values (default False).
    """
    axes, metrics, table = shown_axes(results), results.metrics, _every_column(results, latex)
    header = [short(axis, results.axes) for axis in axes]
    labels = pd.DataFrame([[row.labels[axis] for axis in axes] for row in results.rows], columns=header)
    names = dict.fromkeys(metrics.get(name, name) for name in columns or (results.first, "published"))
    filled = table.columns[(table != "").any().to_numpy()]
    table = table[[name for name in names if name in filled] or ["remarks"]]
    heads = dict(zip(metrics.values(), named_metrics(results), strict=True))
    heads |= {name: f"{name} ({UNITS[name][1]})" for name in UNITS} if latex else {}
    return pd.concat([labels, table.rename(columns=heads)], axis=1)


def _every_column(results: StudyFrame, latex: bool) -> pd.DataFrame:
    metrics = results.metrics
    best = {name: best_rows(results, name) if latex else [] for name in metrics}
    rows = [
        [
            *(_marked(mean_and_deviation(row.of(name)), number in best[name]) for name in metrics),
            published_in_words(row),
            _beside_published(row, results.first),
            learning_rate(row, results),
            ", ".join(map(str, sorted({*row.done["seed"]}))),
            *_costs(row.done, latex),
            "; ".join(lines),
        ]
        for number, (row, lines) in enumerate(zip(results.rows, remarks(results), strict=True))
    ]
    return pd.DataFrame(rows, columns=[*metrics.values(), *FURTHER], dtype=object)


def named_metrics(results: StudyFrame) -> list[str]:
    """Return the names of the columns that show metrics.

    Each name also contains the study's report rule, unless this rule is ``last``.
    """
    rule = results.report
    return [name + f", {rule_in_words(rule)}" * (rule != LAST) for name in results.metrics.values()]


def _marked(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def _beside_published(row: Row, metric: str) -> str:
    published, ours = row.cells["published"].iloc[0], row.of(metric)
    known = len(ours) > 0 and not pd.isna(published) and all(map(isfinite, ours))
    return f"{statistics.mean(ours) - published:+.3f}" if known else ""


def _costs(done: pd.DataFrame, latex: bool) -> list[str]:
    if done.empty:
        return [""] * len(COST_COLUMNS)
    samples, sent, exchanges, seconds = (
        done[name].mean() for name in ("samples", "upload_bytes", "exchanges", "train_seconds")
    )
    return [
        f"{samples:,.0f}",
        f"{sent / UNITS['sent by clients'][0]:,.2f}" if latex else format_bytes(sent),
        f"{exchanges:,.0f}",
        f"{seconds:,.0f}" if latex else time_in_words(seconds),
    ]


def spread_table(results: StudyFrame, latex: bool = False) -> pd.DataFrame | None:
    """Return a table of the first metric with a column for each label of the axis ``spread``.

    For methods whose clients keep state, further rows show the values of the clients' models or of
    the server's model. A label without any value has no column. Return None if the axis has fewer
    than two labels, or if no label has a value.

    Args:
        results: Results of a study.
        latex: Whether ``**`` encloses the best values (default False).
    """
    spread = results.spread
    if spread is None or len(results.axes[spread]) < 2:
        return None
    others, labels = [axis for axis in shown_axes(results) if axis != spread], results.axes[spread]
    best = best_rows(results, results.first) if latex else []
    further = {name: results.metrics.get(name) for name in local_metrics({results.first: ""})}
    texts: dict[tuple[str, ...], dict[str, str]] = {}
    for number, row in enumerate(results.rows):
        values, published, label = row.of(results.first), published_in_words(row), row.labels[spread]
        text = mean_and_deviation(values) or diverged_in_words(row) or "-"
        text = _marked(text, number in best)
        text += f", {of_runs(len(values), len(row.cells))}" * (0 < len(values) < len(row.cells))
        key = tuple(row.labels[axis] for axis in others)
        texts.setdefault(key, {})[label] = text + f" ({published})" * bool(published)
        for name, words in further.items():
            if words and others and name != row.metric and len(values := row.of(name)):
                local = texts.setdefault((f"{key[0]}: {words}", *key[1:]), {})
                local[label] = mean_and_deviation(values)
    labels = [x for x in labels if any(cells.get(x, "-") != "-" for cells in texts.values())]
    header = [*others, *(f"{short(spread, results.axes)} = {label}" for label in labels)]
    body = [[*key, *(cells.get(label, "") for label in labels)] for key, cells in texts.items()]
    return pd.DataFrame(body, columns=header, dtype=object) if labels else None


def published_in_words(row: Row) -> str:
    """Return the published value, such as ``"0.5397 ± 0.0418"``; empty without such a value."""
    value, deviation = row.cells[["published", "published_deviation"]].iloc[0]
    return "" if pd.isna(value) else f"{value:g}" + ("" if pd.isna(deviation) else f" ± {deviation:g}")


def learning_rate(row: Row, results: StudyFrame) -> str:
    """Return a combination's learning rate as text; ``""`` if it is unknown.

    The text also says whether the learning rate was given, or chosen on validation data.
    """
    rate = row.cells["learning_rate"].iloc[0]
    if pd.isna(rate):
        return ""
    rates = ("client_optimizer.lr", "client_optimizer.init_args.lr")
    for choice in results.choices:
        of_rate = any(name.endswith(rates) for name in choice.settings or [choice.axis])
        by = {axis: label for axis, label in choice.by.items() if axis != FOLD}
        if of_rate and by.items() <= row.labels.items():
            if FOLD in choice.by:
                used = ", ".join(f"{x:g}" for x in sorted({*row.cells["learning_rate"].dropna()}))
                return f"{used}, by validation in each fold"
            labels = ", ".join(f"{axis.rpartition('.')[2]}={label}" for axis, label in choice.at.items())
            return f"{rate:g}, by validation{' at ' * bool(labels)}{labels}{_kind_of(choice)}"
    return f"{rate:g}, given"


def choice_in_words(choice: Chosen) -> str:
    """Describe a choice: the chosen label, and the metric of each tried label."""
    combination = _named(choice.by)
    values = (
        f"{label}: {'-' if x is None else f'{x:.3f}' if isfinite(x) else 'diverged'}"
        for label, x in choice.values.items()
    )
    at = {axis.rpartition(".")[2]: label for axis, label in choice.at.items()}
    tried = f" at {', '.join(f'{axis}={x}' for axis, x in at.items())}, used at every {' and '.join(at)}"
    how = f"{choice.metric} of seed {choice.seed}{tried * bool(at)}{_kind_of(choice)} ({', '.join(values)})"
    return f"{choice.axis}{' of ' * bool(combination)}{combination}: {choice.chosen}, by {how}"


def _named(labels: dict[str, str]) -> str:
    return " ".join(f"{axis}={label}" for axis, label in labels.items())


def _kind_of(choice: Chosen) -> str:
    if choice.values and not any(x is None or isfinite(x) for x in choice.values.values()):
        return ", the first, since all diverged"
    extended = f", grid extended by {', '.join(choice.extended)}" if choice.extended else ""
    return extended + ", edge of the grid" * (edge_of(choice) is not None)


def remarks(results: StudyFrame) -> list[list[str]]:
    """Return remarks on each row's runs: shared, diverged or unfinished."""
    runs = [tuple(row.cells["directory"]) for row in results.rows]
    own = [row.metric for row in results.rows]
    every: list[list[str]] = []
    for number, row in enumerate(results.rows):
        same, lines = [i for i, others in enumerate(runs) if others == runs[number]], list[str]()
        for i in [i for i in same if i < number and own[i] == own[number]][:1]:
            lines.append(f"the same runs as {_named(results.rows[i].labels)}")
        for i in [i for i in same if own[number] and not own[i]][:1]:
            others = {axis: x for axis, x in results.rows[i].labels.items() if x != row.labels[axis]}
            lines.append(f"costs are those of {_named(others)}")
        metric = own[number] or results.first
        lines += [f"the runs have no {metric}"] * (len(row.done) > 0 and not len(row.of(results.first)))
        every.append([*lines, *_of_runs(row)])
    return every


def remark_lines(results: StudyFrame) -> list[str]:
    """Return a line for each row with remarks, and a line about cells of other code."""
    lines = [
        f"{_row_in_words(results, row)}: {'; '.join(lines)}"
        for row, lines in zip(results.rows, remarks(results), strict=True)
        if lines
    ]
    return [*lines, *_other_code(results)]


def _run_in_words(run: Mapping[str, object]) -> str:
    return f"{run['seed']} in fold {run['fold']}" if "fold" in run else str(run["seed"])


def _row_in_words(results: StudyFrame, row: Row) -> str:
    return axis_labels.labels_in_words(row.labels, [*results.axes]) or "all runs"


def _other_code(results: StudyFrame) -> list[str]:
    """Return a line that names the finished cells of other code than the study's, or no line."""
    cells: dict[str, list[str]] = {}
    for row in results.rows:
        done = [run for run in row.runs if run["phase"] == "done"]
        for why in dict.fromkeys(run["why"] for run in done):
            seeds = [_run_in_words(run) for run in done if run["why"] == why]
            named = f", seed {', '.join(seeds)}" if len(seeds) < len(done) else ""
            cells.setdefault(why, []).append(f"{_row_in_words(results, row)}{named}")
    if len(cells) == 1:
        cells = {why: ["all cells"] for why in cells}
    parts = [f"{'; '.join(names)} ({why})" for why, names in cells.items() if why]
    return [f"computed by other code: {'; '.join(parts)}"] if parts else []


def _of_runs(row: Row) -> list[str]:
    runs, lines = row.runs, list[str]()
    # own_accuracy alone is the server's model on the clients' own data
    if any(begins_with(metric, "personal_") for metric in row.values["metric"]):
        lines.append("the server's model has the mean of the clients' local state, which no client uses")
    lines += filter(None, [diverged_in_words(row)])
    for phase in ("failed", "stale", "running", "stopped", "missing"):
        seeds = [_run_in_words(run) for run in runs if run["phase"] == phase and not run.get("diverged")]
        lines += [f"{phase}: seed {', '.join(seeds)}"] * bool(seeds)
    return lines


def diverged_in_words(row: Row) -> str:
    """Return how many runs diverged, such as ``"diverged in 2 of 3 runs, round 17"``.

    The text is empty if no run diverged.
    """
    diverged = row.cells[row.cells["diverged"] == True]  # missing in unfinished cells
    rounds = ", ".join(str(int(x)) for x in sorted({*diverged["diverged_round"].dropna()}))
    where = f", round {rounds}" if rounds else ""
    return f"diverged in {of_runs(len(diverged), len(row.cells))}{where}" if len(diverged) else ""


def as_text(table: pd.DataFrame, form: str = "simple") -> str:
    """Format a table in a format of ``tabulate``, such as ``simple`` or ``github``."""
    bar = "\\|" if form == "github" else "|"
    shown = table.map(lambda x: x.replace("|", bar)).rename(columns=lambda x: x.replace("|", bar))
    return tabulate(shown, "keys", tablefmt=form, showindex=False, disable_numparse=True)


def caption(results: StudyFrame) -> str:
    """Return the caption of a study's tables, in a few sentences."""
    quick = " A declared subset that shows that the study works; its results are no evidence for or against the paper."
    subset = {"quick": quick * bool(results.paper), "reduced": _smaller(results)}.get(results.scale, "")
    paper = f" ({results.paper})" if results.paper else ""
    spread = f", mean ± standard deviation over {results.repeats}" * any(
        len(row.done) > 1 for row in results.rows
    )
    rule = f" Values: {rule_in_words(results.report)}{spread}."
    scale = f"Scale: {results.scale}, " * bool(results.scale)
    folds = f", {len({*results.cells['fold']})} of {results.folds} folds" if results.folds else ""
    head = f"{results.title}{paper}. {scale}{seeds_of(results)}{folds}."
    return " ".join(f"{head}{rule}{_own_models(results)}{_unlike(results)}{subset}".split())


def _own_models(results: StudyFrame) -> str:
    """Name the rows whose first metric evaluates the model that each client uses; empty if there are none."""
    rows = [row for row in results.rows if begins_with(row.metric or "", "own_")]
    names = "; ".join(axis_labels.labels_in_words(row.labels, [*results.axes]) for row in rows)
    whose = "all rows" if len(rows) == len(results.rows) else names
    words = "the model that each client uses, on the client's own data"
    sentences = [f"{results.metrics[results.first]} of {whose}: {words}"] if rows else []
    sentences += [
        f"{words}: clients that never train, with the model of the source {source[1]}"
        for metric, words in results.metrics.items()
        if (source := re.search("/held_out_.*_(server|adabn|mixture|tent|fine_tuned)", metric))
    ]
    return "".join(f" {sentence}." for sentence in sentences)


def _smaller(results: StudyFrame) -> str:
    known = results.cells.dropna(subset="run_model")
    if known.empty or not results.paper:
        return ""
    rounds = dict.fromkeys((known["rounds"].min(), known["rounds"].max()))
    numbers = " to ".join(f"{int(x):,}" for x in rounds)
    smaller = f" Smaller than in the paper ({', '.join(known['run_model'].unique())}, {numbers} rounds)"
    return f"{smaller}: the order of methods can be compared, numbers cannot."


def seeds_of(results: StudyFrame) -> str:
    """Return the finished seeds of a table's rows.

    An example is ``"seed 0 (16 rows) and seeds 0, 1, 2 (4 rows)"``.
    """
    done = [row.done for row in results.rows if len(row.done)] or [row.cells for row in results.rows]
    counts = Counter(", ".join(map(str, sorted({*cells["seed"]}))) for cells in done)
    words = {seeds: f"seed{'s' * (',' in seeds)} {seeds}" for seeds in sorted(counts)}
    if len(counts) == 1:
        return next(iter(words.values()))
    return " and ".join(f"{words[seeds]} ({n} row{'s' * (n > 1)})" for seeds, n in sorted(counts.items()))


COMPUTED = ("device", "threads", "cpu_capability", "executor", "compiled")
"""Keys of a run's ``computed_by`` whose values affect rounding errors."""


def _unlike(results: StudyFrame) -> str:
    """Describe how the runs differ in data and computation; empty if all runs are alike."""
    runs = [*{run["directory"]: run for row in results.rows for run in row.runs}.values()]
    done = [run for run in runs if run["phase"] == "done"]
    data = {json.dumps(run.get("data") or run["directory"], sort_keys=True) for run in done}
    unknown = sum(not run.get("loaded") for run in done) if len(data) > 1 else 0
    sentences = {
        "Not all on the same data": _differing(run.get("loaded", {}) for run in runs),
        "Not all computed alike": _differing(run.get("computed_by", {}) for run in runs),
        "Not known to be on the same data": _count(unknown) if unknown else "",
    }
    return "".join(f" {what}: {words}." for what, words in sentences.items() if words)


def _differing(facts: Iterable[Mapping[str, object]]) -> str:
    table = pd.DataFrame([*facts], dtype=object).reindex(columns=["images", *COMPUTED])
    counts = {name: Counter(map(str, table[name].dropna())) for name in table}
    return "; ".join(
        f"{name.replace('_', ' ')} {', '.join(f'{x} ({_count(n)})' for x, n in by_value.items())}"
        for name, by_value in counts.items()
        if len(by_value) > 1
    )


def _count(runs: int) -> str:
    return f"{runs} run{'s' * (runs > 1)}"


def _bold(table: pd.DataFrame, results: StudyFrame) -> str:
    """Return a sentence that explains the bold values of a table; empty without such values."""
    others = [short(axis, results.axes) for axis in shown_axes(results) if axis not in compared(results)]
    among = f" among rows of equal {', '.join(others)}" if others else ""
    is_bold = any("**" in str(cell) for cell in table.to_numpy().flat)
    return f" Bold: the best mean{among}, compared with three digits." * is_bold


def latex_tables(results: StudyFrame, columns: Sequence[str] = ()) -> str:
    """Return the tables in LaTeX. Choices and remarks are written as comments of LaTeX.

    Args:
        results: Results of a study.
        columns: Columns after the labels (default: see :func:`whole_table`).
    """
    axes = shown_axes(results)
    name, tables = f"{results.name}-{results.scale}".strip("-"), []
    if (spread := spread_table(results, latex=True)) is not None:
        labels = range(len(axes) - 1)
        published = " In parentheses: published values." * any(map(published_in_words, results.rows))
        words = caption(results) + _bold(spread, results) + published
        tables.append(latex_table(spread, labels, words, f"{name}-by-{results.spread}"))
    table = whole_table(results, columns, latex=True)
    texts = [place for place, head in enumerate(table.columns) if place < len(axes) or head in TEXTS]
    tables.append(latex_table(table, texts, caption(results) + _bold(table, results), name))
    comments = [*map(choice_in_words, results.choices), *remark_lines(results)]
    comments += [results.command] * bool(results.command)
    return "\n\n".join([BOOKTABS, *tables]) + "".join(f"\n% {' '.join(x.split())}" for x in comments) + "\n"


def cells_table(results: StudyFrame) -> pd.DataFrame:
    """Return the table ``cells.csv``, with a row for each cell, as text.

    The columns are the labels, seed, phase, metrics and costs. If an axis has the name of a later
    column, such as ``samples``, the later column is ``run_samples``. Numbers have full precision.
    """
    keys = ["seed", "fold"] if results.folds else ["seed"]
    values = results.values.set_index([*keys, "metric"], append=True)["value"].map(str).unstack()
    every = results.cells.set_index(keys, append=True, drop=False)
    values = values.reindex(index=every.index, columns=[*results.metrics]).reset_index(drop=True)
    cells = every.reset_index(drop=True)
    before = [*keys, "phase"]
    after = ["metric", "published", "learning_rate", *COSTS, "directory"]
    further = pd.concat([cells[before], values, cells[after]], axis=1)
    further.columns = [f"run_{name}" if name in results.axes else name for name in further]
    return pd.concat([results.cells.index.to_frame(index=False)[[*results.axes]], further], axis=1)


def write_tables(folder: Path, results: StudyFrame, columns: Sequence[str] = ()) -> list[Path]:
    """Write the table as Markdown, LaTeX and CSV, and each run's values to ``cells.csv``.

    Args:
        folder: Folder of the study.
        results: Results of the study.
        columns: Columns after the labels, by name or metric (default: see :func:`whole_table`).

    Returns:
        The written files.
    """
    table = whole_table(results, columns)
    tables = [rows for rows in (spread_table(results), table) if rows is not None]
    choices = [f"- {choice_in_words(choice)}" for choice in results.choices]
    claims = [f"- `{claim.claim}`: **{claim.verdict}** ({claim.words})" for claim in results.claims]
    parts = [caption(results), *(as_text(rows, "github") for rows in tables)]
    notes = [f"- {line}" for line in remark_lines(results)]
    parts += ["\n".join(lines) for lines in (notes, choices, claims) if lines]
    parts += [f"`{results.command}`"] * bool(results.command)
    files = {
        "table.md": "\n\n".join(parts) + "\n",
        "table.tex": latex_tables(results, columns),
        "table.csv": table.to_csv(index=False, lineterminator="\n"),
        "cells.csv": cells_table(results).to_csv(index=False, lineterminator="\n"),
    }
    for name, content in files.items():
        write_text(folder / name, content)
    return [folder / name for name in files]
