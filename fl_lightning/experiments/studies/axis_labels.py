"""Axes of a study and their labels, as tables and figures show them."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

from fl_lightning.experiments.studies.study_frame import StudyFrame


def varied(results: StudyFrame) -> list[str]:
    """Return the axes with two or more labels, except axes chosen on validation data."""
    labels = results.cells.index
    return [
        axis
        for level, axis in enumerate(results.axes)
        if axis not in results.choose and labels.get_level_values(level).nunique() > 1
    ]


def compared(results: StudyFrame, along: str | None = None) -> list[str]:
    """Return a list with the axis to compare; it is empty if no axis has several labels.

    The axis to compare is the first axis with several labels, preferably with words as labels.

    Args:
        results: Results of a study.
        along: Axis to ignore, or None (default).
    """
    names = [axis for axis in varied(results) if axis != along]
    return ([axis for axis in names if not all(map(is_number, results.axes[axis]))] or names)[:1]


def short(axis: str, axes: Iterable[str] = ()) -> str:
    """Return the last part of an axis's dotted name.

    If several of ``axes`` end with this part, more parts are returned.

    >>> short("model.client_optimizer.lr", ["model.client_optimizer.lr", "model.server_optimizer.lr"])
    'client_optimizer.lr'
    """
    parts, others = axis.split("."), [other for other in axes if other != axis]
    ends = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), axis)


def labels_in_words(labels: Mapping[str, str], axes: Sequence[str]) -> str:
    """Return the labels of some axes in words. For a label that is a number, also name the axis.

    >>> labels_in_words({"method": "GN", "model.E": "5"}, ["method", "model.E"])
    'GN, E = 5'
    """
    named = [(short(axis, labels), labels[axis]) for axis in axes]
    return ", ".join(f"{axis} = {label}" if is_number(label) else label for axis, label in named)


def is_number(label: str) -> bool:
    """Return whether a label is a finite number."""
    try:
        return isfinite(float(label))
    except ValueError:
        return False
