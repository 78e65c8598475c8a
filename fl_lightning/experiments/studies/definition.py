"""What a study is: a file with a base configuration, axes, seeds, published values and claims, at three scales.

The types of the classes here are the schema of the file: pydantic checks all of it at once, :mod:`fl_lightning.experiments.studies.reading` says what is wrong.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
)
from pydantic.dataclasses import dataclass as schema
from typing_extensions import TypedDict

Dotted = Mapping[str, Any]
"""Settings by dotted name, as a label of a study gives them."""

Labels = dict[str, str]
"""A label of each axis, such as ``{"method": "GN", "E": "100"}``."""

SPECIAL = ("config", "metric", "seeds")
"""What a label may hold beside settings: configurations laid over the base, a metric in place of the table's first, seeds of its own."""


from fl_lightning.experiments.run_directory.directory import Config


def listed(value: Any) -> Sequence[Any]:
    """A value as a list: of itself where it is none, empty for None."""
    return () if value is None else value if isinstance(value, list) else [value]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line without control characters")
    return text


def _different(values: list[Any]) -> list[Any]:
    names = [*map(str, values)]
    if len({*names}) < len(names):
        raise ValueError(f"must be different; {next(x for x in names if names.count(x) > 1)} is there twice")
    _printable("".join(names))
    return values


def _without(*names: str) -> Callable[[Config], Config]:
    """A check that settings are none of some names."""

    def check(settings: Config) -> Config:
        for name in settings:
            if name in names:
                raise ValueError(
                    f"{name} is no setting of a study's cells, which have names of their own, and seeds and metrics of the study, its scale "
                    "or a label; leave it out"
                )
            _printable(name)
        return settings

    return check


Name = Annotated[str, Strict(), Field(min_length=1), AfterValidator(_printable)]
Text = Annotated[str, Strict(), AfterValidator(lambda text: _printable(" ".join(text.split())))]
Label = Annotated[Name, BeforeValidator(lambda x: x if isinstance(x, list | dict) else str(x))]
Wanted = Annotated[list[Label], BeforeValidator(listed), Field(min_length=1)]
Files = Annotated[list[Name], BeforeValidator(listed)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**32)]
Seeds = Annotated[list[Seed], Field(min_length=1), AfterValidator(_different)]
Number = Annotated[float, Strict(), AllowInfNan(False)]


class SettingsOfCells(TypedDict, total=False):
    """Settings by dotted name, and configurations that are laid over the base."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way to configure a TypedDict
    config: Files


class SettingsOfLabel(SettingsOfCells, total=False):
    """Settings of a label, and a metric and seeds of its own."""

    metric: Name
    seeds: Seeds


class Published(TypedDict):
    """A published value, and the labels of its rows by axis."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way to configure a TypedDict
    value: Number


Settings = Annotated[SettingsOfCells, AfterValidator(_without("name", "seed_everything", "metric", "seeds"))]
_LabelSettings = Annotated[
    SettingsOfLabel,
    BeforeValidator(lambda settings: {} if settings is None else settings),
    AfterValidator(_without("name", "seed_everything")),
]


def _values_or_labels(content: Any) -> Any:
    if not isinstance(content, list | dict):
        raise ValueError(  # noqa: TRY004  # pydantic's
            "must be a list of values, or labels with settings such as {GN: {model.model.norm: gn}}"
        )
    return content


# a list of values, or labels with their settings
Axis = Annotated[
    Annotated[list[Any], Field(min_length=1), AfterValidator(_different), Tag("(values)")]
    | Annotated[dict[Name, _LabelSettings], Field(min_length=1), Tag("(labels)")],
    Discriminator(lambda content: "(labels)" if isinstance(content, dict) else "(values)"),
    BeforeValidator(_values_or_labels),
]

_STRICT = ConfigDict(extra="forbid")


@schema(frozen=True, config=_STRICT)
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

    base: Annotated[Files, Field(min_length=1)]
    settings: Settings = field(default_factory=SettingsOfCells)
    axes: dict[Name, Annotated[Axis, BeforeValidator(lambda x: x if isinstance(x, dict) else listed(x))]] = (
        field(default_factory=dict)
    )
    seeds: Seeds = field(default_factory=lambda: [0])
    cell_seconds: Annotated[Number, Field(ge=0)] | None = None
    title: Text | None = None
    published: list[Published] | None = None


