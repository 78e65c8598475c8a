"""The tables of a study: printed, and as Markdown, LaTeX and CSV."""

import csv
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from math import isfinite
from pathlib import Path

from tabulate import tabulate

from fl_lightning.console import format_bytes, in_words
from fl_lightning.experiments.studies.found import ChoiceFound, Found, Group
from fl_lightning.experiments.studies.panels import is_number
from fl_lightning.files import write_text

Rows = tuple[list[str], list[list[str]]]
"""Names of columns, and the rows."""


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds (n - 1), such as ``"0.528 ± 0.006"``; empty without a value.

    Values that are not finite are left out, and counted in words.
    """
    finite = [*filter(isfinite, values)]
    parts = [f"{statistics.mean(finite):.3f}"] if finite else []
    parts += [f"± {statistics.stdev(finite):.3f}"] if len(finite) > 1 else []
    if lacking := len(values) - len(finite):
        parts.append(
            f"{'(' * bool(finite)}not finite in {of_seeds(lacking, len(values))}{')' * bool(finite)}"
        )
    return " ".join(parts)


def of_seeds(count: int, seeds: int) -> str:
    """A number of seeds among all, such as ``"2 of 3 seeds"``."""
    return f"{count} of {seeds} seed{'s' * (seeds > 1)}"


_COSTS = ("samples", "sent by clients", "exchanges", "training")


def whole_table(found: Found, brief: bool = False) -> Rows:
    """A row for each combination of labels: its values, what was published, and what it took (not where it is ``brief``)."""
    axes = [axis for axis in found["axes"] if axis not in found["choose"]]
    metrics, first = found["metrics"], next(iter(found["metrics"]))
    header = [
        *(axis.rpartition(".")[2] for axis in axes),
        *metrics.values(),
        "published",
        "ours - published",
        "learning rate",
        "seeds",
    ]
    header += [*_COSTS, "remarks"]
    rows = []
    for group in found["groups"]:
        values, published = group["values"], group["published"]
        done = [run for run in group["runs"] if run["phase"] == "done"]
        ours = [*values[first].values()]
        rows.append(
            [
                *(group["labels"][axis] for axis in axes),
                *(mean_and_deviation([*values[name].values()]) for name in metrics),
                f"{published:g}" if published is not None else "",
                f"{statistics.mean(ours) - published:+.3f}"
                if ours and published is not None and all(map(isfinite, ours))
                else "",
                learning_rate(group, found),
                ", ".join(str(run["seed"]) for run in done),
                *(
                    f"{statistics.mean(run[name] for run in done):,.0f}" if done else ""
                    for name in ("samples",)
                ),
                format_bytes(statistics.mean(run["upload_bytes"] for run in done)) if done else "",
                f"{statistics.mean(run['exchanges'] for run in done):,.0f}" if done else "",
                in_words(statistics.mean(run["train_seconds"] for run in done)) if done else "",
                "; ".join(remarks(group)),
            ]
        )
    used = [
        index
        for index, name in enumerate(header)
        if (index < len(axes) or any(row[index] for row in rows)) and not (brief and name in _COSTS)
    ]
    return [header[index] for index in used], [[row[index] for index in used] for row in rows]


def spread_table(found: Found) -> Rows | None:
    """The first metric with the labels of one axis as columns, None where the study names no such axis."""
    spread = found["spread"]
    if spread is None or len(found["axes"][spread]) < 2:
        return None
    others = [axis for axis in found["axes"] if axis != spread and axis not in found["choose"]]
    first = next(iter(found["metrics"]))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for group in found["groups"]:
        text = mean_and_deviation([*group["values"][first].values()]) or diverged_in_words(group) or "-"
        published = f" ({group['published']:g})" if group["published"] is not None else ""
        done, planned = len(group["values"][first]), len(group["runs"])
        text += f", {of_seeds(done, planned)}" if 0 < done < planned else ""
        rows.setdefault(tuple(group["labels"][axis] for axis in others), {})[group["labels"][spread]] = (
            text + published
        )
    labels = found["axes"][spread]
    header = [*others, *(f"{spread.rpartition('.')[2]} = {label}" for label in labels)]
    return header, [[*key, *(own.get(label, "") for label in labels)] for key, own in rows.items()]


def learning_rate(group: Group, found: Found) -> str:
    """A combination's learning rate and how it was found."""
    if group["learning_rate"] is None:
        return ""
    rates = ("client_optimizer.lr", "client_optimizer.init_args.lr")
    choices = (
        one
        for one in found["choices"]
        if any(name.endswith(rates) for name in one.get("sets", [one["axis"]]))
    )
    own = next((one for one in choices if one["for"].items() <= group["labels"].items()), None)
    if own is None:
        return f"{group['learning_rate']:g}, given"
    at = ", ".join(f"{axis.rpartition('.')[2]}={label}" for axis, label in own.get("at", {}).items())
    return f"{group['learning_rate']:g}, by validation{' at ' * bool(at)}{at}{_kind_of(own)}"


