"""Tables of a study as text, Markdown, LaTeX and CSV."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path

from tabulate import tabulate

from fl_lightning.console import format_bytes, in_words
from fl_lightning.experiments.studies.cell_values import cells_table
from fl_lightning.experiments.studies.choosing import edge_of
from fl_lightning.experiments.studies.columns import (
    COSTS,
    FURTHER,
    TEXTS,
    UNITS,
    chosen_columns,
    local_metrics,
    models_of,
    of_any_model,
)
from fl_lightning.experiments.studies.found import ChoiceFound, Found, Group
from fl_lightning.experiments.studies.latex import RULES, latex_table
from fl_lightning.experiments.studies.panels import compared, label_of, short
from fl_lightning.experiments.studies.reported import LAST, rule_in_words
from fl_lightning.files import csv_text, write_text
from fl_lightning.round.directions import best_is

Rows = tuple[list[str], list[list[str]]]
"""A table, as the names of the columns and the cells of each row."""


def mean_and_deviation(values: Sequence[float]) -> str:
    """Return mean and standard deviation, such as ``"0.528 ± 0.006"``; empty without a value.

    The standard deviation has the divisor n - 1. Non-finite values are excluded, and the text gives
    their number.
    """
    finite = [*filter(isfinite, values)]
    parts = [f"{statistics.mean(finite):.3f}"] if finite else []
    parts += [f"± {statistics.stdev(finite):.3f}"] if len(finite) > 1 else []
    if len(finite) < len(values):
        words = f"not finite in {of_seeds(len(values) - len(finite), len(values))}"
        parts.append(f"({words})" if finite else words)
    return " ".join(parts)


def of_seeds(count: int, seeds: int) -> str:
    """Return a number of seeds in words, such as ``"2 of 3 seeds"``."""
    return f"{count} of {seeds} seed{'s' * (seeds > 1)}"


def best_groups(found: Found, metric: str) -> list[Group]:
    """Return the combinations with the best mean of a metric.

    Combinations are compared if only one axis differs. ``panels.compared`` chooses this axis. Means
    are compared after rounding to three digits. A combination is excluded if the value of a seed is
    missing or not finite.
    """
    direction = best_is(of_any_model(metric), found.get("best", {}))
    axis = compared(found)
    blocks: dict[str, list[tuple[float, Group]]] = {}
    for group in found["groups"] if direction else ():
        values = [*filter(isfinite, group["values"].get(metric, {}).values())]
        if len(values) == len(group["runs"]) > 0:
            others = {name: x for name, x in group["labels"].items() if name not in (*axis, *found["choose"])}
            means = blocks.setdefault(json.dumps(others), [])
            means.append((round(statistics.mean(values), 3), group))
    best = {"max": max, "min": min}.get(direction or "", max)
    differing = (block for block in blocks.values() if len({mean for mean, _ in block}) > 1)
    return [group for block in differing for mean, group in block if mean == best(x for x, _ in block)]


def whole_table(found: Found, brief: bool = False, columns: Sequence[str] = (), latex: bool = False) -> Rows:
    """Return the table with a row for each combination.

    Args:
        found: Findings of a study.
        brief: Whether columns of costs are omitted (default False).
        columns: Columns after the labels (default: all columns that are not empty).
        latex: Whether the header names units and ``**`` encloses the best values (default False).
    """
    axes = [axis for axis in found["axes"] if axis not in found["choose"]]
    metrics, first = found["metrics"], next(iter(found["metrics"]))
    header = [short(axis, found["axes"]) for axis in axes] + [*metrics.values(), *FURTHER]
    best = {name: best_groups(found, name) if latex else [] for name in metrics}
    rows = []
    for group in found["groups"]:
        values, published = group["values"], group["published"]
        done = [run for run in group["runs"] if run["phase"] == "done"]
        ours = [*values[first].values()]
        rows.append(
            [
                *(group["labels"][axis] for axis in axes),
                *(
                    _marked(mean_and_deviation([*values[name].values()]), group in best[name])
                    for name in metrics
                ),
                published_in_words(group),
                f"{statistics.mean(ours) - published:+.3f}"
                if ours and published is not None and all(map(isfinite, ours))
                else "",
                learning_rate(group, found),
                ", ".join(str(run["seed"]) for run in done),
                f"{statistics.mean(run['samples'] for run in done):,.0f}" if done else "",
                _bytes(statistics.mean(run["upload_bytes"] for run in done), latex) if done else "",
                f"{statistics.mean(run['exchanges'] for run in done):,.0f}" if done else "",
                _seconds(statistics.mean(run["train_seconds"] for run in done), latex) if done else "",
                "; ".join(remarks(group)),
            ]
        )
    start = len(axes)
    used = [
        index
        for index, name in enumerate(header)
        if index < start or (any(row[index] for row in rows) and not (brief and name in COSTS))
    ]
    if columns:
        used = [*range(start), *(start + x for x in chosen_columns(header[start:], metrics, columns))]
    shown = dict(zip(metrics.values(), named_metrics(found), strict=True))
    shown |= {name: f"{name} ({UNITS[name][1]})" for name in UNITS} if latex else {}
    header[start:] = [shown.get(name, name) for name in header[start:]]
    return [header[index] for index in used], [[row[index] for index in used] for row in rows]


def named_metrics(found: Found) -> list[str]:
    """Return the names of the columns that show metrics.

    Each name also contains the study's report rule, unless this rule is ``last``.
    """
    rule = found.get("report", LAST)
    return [name + f", {rule_in_words(rule)}" * (rule != LAST) for name in found["metrics"].values()]


def _marked(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def _bytes(size: float, latex: bool) -> str:
    return f"{size / UNITS['sent by clients'][0]:,.2f}" if latex else format_bytes(size)


def _seconds(seconds: float, latex: bool) -> str:
    return f"{seconds:,.0f}" if latex else in_words(seconds)


def spread_table(found: Found, latex: bool = False) -> Rows | None:
    """Return a table of the first metric with a column for each label of the axis ``spread``.

    For methods whose clients keep state, further rows show the values of the clients' models or of
    the server's model. Return None if the axis has fewer than two labels.

    Args:
        found: Findings of a study.
        latex: Whether ``**`` encloses the best values (default False).
    """
    spread = found["spread"]
    if spread is None or len(found["axes"][spread]) < 2:
        return None
    others = [axis for axis in found["axes"] if axis != spread and axis not in found["choose"]]
    first = next(iter(found["metrics"]))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    best = best_groups(found, first) if latex else []
    further = {name: words for name in local_metrics({first: ""}) if (words := found["metrics"].get(name))}
    for group in found["groups"]:
        text = mean_and_deviation([*group["values"][first].values()]) or diverged_in_words(group) or "-"
        published = f" ({published_in_words(group)})" if group["published"] is not None else ""
        done, planned = len(group["values"][first]), len(group["runs"])
        text = _marked(text, group in best) + (f", {of_seeds(done, planned)}" if 0 < done < planned else "")
        key = tuple(group["labels"][axis] for axis in others)
        rows.setdefault(key, {})[group["labels"][spread]] = text + published
        for name, words in further.items():
            if others and name != group.get("metric") and (values := group["values"].get(name)):
                row = rows.setdefault((f"{key[0]}: {words}", *key[1:]), {})
                row[group["labels"][spread]] = mean_and_deviation([*values.values()])
    labels = found["axes"][spread]
    header = [*others, *(f"{short(spread, found['axes'])} = {label}" for label in labels)]
    return header, [[*key, *(cells.get(label, "") for label in labels)] for key, cells in rows.items()]


def published_in_words(group: Group) -> str:
    """Return the published value, such as ``"0.5397 ± 0.0418"``; empty without such a value."""
    deviation = group.get("published_deviation")
    value = f"{group['published']:g}" if group["published"] is not None else ""
    return value + (f" ± {deviation:g}" if deviation is not None else "")


def learning_rate(group: Group, found: Found) -> str:
    """Return a combination's learning rate as text; ``""`` if it is unknown.

    The text also says whether the learning rate was given, or chosen on validation data.
    """
    if group["learning_rate"] is None:
        return ""
    rates = ("client_optimizer.lr", "client_optimizer.init_args.lr")
    for choice in found["choices"]:
        of_rate = any(name.endswith(rates) for name in choice.get("sets", [choice["axis"]]))
        if of_rate and choice["for"].items() <= group["labels"].items():
            labels = choice.get("at", {}).items()
            at = ", ".join(f"{axis.rpartition('.')[2]}={label}" for axis, label in labels)
            return f"{group['learning_rate']:g}, by validation{' at ' * bool(at)}{at}{_kind_of(choice)}"
    return f"{group['learning_rate']:g}, given"


def choice_in_words(choice: ChoiceFound) -> str:
    """Describe a choice: the chosen label, and the metric of each tried label."""
    combination = " ".join(f"{axis}={label}" for axis, label in choice["for"].items())
    values = (
        f"{label}: {'-' if x is None else f'{x:.3f}' if isfinite(x) else 'diverged'}"
        for label, x in choice["values"].items()
    )
    seed = f" of seed {choice['seed']}" if "seed" in choice else ""  # older files have no seed
    how = f"{choice['metric']}{seed}{_at(choice)}{_kind_of(choice)} ({', '.join(values)})"
    return f"{choice['axis']}{' of ' * bool(combination)}{combination}: {choice['chosen']}, by {how}"


def _at(choice: ChoiceFound) -> str:
    """Return a text with the labels of the trials on other axes; ``""`` without other axes."""
    labels = [f"{axis.rpartition('.')[2]}={label}" for axis, label in choice.get("at", {}).items()]
    others = " and ".join(label.partition("=")[0] for label in labels)
    return f" at {', '.join(labels)}, used at every {others}" if labels else ""


def _kind_of(choice: ChoiceFound) -> str:
    """Return remarks on a choice, such as ``", edge of the grid"``; ``""`` without a remark."""
    if choice["values"] and not any(x is None or isfinite(x) for x in choice["values"].values()):
        return ", the first, since all diverged"
    added = choice.get("extended", [])
    extended = f", grid extended by {', '.join(added)}" if added else ""
    return extended + ", edge of the grid" * (edge_of(choice) is not None)


def remarks(group: Group) -> list[str]:
    """Return remarks on a combination's runs: shared, continued, diverged, stale or unfinished."""
    lines = []
    if same := group.get("same_as"):
        lines.append("the same runs as " + " ".join(f"{axis}={label}" for axis, label in same.items()))
    if trained := group.get("costs_of"):
        others = (f"{axis}={x}" for axis, x in trained.items() if x != group["labels"][axis])
        lines.append(f"costs are those of {' '.join(others)}")
    for run in group["runs"]:
        lines += [f"seed {run['seed']} {origin}" for origin in run.get("origin", [])]
        if run["phase"] == "done" and run["rounds"] != run.get("planned_rounds", run["rounds"]):
            lines.append(f"seed {run['seed']} ended after round {run['rounds']} of {run['planned_rounds']}")
    if any(values for name, values in group["values"].items() if models_of(name)):
        lines.append("the server's model has the mean of the clients' local state, which no client uses")
    sources = [run["provenance"] for run in group["runs"] if run.get("provenance")]
    if len({json.dumps(source, sort_keys=True) for source in sources}) > 1:
        lines.append("seeds of different source or versions")
    lines += filter(None, [diverged_in_words(group)])
    accepted = [run for run in group["runs"] if run["phase"] == "done" and run["why"]]
    seeds = {
        f"accepted though stale ({why})": [run["seed"] for run in accepted if run["why"] == why]
        for why in dict.fromkeys(run["why"] for run in accepted)
    }
    unfinished = [run for run in group["runs"] if not run.get("diverged")]
    for phase in ("failed", "stale", "running", "stopped", "missing"):
        seeds[phase] = [run["seed"] for run in unfinished if run["phase"] == phase]
    return lines + [f"{what}: seed {', '.join(map(str, x))}" for what, x in seeds.items() if x]