@schema(frozen=True, config=_STRICT)
class Choice:
    """An axis whose label is chosen on validation data, never on test data.

    Attributes:
        axis: The axis.
        by: The axes for whose labels it is chosen separately; of other axes the first label, or that of ``at``, is tried.
        at: Labels of other axes for the trial.
        metric: What is best: the largest value, of a loss the smallest.
        seed: The seed of the trial runs; None: the first of the scale.
    """

    axis: Name
    by: list[Name] = field(default_factory=list)
    at: dict[Name, Label] = field(default_factory=dict)
    metric: Name = "val/accuracy"
    seed: Seed | None = None


@schema(frozen=True, config=_STRICT)
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
        claims: Orderings such as ``"FixBN > BN at E=100"``, see :mod:`fl_lightning.experiments.studies.claims`.
    """

    title: Text
    scales: dict[Name, Scale]
    axes: dict[Name, Axis]
    paper: Text = ""
    settings: Settings = field(default_factory=SettingsOfCells)
    metrics: Annotated[dict[Name, Text], Field(min_length=1)] = field(
        default_factory=lambda: {"test/accuracy": "test accuracy"}
    )
    spread: Name | None = None
    without: list[Annotated[dict[Name, Wanted], Field(min_length=1)]] = field(default_factory=list)
    choose: list[Choice] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    difference: Text | None = None
    claims: list[Text] = field(default_factory=list)


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
    axes: Mapping[str, Mapping[str, Dotted]]

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
        found = {axis: [*labels_of(axis, own)] for axis, own in self.definition.axes.items()}
        return {
            axis: [*dict.fromkeys([*found.get(axis, []), *own])]
            for axis, own in (found | dict(self.axes)).items()
        }

    @property
    def size(self) -> int:
        """How many cells its axes and seeds make, those of combinations included that it leaves out."""
        own = (
            label["seeds"] for labels in self.axes.values() for label in labels.values() if "seeds" in label
        )
        return prod(map(len, self.axes.values())) * max(map(len, [self.scale.seeds, *own]))

    def has(self, *fixed: Mapping[str, object]) -> bool:
        """Whether there is a combination of each of some labels that the study does not leave out."""
        return next(self.combinations(*fixed), None) is not None

    def combinations(self, *fixed: Mapping[str, object]) -> Iterator[Labels]:
        """All combinations of labels that the study does not leave out, those with some ``fixed`` labels."""
        labels = [
            [x for x in own if all(matches({axis: x}, {axis: one.get(axis, x)}) for one in fixed)]
            for axis, own in self.axes.items()
        ]
        for row in product(*labels):
            found = dict(zip(self.axes, row, strict=True))
            if not any(matches(found, left_out) for left_out in self.definition.without):
                yield found

    @property
    def base(self) -> list[str]:
        """The arguments of ``fit`` for the configurations that all cells start from."""
        return [self._config(path) for path in self.scale.base]

    def arguments(self, labels: Mapping[str, str], seed: int) -> list[str]:
        """The arguments of ``fit`` that come after the base for a combination of labels and a seed; later ones win."""
        found = []
        for settings in (
            self.definition.settings,
            self.scale.settings,
            *(self.axes[axis][label] for axis, label in labels.items()),
        ):
            found += [self._config(path) for path in settings.get("config", ())]
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
            if matches(labels, rows_of(entry)):
                return entry["value"]
        return None


def matches(labels: Mapping[str, str], wanted: Mapping[str, object]) -> bool:
    """Whether labels are among those that are wanted: a label or a list of them by axis."""
    return all(labels.get(axis) in [*map(str, listed(own))] for axis, own in wanted.items())


def rows_of(published: Mapping[str, object]) -> dict[str, object]:
    """The labels of the rows that a published value is of."""
    return {axis: labels for axis, labels in published.items() if axis != "value"}


def as_argument(name: str, value: Any) -> str:
    """A setting as an argument of the command line; a name that ends in ``+`` adds to a list."""
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def labels_of(axis: str, content: list[Any] | Mapping[str, Dotted]) -> dict[str, Dotted]:
    """The labels of an axis and their settings."""
    return {str(x): {axis: x} for x in content} if isinstance(content, list) else {**content}