def choice_in_words(choice: ChoiceFound) -> str:
    """What was chosen on validation data, from what."""
    own = " ".join(f"{axis}={label}" for axis, label in choice["for"].items())
    values = (
        f"{label}: {'-' if x is None else f'{x:.3f}' if isfinite(x) else 'diverged'}"
        for label, x in choice["values"].items()
    )
    how = f"{choice['metric']}{_kind_of(choice)} ({', '.join(values)})"
    return f"{choice['axis']}{' of ' + own if own else ''}: {choice['chosen']}, by {how}"


def _kind_of(choice: ChoiceFound) -> str:
    """What must be said of a choice: that a wider grid might have a better number, or that none was any good."""
    if choice["values"] and not any(x is None or isfinite(x) for x in choice["values"].values()):
        return ", the first, since all diverged"
    return ", edge of the grid" * at_edge(choice)


def at_edge(choice: ChoiceFound) -> bool:
    """Whether the chosen number is the smallest or largest that was tried."""
    tried = [*choice["values"]]
    return all(map(is_number, tried)) and choice["chosen"] in (
        min(tried, key=float, default=None),
        max(tried, key=float, default=None),
    )


def remarks(group: Group) -> list[str]:
    """What must be said of a combination's runs: begun by another run, diverged, of other source, missing."""
    found = []
    if same := group.get("same_as"):
        found.append("the same runs as " + " ".join(f"{axis}={label}" for axis, label in same.items()))
    if trained := group.get("costs_of"):
        others = (f"{axis}={x}" for axis, x in trained.items() if x != group["labels"][axis])
        found.append(f"costs are those of {' '.join(others)}")
    for run in group["runs"]:
        found += [f"seed {run['seed']} {line}" for line in run.get("origin", [])]
        if run["phase"] == "done" and run["rounds"] != run.get("planned_rounds", run["rounds"]):
            found.append(f"seed {run['seed']} ended after round {run['rounds']} of {run['planned_rounds']}")
    if (
        len({json.dumps(run["provenance"], sort_keys=True) for run in group["runs"] if run.get("provenance")})
        > 1
    ):
        found.append("seeds of different source or versions")
    accepted = [run for run in group["runs"] if run["phase"] == "done" and run["why"]]
    found += filter(None, [diverged_in_words(group)])
    for what, runs in {
        **{
            f"accepted though stale ({why})": [run for run in accepted if run["why"] == why]
            for why in dict.fromkeys(run["why"] for run in accepted)
        },
        **{
            phase: [run for run in group["runs"] if run["phase"] == phase and not run.get("diverged")]
            for phase in ("failed", "stale", "running", "stopped", "missing")
        },
    }.items():
        if runs:
            found.append(f"{what}: seed {', '.join(str(run['seed']) for run in runs)}")
    return found


def diverged_in_words(group: Group) -> str:
    """How many of a combination's runs diverged, such as ``"diverged in 2 of 3 seeds, round 17"``; empty where none did."""
    runs = [run for run in group["runs"] if run.get("diverged")]
    rounds = sorted({run["diverged_round"] for run in runs if "diverged_round" in run})
    where = f", round {', '.join(map(str, rounds))}" if rounds else ""
    return f"diverged in {of_seeds(len(runs), len(group['runs']))}{where}" if runs else ""


def as_text(rows: Rows, form: str = "simple") -> str:
    """A table as text, by a format of ``tabulate``: ``simple``, ``github``, ``latex_booktabs``."""
    if form == "github":
        rows = (
            [name.replace("|", "\\|") for name in rows[0]],
            [[x.replace("|", "\\|") for x in row] for row in rows[1]],
        )
    return tabulate(rows[1], rows[0], tablefmt=form, disable_numparse=True)


def as_csv(rows: Rows) -> str:
    """A table as CSV."""
    text = StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([rows[0], *rows[1]])
    return text.getvalue()


