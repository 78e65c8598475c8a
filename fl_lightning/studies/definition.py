"""What a study is: a file with a base configuration, axes, seeds, published values and claims, at three scales."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from fl_lightning.errors import ConfigurationError, nearest

Labels = dict[str, str]
"""A label of each axis, such as ``{"method": "GN", "E": "100"}``."""

SPECIAL = ("config", "metric")
"""What a label may hold beside settings: configurations laid over the base, and a metric in place of the table's first."""


@dataclass(frozen=True)
class Scale:
    """How large a study is run.

    Attributes:
        base: The configurations that all cells start from, relative to the study's folder; later ones win.
        settings: Settings of all cells by dotted name.
        axes: Labels that this scale has, by axis: a list of them, or a mapping to further settings of each. Axes that are not named
            have all their labels.
        seeds: Seeds of the runs.
        cell_seconds: Measured seconds of a cell on one core, for the estimate before any cell is finished.
    """

    base: str | list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    cell_seconds: float | None = None


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

    def known_labels(self) -> dict[str, list[str]]:
        """All labels of all axes, those included that this scale leaves out."""
        found = {axis: [*_labels(axis, own, self.folder)] for axis, own in self.definition.axes.items()}
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

    def arguments(self, labels: Mapping[str, str], seed: int) -> list[str]:
        """The arguments of ``fit`` for a combination of labels and a seed, without those of how it is computed."""
        own = [self.axes[axis][label] for axis, label in labels.items()]
        base = [self.scale.base] if isinstance(self.scale.base, str) else self.scale.base
        overlays = [path for settings in own for path in _listed(settings.get("config"))]
        found = [f"--config={(self.folder / path).resolve()}" for path in (*base, *overlays)]
        for settings in (self.definition.settings, self.scale.settings, *own):
            found += [as_argument(name, value) for name, value in settings.items() if name not in SPECIAL]
        return [*found, f"--seed_everything={seed}"]

    def metric(self, labels: Mapping[str, str]) -> str | None:
        """The metric that a label reads in place of the table's first, None where no label says so."""
        own = (self.axes[axis][label].get("metric") for axis, label in labels.items())
        return next((metric for metric in own if metric), None)

    def published(self, labels: Mapping[str, str]) -> float | None:
        """The published value of a combination, None where there is none."""
        for entry in self.definition.published:
            if matches(labels, {axis: x for axis, x in entry.items() if axis != "value"}):
                return float(entry["value"])
        return None


def matches(labels: Mapping[str, str], wanted: Mapping[str, Any]) -> bool:
    """Whether labels are among those that are wanted: a label or a list of them by axis."""
    return all(labels.get(axis) in [*map(str, _listed(own))] for axis, own in wanted.items())