def diverged_in_words(group: Group) -> str:
    """Return how many runs diverged, such as ``"diverged in 2 of 3 seeds, round 17"``.

    The text is empty if no run diverged.
    """
    runs = [run for run in group["runs"] if run.get("diverged")]
    rounds = sorted({run["diverged_round"] for run in runs if "diverged_round" in run})
    where = f", round {', '.join(map(str, rounds))}" if rounds else ""
    return f"diverged in {of_seeds(len(runs), len(group['runs']))}{where}" if runs else ""


def as_text(rows: Rows, form: str = "simple") -> str:
    """Format a table in a format of ``tabulate``: ``simple``, ``github`` or ``latex_booktabs``."""
    header, body = rows
    if form == "github":
        header, *body = [[x.replace("|", "\\|") for x in row] for row in (header, *body)]
    return tabulate(body, header, tablefmt=form, disable_numparse=True)


def caption(found: Found) -> str:
    """Return the caption of a study's tables, in a few sentences."""
    subset = {
        "quick": " A declared subset that shows that the study works; its results are no evidence for or against a paper.",
        "reduced": _smaller(found),
    }.get(found["scale"], "")
    paper = f" ({found['paper']})" if found["paper"] else ""
    rule = f" Values: {rule_in_words(found.get('report', LAST))}."
    options = f" With {found['options']}." if found.get("options") else ""
    head = f"{found['title']}{paper}. Scale: {found['scale']}, {seeds_of(found)}."
    return " ".join(f"{head}{rule}{options}{_unlike(found)}{subset}".split())