def caption(found: Found) -> str:
    """What a table is of, in a sentence or two."""
    subset = {
        "quick": " A declared subset, which shows that it works: what holds of it is no evidence for or against a paper.",
        "reduced": _smaller(found),
    }.get(found["scale"], "")
    paper = f" ({found['paper']})" if found["paper"] else ""
    options = f" With {found['options']}." if found.get("options") else ""
    head = f"{found['title']}{paper}. Scale: {found['scale']}, {seeds_of(found)}."
    return " ".join(f"{head}{options}{_unlike(found)}{subset}".split())


def _smaller(found: Found) -> str:
    """In what a study at a smaller scale is not that of the paper, beside whose values it stands; empty where there are none."""
    runs = [run for group in found["groups"] for run in group["runs"] if "model" in run]
    if not runs or all(group["published"] is None for group in found["groups"]):
        return ""
    models, rounds = ", ".join(dict.fromkeys(run["model"] for run in runs)), {run["rounds"] for run in runs}
    numbers = " to ".join(f"{x:,}" for x in dict.fromkeys((min(rounds), max(rounds))))
    return (
        f" Smaller than the paper's ({models}, {numbers} rounds): orderings can be compared, numbers cannot."
    )


def seeds_of(found: Found) -> str:
    """The seeds of all rows with a result, such as ``"seeds 0, 1, 2"`` or ``"seeds 0 (16 rows); 0, 1, 2 (4 rows)"``."""
    own = [
        sorted(run["seed"] for run in group["runs"] if run["phase"] == "done") for group in found["groups"]
    ]
    own = [seeds for seeds in own if seeds] or [
        sorted(run["seed"] for run in group["runs"]) for group in found["groups"]
    ]
    counts = Counter(", ".join(map(str, seeds)) for seeds in own)
    if len(counts) == 1:
        return f"seed{'s' * (',' in (seeds := next(iter(counts))))} {seeds}"
    return f"seeds {'; '.join(_counted(sorted(counts.items()), 'row'))}"


def _counted(counts: Iterable[tuple[str, int]], what: str) -> list[str]:
    return [f"{value} ({n} {what}{'s' * (n > 1)})" for value, n in counts]


COMPUTED = ("device", "threads", "cpu_capability", "executor", "compiled")
"""What decides how sums are rounded."""


def _unlike(found: Found) -> str:
    """What was not the same for all runs of their data, and of how they were computed; empty where everything was."""
    runs = {run["directory"]: run for group in found["groups"] for run in group["runs"]}.values()

    def differing(values: Sequence[Mapping[str, object]], names: Iterable[str]) -> str:
        counts = {name: Counter(str(one[name]) for one in values if name in one) for name in names}
        return "; ".join(
            f"{name.replace('_', ' ')} {', '.join(_counted(own.items(), 'run'))}"
            for name, own in counts.items()
            if len(own) > 1
        )

    said = {
        "Not all on the same data": differing([run.get("loaded", {}) for run in runs], ["images"]),
        "Not all computed alike": differing([run.get("computed_by", {}) for run in runs], COMPUTED),
    }
    done = [run for run in runs if run["phase"] == "done"]
    data = {json.dumps(run.get("data") or run["directory"], sort_keys=True) for run in done}
    if (unknown := sum(not run.get("loaded") for run in done)) and len(data) > 1:
        said["Not known to be on the same data"] = f"{unknown} run{'s' * (unknown > 1)}"
    return "".join(f" {what}: {words}." for what, words in said.items() if words)


def write_tables(folder: Path, found: Found) -> None:
    """Write ``table.md``, ``table.tex`` and ``table.csv``."""
    tables = [rows for rows in (spread_table(found), whole_table(found)) if rows is not None]
    choices = [choice_in_words(one) for one in found["choices"]]
    claims = [f"- {one['claim']}: **{one['verdict']}** ({one['words']})" for one in found["claims"]]
    markdown = [
        caption(found),
        *(as_text(rows, "github") for rows in tables),
        *(["\n".join(f"- {words}" for words in choices)] if choices else []),
        *(["\n".join(claims)] if claims else []),
    ]
    write_text(folder / "table.md", "\n\n".join(markdown) + "\n")
    write_text(
        folder / "table.tex",
        "\n\n".join(f"% {caption(found)}\n{as_text(rows, 'latex_booktabs')}" for rows in tables)
        + "".join(f"\n% {words}" for words in choices)
        + "\n",
    )
    write_text(folder / "table.csv", as_csv(whole_table(found)))
