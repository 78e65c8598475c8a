"""The learning curve of a run as a figure."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.pictures.series import Series, can_be_drawn, means, series
from fl_lightning.pictures.style import (
    BLACK,
    BLUE,
    LIGHT_GREY,
    VERMILLION,
    count_on,
    legend_above,
    new_figure,
    paper_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 500
"""Of more rounds than this the training loss is drawn as means of consecutive rounds."""

_SPLITS = {
    "val": {"label": "validation", "color": BLUE, "linestyle": "-", "marker": "o"},
    "test": {"label": "test", "color": VERMILLION, "linestyle": "--", "marker": "s"},
}
_TRAINING: dict[str, Any] = {"color": LIGHT_GREY, "linestyle": "-", "linewidth": 1}
_KINDS = {"weight": "weights", "affine": "BN gamma, beta", "mean": "BN means", "var": "BN variances"}
_DASHES = ("-.", ":", (0, (6, 2)), (0, (1, 3)))


@paper_style()
def learning_curve_figure(
    rows: Sequence[Mapping[str, Any]], policy: Mapping[str, str], title: Sequence[str]
) -> "Figure":
    """Accuracy, where the model has one, and loss over communication rounds.

    A vertical line marks each round in which the policy changes. Where a value is not finite (or above 1e30) the
    line has a gap and a cross stands at the upper edge.

    Args:
        rows: Rows of ``metrics.jsonl``; row 0 is the initial model.
        policy: What happens to each kind of state, as in ``policy.json``, such as
            ``{"mean": "averaged; frozen from round 201"}``.
        title: Lines of the title.
    """
    with_accuracy = any(f"{split}/accuracy" in row for row in rows for split in _SPLITS)
    figure = new_figure(4.4 if with_accuracy else 2.6, title)
    panels: list[Axes] = list(figure.subplots(1 + with_accuracy, 1, sharex=True, squeeze=False)[:, 0])
    last = max((row["round"] for row in rows), default=0)
    changes = {
        start: text for start, text in policy_changes(with_found_round(policy, rows)).items() if start <= last
    }
    for axes in panels:
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        _draw_changes(axes, changes, labelled=axes is panels[0])
    if with_accuracy:
        _draw_accuracy(panels[0], rows)
    _draw_loss(panels[-1], rows)
    panels[-1].set_xlabel("communication round")
    panels[-1].set_xlim(-0.01 * max(last, 1), 1.01 * max(last, 1))
    count_on(panels[-1].xaxis)
    for axes in panels:
        legend_above(axes)
    return figure


def with_found_round(policy: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The policy with T* where training has found it, which the policy of the start could only promise.

    Args:
        policy: What happens to each kind of state, as in ``policy.json``.
        rows: Rows of ``metrics.jsonl``.

    >>> with_found_round(
    ...     {"mean": "averaged; frozen from the round that SlidingWindowFixBN finds"}, [{"fixbn/freeze_round": 2.0}]
    ... )
    {'mean': 'averaged; frozen from round 3'}
    """
    found = [row["fixbn/freeze_round"] for row in rows if "fixbn/freeze_round" in row]
    if not found:
        return dict(policy)
    known = f"from round {found[-1] + 1:.0f}"
    return {kind: re.sub(r"from the round that \w+ finds", known, text) for kind, text in policy.items()}


def policy_changes(policy: Mapping[str, str]) -> dict[int, str]:
    """The rounds in which the policy changes, and what happens then, from the words of ``policy.json``.

    >>> policy_changes({"mean": "averaged; frozen from round 3", "var": "averaged; frozen from round 3"})
    {3: 'BN statistics frozen from round 3'}
    """
    found: dict[tuple[int, str], list[str]] = {}
    for kind, text in policy.items():
        for treatment, start in re.findall(r"(\w+) from round (\d+)", text):
            found.setdefault((int(start), treatment), []).append(kind)
    changes: dict[int, list[str]] = {}
    for (start, treatment), kinds in sorted(found.items()):
        if {"mean", "var"} <= set(kinds):
            names = [_KINDS[kind] for kind in ("weight", "affine") if kind in kinds] + ["BN statistics"]
        else:
            names = [_KINDS.get(kind, kind) for kind in kinds]
        changes.setdefault(start, []).append(f"{', '.join(names)} {treatment}")
    return {
        start: textwrap.shorten("; ".join(texts), 70, placeholder=" …") + f" from round {start}"
        for start, texts in changes.items()
    }


def _draw_changes(axes: "Axes", changes: Mapping[int, str], *, labelled: bool) -> None:
    """Lines over the whole height: each with a label of its own, or many with one together."""
    marked = {text: [start] for start, text in changes.items()}
    colour = BLACK
    if len(changes) > len(_DASHES):
        marked = {f"the policy changes in {len(changes):,} rounds": list(changes)}
        colour = "0.8"
    for (text, starts), dashes in zip(marked.items(), _DASHES, strict=False):
        lines = axes.vlines(starts, 0, 1, transform=axes.get_xaxis_transform(), colors=colour, linewidth=1)
        lines.set(linestyle=dashes, label=text if labelled else "_", zorder=1)


def _draw_accuracy(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    highest = 0.0
    for split, style in _SPLITS.items():
        rounds, values = series(rows, f"{split}/accuracy")
        if len(rounds):
            last = f"{style['label']}: {values[-1]:.4f} after round {rounds[-1]:.0f}"
            _draw(axes, rounds, values, **style | {"label": last})
            highest = max(highest, *np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0))
    axes.set(ylabel="accuracy", ylim=(0, min(1.15 * highest, 1.03) or 1.03))


def _draw_loss(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    rounds, values = series(rows, "train/loss")
    width = -(-len(rounds) // MAX_POINTS)
    drawn = [values]
    if len(rounds):
        label = "training (clients, before aggregation)"
        _draw(axes, *means(rounds, values, width), label=label, **_TRAINING)
    for split, style in _SPLITS.items():
        rounds, values = series(rows, f"{split}/loss")
        if len(rounds):
            _draw(axes, rounds, values, **style)
            drawn.append(values)
    shown = np.concatenate(drawn)
    shown = shown[can_be_drawn(shown)]
    label = "loss"
    if len(shown) and 1e-12 * shown.max() < shown.min() < 0.02 * shown.max():
        axes.set_yscale("log")
        label += ", log scale"
    axes.set_ylabel(label + (f"\n(training: mean of {width} rounds)" if width > 1 else ""))


def _draw(axes: "Axes", rounds: Series, values: Series, **style: Any) -> None:
    """A line with gaps, and crosses at the upper edge, where values cannot be drawn."""
    good = can_be_drawn(values)
    every = max(1, len(rounds) // 40)
    line = np.where(good, values, np.nan)
    shape = {"linewidth": 1.4, "markersize": 4, "markevery": every, "marker": "." if every == 1 else None}
    axes.plot(rounds, line, **shape | style)
    if not good.all():
        crosses = {"color": style["color"], "linestyle": "none", "marker": "x", "markersize": 5}
        label = f"{style['label'].partition(':')[0].partition(' (')[0]}: not finite"
        axes.plot(
            rounds[~good],
            np.full((~good).sum(), 0.97),
            transform=axes.get_xaxis_transform(),
            label=label,
            **crosses,
        )
