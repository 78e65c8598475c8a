"""Figure of a run's learning curve."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_lightning.batch_norm.kinds import JOINT_LABELS, KIND_LABELS, state_label
from fl_lightning.clients.tasks import QUALITIES
from fl_lightning.pictures.series import MetricRows, Series, draw_curve, frozen_from, scale_values, series
from fl_lightning.pictures.style import (
    BLACK,
    PERSONAL,
    SPLIT_LINES,
    legend_above,
    new_figure,
    paper_style,
)

Policy = Mapping[str, Sequence[Sequence[Any]]]
"""Treatments of each kind of state, as in ``{"mean": [[1, "averaged"], [201, "frozen"]]}``.

The number is the first round of a treatment. If a method finds this round during training, the
method's name replaces the number."""


@paper_style()
def learning_curve_figure(
    rows: MetricRows, policy: Policy, title: Sequence[str], quality: str = "", further: Sequence[str] = ()
) -> Figure:
    """Draw the loss and the quality metrics, such as accuracy or mean IoU, over the rounds.

    A vertical line marks each round in which the policy changes. The legend names the change. The
    curve has a gap at each value that is above 1e30 or not finite. A cross at the upper edge marks
    the gap.

    Args:
        rows: Rows of ``metrics.jsonl``; row 0 is the initial model.
        policy: Content of ``policy.json``: the treatments of each kind of state, with their first
            rounds. For example, ``{"mean": [[1, "averaged"], [201, "frozen"]]}`` means that running
            means are averaged from round 1 and frozen from round 201.
        title: Lines of the title.
        quality: Name of the main metric, for a task that the user has defined. If its values lie in
            [0, 1], the axis starts at 0.
        further: Names of further metrics to draw if the rows contain them. The name may include a
            prefix, such as ``val/``.
    """
    known = {part for row in rows for name in row for part in (name, name.partition("/")[2])}
    words = {quality: quality.replace("_", " ")} if quality else {}
    words |= QUALITIES
    further = [name for name in further if name not in words]
    metrics = [*dict.fromkeys([*(name for name in (*words, *further) if name in known), "loss"])]
    figure = new_figure(0.8 + 1.8 * len(metrics), title)
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    last = max((row["round"] for row in rows), default=0)
    changes = {start: text for start, text in policy_changes(policy, rows).items() if start <= last}
    label = textwrap.shorten("; ".join(changes.values()), 90, placeholder=" …")
    for axes, metric in zip(panels, metrics, strict=True):
        axes.grid(color="0.9")
        axes.set_ylabel(words.get(metric, metric.replace("_", " ")))
        if changes:
            lines = axes.vlines(list(changes), 0, 1, transform=axes.get_xaxis_transform(), colors=BLACK)
            lines.set(linewidth=1, linestyle="-.", label=label if axes is panels[0] else "_")
        drawn = _draw_metric(axes, rows, metric, metric in words)
        scale_values(axes, drawn, share=metric in words)
        legend_above(axes)
    panels[-1].set(xlabel="communication round", xlim=(-0.01 * max(last, 1), 1.01 * max(last, 1)))
    panels[-1].locator_params(axis="x", integer=True)
    return figure


def policy_changes(policy: Policy, rows: MetricRows = ()) -> dict[int, str]:
    """Return each round in which the policy changes, with a description of the change.

    ``policy`` is the content of ``policy.json``, and ``rows`` is the content of ``metrics.jsonl``.
    If a method has found T* during training, the rows contain T*.

    >>> policy_changes({"mean": [[1, "averaged"], [3, "frozen"]], "var": [[1, "averaged"], [3, "frozen"]]})
    {3: 'BN statistics frozen from round 3'}
    >>> policy_changes({"mean": [[1, "averaged"], ["SlidingWindowFixBN", "frozen"]]}, [{"fixbn/freeze_round": 2.0}])
    {3: 'BN running mean frozen from round 3'}
    """
    freeze_start = frozen_from(rows)
    changed: dict[tuple[int, str], list[str]] = {}
    for kind, stages in policy.items():
        for planned, treatment in stages[1:]:
            start = freeze_start if isinstance(planned, str) else planned
            if start is not None:
                changed.setdefault((start, treatment), []).append(kind)
    changes: dict[int, list[str]] = {}
    for (start, treatment), kinds in sorted(changed.items()):
        labels = JOINT_LABELS if {"mean", "var"} <= set(kinds) else KIND_LABELS
        names = dict.fromkeys(labels.get(kind, state_label(kind)) for kind in kinds)
        changes.setdefault(start, []).append(f"{', '.join(names)} {treatment}")
    return {start: f"{'; '.join(texts)} from round {start}" for start, texts in changes.items()}


def _draw_metric(axes: Axes, rows: MetricRows, metric: str, is_quality: bool) -> list[Series]:
    """Draw a metric's curve for each split that has the metric. Return the drawn values."""
    if any(metric in row for row in rows):  # the full name of a LightningModule's metric
        rounds, values = series(rows, metric)
        label = f"{metric}: {values[-1]:.4f} after round {rounds[-1]:.0f}"
        return [draw_curve(axes, rounds, values, SPLIT_LINES["val"][1], label)]
    drawn = []
    for split, (name, look) in SPLIT_LINES.items():
        # if clients keep local state, also draw the quality of the clients' models
        kinds = {f"{kind}_{metric}": look for kind, look in PERSONAL.items() if is_quality}
        known = {kind: kinds[kind] for kind in kinds if any(f"{split}/{kind}" in row for row in rows)}
        for kind, (words, kind_look) in {**known, metric: ("the server's model" * bool(known), look)}.items():
            rounds, values = series(rows, f"{split}/{kind}")
            if len(rounds):
                newest = f": {values[-1]:.4f} after round {rounds[-1]:.0f}" if is_quality else ""
                label = ", ".join(filter(None, (name, words))) + newest
                drawn.append(draw_curve(axes, rounds, values, kind_look, label))
    return drawn