def _smaller(found: Found) -> str:
    """Describe how a reduced study differs from its paper; empty for a study without a paper."""
    runs = [run for group in found["groups"] for run in group["runs"] if "model" in run]
    if not runs or not found["paper"]:
        return ""
    models, rounds = ", ".join(dict.fromkeys(run["model"] for run in runs)), {run["rounds"] for run in runs}
    numbers = " to ".join(f"{x:,}" for x in dict.fromkeys((min(rounds), max(rounds))))
    smaller = f" Smaller than in the paper ({models}, {numbers} rounds)"
    return f"{smaller}: the order of methods can be compared, numbers cannot."


def seeds_of(found: Found) -> str:
    """Return the finished seeds of a table's rows.

    An example is ``"seed 0 (16 rows) and seeds 0, 1, 2 (4 rows)"``.
    """
    runs = [group["runs"] for group in found["groups"]]
    done = [sorted(run["seed"] for run in row if run["phase"] == "done") for row in runs]
    rows = [*filter(None, done)] or [sorted(run["seed"] for run in row) for row in runs]
    counts = Counter(", ".join(map(str, seeds)) for seeds in rows)
    words = {seeds: f"seed{'s' * (',' in seeds)} {seeds}" for seeds in sorted(counts)}
    if len(counts) == 1:
        return next(iter(words.values()))
    return " and ".join(f"{words[seeds]} ({n} row{'s' * (n > 1)})" for seeds, n in sorted(counts.items()))


