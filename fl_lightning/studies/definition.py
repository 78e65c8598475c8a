"""What a study is: a file with a base configuration, axes, seeds, published values and claims, at three scales."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fl_lightning.errors import ConfigurationError

Labels = dict[str, str]
"""A label of each axis, such as ``{"method": "GN", "E": "100"}``."""

SPECIAL = ("config", "metric", "seeds")
"""What a label may hold beside settings: configurations laid over the base, a metric in place of the table's first, seeds of its own."""


@dataclass(frozen=True)
class Scale:
    """How large a study is run.

    Attributes:
        base: The configurations that all cells start from, relative to the study's folder; later ones win.
        settings: Settings of all cells by dotted name.
        axes: What this scale has of an axis: a list of its labels, or a mapping to further settings of each; of an axis of values other
            values. Axes that are not named have all their labels.
        seeds: Seeds of the runs.
        cell_seconds: Measured seconds of a cell on one core, for the estimate before any cell is finished.
        title: Its title in place of the study's.
        published: Published values in place of the study's.
    """

    base: str | list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    cell_seconds: float | None = None
    title: str | None = None
    published: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Choice:
    """An axis whose label is chosen on validation data, never on test data.

    Attributes:
        axis: The axis.
        by: The axes for whose labels it is chosen separately; of other axes the first label, or that of ``at``, is tried.
        at: Labels of other axes for the trial.
        metric: What is best: the largest value, of a loss the smallest.
        seed: The seed of the trial runs; None: the first of the scale.
    """

    axis: str
    by: list[str] = field(default_factory=list)
    at: dict[str, str] = field(default_factory=dict)
    metric: str = "val/accuracy"
    seed: int | None = None


@dataclass(frozen=True)
class Definition:
    """A study as its file says.

    Attributes:
        title: What it shows, in a line.
        paper: Paper and table or figure, empty for our own.
        axes: By name: labels with settings by dotted name, or for an axis named as a setting a list of values.
        scales: ``quick``, ``reduced``, ``full``.
        settings: Settings of all cells at all scales.
        metrics: Columns of the table by the name of the metric.
        spread: The axis whose labels are the table's columns.
        without: Combinations that are left out: a label, or a list of them, of some axes each.
        choose: Axes whose label is chosen on validation data.
        published: Published values: labels of some axes each, and the ``value`` of the first metric.
        difference: What a map of differences shows, such as ``"GN - BN"``; None for no such map.
        claims: Orderings such as ``"FixBN > BN at E=100"``, see :mod:`fl_lightning.studies.claims`.
    """

    title: str
    scales: dict[str, Scale]
    axes: dict[str, Any]
    paper: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=lambda: {"test/accuracy": "test accuracy"})
    spread: str | None = None
    without: list[dict[str, Any]] = field(default_factory=list)
    choose: list[Choice] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)
    difference: str | None = None
    claims: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Study:
    """A study at one scale.

    Attributes:
        name: The name of its file.
        folder: The folder of its file.
        definition: What the file says.
        scale_name: ``quick``, ``reduced`` or ``full``.
        axes: Settings by axis and label.
    """

    name: str
    folder: Path
    definition: Definition
    scale_name: str
    axes: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def scale(self) -> Scale:
        """The scale."""
        return self.definition.scales[self.scale_name]

    @property
    def choices(self) -> list[Choice]:
        """The axes whose label is chosen at this scale: those with more than one."""
        return [choice for choice in self.definition.choose if len(self.axes[choice.axis]) > 1]

    def known_labels(self) -> dict[str, list[str]]:
        """All labels of all axes, those included that this scale leaves out."""
        found = {axis: [*labels_of(axis, own, self.folder)] for axis, own in self.definition.axes.items()}
        return {
            axis: [*dict.fromkeys([*found.get(axis, []), *own])]
            for axis, own in (found | dict(self.axes)).items()
        }

    def combinations(self, fixed: Mapping[str, str] | None = None) -> Iterator[Labels]:
        """All combinations of labels that the study does not leave out, those with some ``fixed`` labels."""
        for labels in product(*self.axes.values()):
            found = dict(zip(self.axes, labels, strict=True))
            if matches(found, fixed or {}) and not any(
                matches(found, left_out) for left_out in self.definition.without
            ):
                yield found

    @property
    def base(self) -> list[str]:
        """The arguments of ``fit`` for the configurations that all cells start from."""
        return [self._config(path) for path in listed(self.scale.base)]

    def arguments(self, labels: Mapping[str, str], seed: int) -> list[str]:
        """The arguments of ``fit`` that come after the base for a combination of labels and a seed; later ones win."""
        found = []
        for settings in (
            self.definition.settings,
            self.scale.settings,
            *(self.axes[axis][label] for axis, label in labels.items()),
        ):
            found += [self._config(path) for path in listed(settings.get("config"))]
            found += [as_argument(name, value) for name, value in settings.items() if name not in SPECIAL]
        return [*found, f"--seed_everything={seed}"]

    def _config(self, path: str) -> str:
        return f"--config={(self.folder / path).resolve()}"

    def metric(self, labels: Mapping[str, str]) -> str | None:
        """The metric that a label reads in place of the table's first, None where no label says so."""
        own = (self.axes[axis][label].get("metric") for axis, label in labels.items())
        return next((metric for metric in own if metric), None)

    def seeds(self, labels: Mapping[str, str]) -> list[int]:
        """The seeds of a combination: those of a label that has its own, else the scale's."""
        own = (self.axes[axis][label].get("seeds") for axis, label in labels.items())
        return next((seeds for seeds in own if seeds), self.scale.seeds)

    def published(self, labels: Mapping[str, str]) -> float | None:
        """The published value of a combination, None where there is none."""
        for entry in self.definition.published:
            if matches(labels, {axis: x for axis, x in entry.items() if axis != "value"}):
                return float(entry["value"])
        return None


def matches(labels: Mapping[str, str], wanted: Mapping[str, Any]) -> bool:
    """Whether labels are among those that are wanted: a label or a list of them by axis."""
    return all(labels.get(axis) in [*map(str, listed(own))] for axis, own in wanted.items())


def as_argument(name: str, value: Any) -> str:
    """A setting as an argument of the command line; a name that ends in ``+`` adds to a list."""
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def labels_of(axis: str, content: Any, path: Path) -> dict[str, dict[str, Any]]:
    """The labels of an axis and their settings.

    Args:
        axis: Its name.
        content: What a file says of it.
        path: The file, for the message.

    Raises:
        ConfigurationError: It says something else.
    """
    if isinstance(content, list):
        return {str(value): {axis: value} for value in content}
    if isinstance(content, dict) and all(isinstance(x, dict | None) for x in content.values()):
        return {str(label): settings or {} for label, settings in content.items()}
    raise ConfigurationError(
        f"{path}: axes.{axis}: {content!r} must be a list of values, or labels with settings such as {{GN: {{model.model.norm: gn}}}}"
    )


def listed(value: Any) -> Sequence[Any]:
    """A value as a list: of itself where it is none, empty for None."""
    return () if value is None else value if isinstance(value, list) else [value]