def as_argument(name: str, value: Any) -> str:
    """A setting as an argument of the command line; a name that ends in ``+`` adds to a list."""
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def read_study(path: Path, scale: str) -> Study:
    """Read a study's file.

    Args:
        path: The file.
        scale: The scale to run.

    Raises:
        ConfigurationError: The file is none, a key or label is unknown, or it has no such scale.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(
            f"study: {path} cannot be read: {error.strerror}; give the YAML of a study"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"study: {path} is no YAML: {' '.join(str(error).split())}") from error
    definition: Definition = _built(Definition, content, str(path))
    definition = _replaced(
        definition, scales={k: _built(Scale, v, f"{path}: scales.{k}") for k, v in definition.scales.items()}
    )
    definition = _replaced(
        definition, choose=[_built(Choice, v, f"{path}: choose") for v in definition.choose]
    )
    if scale not in definition.scales:
        raise ConfigurationError(
            f"--scale: {path} has no scale {scale!r}; use one of {', '.join(definition.scales)}"
        )
    study = Study(
        path.stem, path.parent, definition, scale, _axes(definition, definition.scales[scale], path)
    )
    _check(study, path)
    return study


def _built(kind: type, content: Any, place: str) -> Any:
    """An object of a dataclass from a mapping, its keys and types checked."""
    if not isinstance(content, dict):
        raise ConfigurationError(f"{place}: a mapping is needed, found {type(content).__name__}")
    names = [one.name for one in fields(kind)]
    for name in content:
        if name not in names:
            raise ConfigurationError(
                f"{place}: there is no key {name!r}{nearest(str(name), names)}; use {', '.join(names)}"
            )
    hints = get_type_hints(kind) | {"scales": dict[str, Any], "choose": list[Any]}
    parser = ArgumentParser(exit_on_error=False)
    for name in content:
        parser.add_argument(f"--{name}", type=hints[name])
    try:
        checked = parser.parse_object(content).as_dict()  # classes that can be imported are no dicts before
        return kind(**{name: checked[name] for name in content})
    except (ArgumentError, TypeError) as error:
        raise ConfigurationError(f"{place}: {' '.join(str(error).split())}") from error


def _replaced(definition: Definition, **changes: Any) -> Definition:
    return Definition(
        **{**{one.name: getattr(definition, one.name) for one in fields(definition)}, **changes}
    )


def _axes(definition: Definition, scale: Scale, path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for axis in dict.fromkeys([*definition.axes, *scale.axes]):
        known = _labels(axis, definition.axes.get(axis, scale.axes.get(axis)), path)
        own = scale.axes.get(axis)
        if own is None or axis not in definition.axes:
            found[axis] = known
            continue
        chosen = own if isinstance(own, Mapping) else {str(label): None for label in _listed(own)}
        for label in map(str, chosen):
            if label not in known:
                raise ConfigurationError(
                    f"{path}: axes.{axis} has no label {label!r}{nearest(label, known)}; it has {', '.join(known)}"
                )
        found[axis] = {
            str(label): {**known[str(label)], **(settings or {})} for label, settings in chosen.items()
        }
    return found


def _labels(axis: str, content: Any, path: Path) -> dict[str, dict[str, Any]]:
    if isinstance(content, list):
        return {str(value): {axis: value} for value in content}
    if isinstance(content, dict) and all(isinstance(x, dict | None) for x in content.values()):
        return {str(label): settings or {} for label, settings in content.items()}
    raise ConfigurationError(
        f"{path}: axes.{axis}: {content!r} must be a list of values, or labels with settings such as {{GN: {{model.model.norm: gn}}}}"
    )


def _check(study: Study, path: Path) -> None:
    """Refuse names of axes and labels that the study does not have at any scale."""
    definition, known = (
        study.definition,
        {axis: {*_labels(axis, x, path)} for axis, x in study.definition.axes.items()},
    )
    known |= {axis: known.get(axis, set()) | {*labels} for axis, labels in study.axes.items()}
    named = [("without", entry) for entry in definition.without]
    named += [
        ("published", {axis: x for axis, x in entry.items() if axis != "value"})
        for entry in definition.published
    ]
    named += [
        ("choose", {choice.axis: [], **{axis: [] for axis in choice.by}, **choice.at})
        for choice in definition.choose
    ]
    named += [("spread", {definition.spread: []})] if definition.spread else []
    for key, entry in named:
        for axis, labels in entry.items():
            if axis not in known:
                raise ConfigurationError(
                    f"{path}: {key}: there is no axis {axis!r}; there are {', '.join(known)}"
                )
            for label in map(str, _listed(labels)):
                if label not in known[axis]:
                    raise ConfigurationError(
                        f"{path}: {key}: axis {axis} has no label {label!r}; it has {', '.join(known[axis])}"
                    )
    for entry in definition.published:
        if not isinstance(entry.get("value"), int | float):
            raise ConfigurationError(f"{path}: published: {entry} has no number as its value")


def _listed(value: Any) -> Sequence[Any]:
    return () if value is None else value if isinstance(value, list) else [value]