def _counted(counts: Iterable[tuple[str, int]], what: str) -> list[str]:
    return [f"{value} ({n} {what}{'s' * (n > 1)})" for value, n in counts]


COMPUTED = ("device", "threads", "cpu_capability", "executor", "compiled")
"""Keys of a run's ``computed_by`` whose values affect rounding errors."""


def _unlike(found: Found) -> str:
    """Describe how the runs differ in data and computation; empty if all runs are alike."""
    runs = {run["directory"]: run for group in found["groups"] for run in group["runs"]}.values()

    def differing(values: Sequence[Mapping[str, object]], names: Iterable[str]) -> str:
        counts = {name: Counter(str(run[name]) for run in values if name in run) for name in names}
        return "; ".join(
            f"{name.replace('_', ' ')} {', '.join(_counted(by_value.items(), 'run'))}"
            for name, by_value in counts.items()
            if len(by_value) > 1
        )

    sentences = {
        "Not all on the same data": differing([run.get("loaded", {}) for run in runs], ["images"]),
        "Not all computed alike": differing([run.get("computed_by", {}) for run in runs], COMPUTED),
    }
    done = [run for run in runs if run["phase"] == "done"]
    data = {json.dumps(run.get("data") or run["directory"], sort_keys=True) for run in done}
    if (unknown := sum(not run.get("loaded") for run in done)) and len(data) > 1:
        sentences["Not known to be on the same data"] = f"{unknown} run{'s' * (unknown > 1)}"
    return "".join(f" {what}: {words}." for what, words in sentences.items() if words)


def latex_tables(found: Found, columns: Sequence[str] = ()) -> str:
    """Return the tables in LaTeX. Choices and remarks are written as comments of LaTeX.

    Args:
        found: Findings of a study.
        columns: Columns after the labels (default: metrics, published values and seeds).
    """
    metrics, present = found["metrics"], whole_table(found)[0]
    default = [x for x in (*metrics.values(), "published", "ours - published", "seeds") if x in present]
    axes = [axis for axis in found["axes"] if axis not in found["choose"]]
    name, tables = f"{found['name']}-{found['scale']}".strip("-"), []
    if (spread := spread_table(found, latex=True)) is not None:
        labels = range(sum(axis != found["spread"] for axis in axes))
        tables.append(latex_table(*spread, labels, caption(found), f"{name}-by-{found['spread']}"))
    header, body = whole_table(found, columns=columns or default, latex=True)
    texts = [place for place, head in enumerate(header) if place < len(axes) or head in TEXTS]
    tables.append(latex_table(header, body, texts, caption(found), name))
    comments = [choice_in_words(choice) for choice in found["choices"]]
    comments += [
        f"{label_of(group, [*found['axes']])}: {words}"
        for group in found["groups"]
        if (words := "; ".join(remarks(group)))
    ]
    return "\n\n".join([RULES, *tables]) + "".join(f"\n% {' '.join(x.split())}" for x in comments) + "\n"


def write_tables(folder: Path, found: Found, columns: Sequence[str] = ()) -> list[Path]:
    """Write the table as Markdown, LaTeX and CSV, and each run's values to ``cells.csv``.

    Args:
        folder: Folder of the study.
        found: Findings of the study.
        columns: Columns after the labels, by name or metric (default: all columns that are not
            empty).

    Returns:
        The written files.
    """
    tables = [rows for rows in (spread_table(found), whole_table(found, columns=columns)) if rows is not None]
    choices = [choice_in_words(choice) for choice in found["choices"]]
    claims = [f"- `{claim['claim']}`: **{claim['verdict']}** ({claim['words']})" for claim in found["claims"]]
    markdown = [
        caption(found),
        *(as_text(rows, "github") for rows in tables),
        *(["\n".join(f"- {words}" for words in choices)] if choices else []),
        *(["\n".join(claims)] if claims else []),
    ]
    cells = cells_table(found)
    files = {
        "table.md": "\n\n".join(markdown) + "\n",
        "table.tex": latex_tables(found, columns),
        "table.csv": csv_text([tables[-1][0], *tables[-1][1]]),
        "cells.csv": csv_text([cells[0], *cells[1]]),
    }
    for name, content in files.items():
        write_text(folder / name, content)
    return [folder / name for name in files]
