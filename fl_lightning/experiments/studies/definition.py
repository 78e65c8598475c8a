"""Types that define a study.

pydantic checks a study's file against these types. :mod:`fl_lightning.experiments.studies.reading`
rewrites pydantic's error messages.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NotRequired

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

from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.experiments.studies.columns import CELL_COLUMNS, VALUE_COLUMNS
from fl_lightning.experiments.studies.report_rule import BEST, LAST, MEAN
from fl_lightning.files import shipped

Labels = dict[str, str]
"""Label of each axis, such as ``{"method": "GN", "E": "100"}``."""

Dotted = Mapping[str, Any]
"""Settings of a label, keyed by dotted name."""

HEADLINE_CLAIMS = 3
"""Largest number of headline claims of a study."""

SPECIAL = ("config", "metric", "seeds")
"""Keys with a special meaning among the settings of a label.

- ``config``: Further configuration files.
- ``metric``: Metric that replaces the study's first metric.
- ``seeds``: Seeds that replace the scale's seeds."""


FOLD, HELD_OUT = "data.fold", "data.held_out"
"""Axes whose labels the data decide: ``data.fold: all`` and ``data.held_out: each``.

The runs of all folds are one row of a table, as the runs of all seeds are."""


def listed(value: Any) -> Sequence[Any]:
    """Return a list unchanged, None as an empty list, and any other value as a list of one item."""
    return () if value is None else value if isinstance(value, list) else [value]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line without control characters")
    return text


def _no_column(axis: str) -> str:
    if axis in {*CELL_COLUMNS, *VALUE_COLUMNS}:
        raise ValueError("is a column of the results; give the axis another name")
    return axis


def _different(values: list[Any]) -> list[Any]:
    names = [*map(str, values)]
    if len({*names}) < len(names):
        raise ValueError(f"must be different; {next(x for x in names if names.count(x) > 1)} appears twice")
    _printable("".join(names))
    return values


def _rule(text: str) -> str:
    if not re.fullmatch(f"{LAST}|{BEST}|{MEAN}", text):
        raise ValueError("must be last, best, or a rule such as 'mean of the last 5'")
    return text


def _without(*names: str) -> Callable[[Config], Config]:
    """Return a validator that raises an error if settings include one of the given names."""

    def check(settings: Config) -> Config:
        for name in settings:
            if name in names:
                raise ValueError(
                    f"{name} is no setting of a study's cells: the study names them, and seeds and metrics belong to "
                    "the study, its scale or a label; leave it out"
                )
            _printable(name)
        return settings

    return check


Name = Annotated[str, Strict(), Field(min_length=1), AfterValidator(_printable)]
AxisName = Annotated[Name, AfterValidator(_no_column)]
Text = Annotated[str, Strict(), AfterValidator(lambda text: _printable(" ".join(text.split())))]
Label = Annotated[Name, BeforeValidator(lambda x: x if isinstance(x, list | dict) else str(x))]
Wanted = Annotated[list[Label], BeforeValidator(listed), Field(min_length=1)]
Files = Annotated[list[Name], BeforeValidator(listed)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**32)]
Seeds = Annotated[list[Seed], Field(min_length=1), AfterValidator(_different)]
Number = Annotated[float, Strict(), AllowInfNan(False)]


class CellSettings(TypedDict, total=False):
    """Settings of cells, keyed by dotted name.

    The key ``config`` lists configuration files. They override the files in ``base``. The settings
    of a label may include a metric and seeds for the label's runs.
    """

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way to configure a TypedDict
    config: Files
    metric: Name
    seeds: Seeds


class Published(TypedDict):
    """A published value, optionally with a standard deviation.

    Keys other than ``value`` and ``deviation`` are names of axes. The value belongs to the rows
    with the labels under these keys. Give published values only at scales with the paper's data,
    model and budget.
    """

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way to configure a TypedDict
    value: Number
    deviation: NotRequired[Number]


Settings = Annotated[CellSettings, AfterValidator(_without("name", "seed_everything", "metric", "seeds"))]
_LabelSettings = Annotated[
    CellSettings,
    BeforeValidator(lambda settings: {} if settings is None else settings),
    AfterValidator(_without("name", "seed_everything")),
]


def _values_or_labels(content: Any) -> Any:
    if content in ("all", "each"):
        return [content]
    if not isinstance(content, list | dict):
        raise ValueError(  # noqa: TRY004  # pydantic expects a ValueError
            "must be a list of values, or labels with settings such as {GN: {model.model.norm: gn}}"
        )
    return content


# type of an axis: a list of values, or a mapping from labels to settings
Axis = Annotated[
    Annotated[list[Any], Field(min_length=1), AfterValidator(_different), Tag("(values)")]
    | Annotated[dict[Name, _LabelSettings], Field(min_length=1), Tag("(labels)")],
    Discriminator(lambda content: "(labels)" if isinstance(content, dict) else "(values)"),
    BeforeValidator(_values_or_labels),
]

_STRICT = ConfigDict(extra="forbid")


@schema(frozen=True, config=_STRICT)
class Scale:
    """A scale of a study, such as ``quick``, with its settings, labels and seeds.

    Attributes:
        base: Configuration files of all cells. A later file overrides an earlier file. Paths are
            relative to the study's folder. Shipped files such as ``configs/quickstart.yaml`` are
            also allowed.
        settings: Settings of all cells, keyed by dotted name.
        axes: Labels or values of each axis at this scale: a list, or a mapping from labels to
            further settings. An axis without an entry keeps all labels.
        seeds: Seeds of the runs (default 0).
        cell_seconds: Measured seconds of a cell on one core, for estimates before the first result.
        title: Title that replaces the study's title, or None.
        published: Published values that replace the study's published values, or None.
    """

    base: Annotated[Files, Field(min_length=1)]
    settings: Settings = field(default_factory=CellSettings)
    axes: dict[Name, Annotated[Axis, BeforeValidator(lambda x: x if isinstance(x, dict) else listed(x))]] = (
        field(default_factory=dict)
    )
    seeds: Seeds = field(default_factory=lambda: [0])
    cell_seconds: Annotated[Number, Field(ge=0)] | None = None
    title: Text | None = None
    published: list[Published] | None = None


@schema(frozen=True, config=_STRICT)
class Choice:
    """An axis whose label is chosen on validation data. Test data are never used for a choice.

    Attributes:
        axis: Name of the axis.
        by: Names of axes. A separate choice is made for each combination of labels of these axes.
        at: Labels of the remaining axes during the trials. The default is the first label of each
            axis.
        metric: Metric to maximize, or loss to minimize (default ``val/accuracy``).
        seed: Seed of the trials (default 1000). No row of the table may have this seed.
        extend: Largest number of values that are added to a grid of learning rates (default 2).
            Values are added while the chosen value is at the edge of the grid.
    """

    axis: Name
    by: list[Name] = field(default_factory=list)
    at: dict[Name, Label] = field(default_factory=dict)
    metric: Name = "val/accuracy"
    seed: Seed = 1000
    extend: Annotated[int, Strict(), Field(ge=0, le=10)] = 2


@schema(frozen=True, config=_STRICT)
class Definition:
    """The content of a study's file.

    Attributes:
        title: Title in one line.
        paper: Paper and table or figure; empty if the study does not follow a paper.
        axes: Axes, keyed by name. An axis is a mapping from labels to settings, or a list of
            values. In the second case, the axis has the name of the setting that takes these
            values. ``data.fold: all`` has all folds of ``data.folds``, and ``data.held_out: each``
            holds each client out in turn.
        scales: Scales, keyed by name. The names are ``quick``, ``reduced`` and ``full``.
        settings: Settings of all cells at all scales.
        metrics: Names of the table's columns, keyed by metric (default ``test/accuracy``). A metric
            must have one value, so a confusion matrix is no column. If no run has a metric, the study
            ends with an error before it writes the table. After you have corrected the name, the
            same command writes the table without training. If clients have names, the first column
            has the metric of the clients' own models, such as ``test/own_accuracy``, in all rows
            whose runs log it. The key ``metric`` of a label overrides this.
        spread: Axis whose labels are the table's columns.
        without: Omitted combinations. Each entry maps axes to a label or a list of labels. A
            combination is omitted if it has a listed label on every axis of an entry.
        choose: Axes whose label is chosen on validation data.
        published: Published values of the first metric, see :class:`Published`.
        difference: Difference shown as a heat map, such as ``"GN - BN"``; None for no map.
        claims: Claims in the syntax of :mod:`fl_lightning.experiments.studies.claims`.
        report: Rule for the value of a run. It is ``last`` (default), ``best`` (optimistic on test
            data), or a mean such as ``mean of the last 5``.
        headline: Most important claims, at most three. With five or more seeds, Holm's correction
            for multiple tests treats them separately from the other claims.
    """

    title: Text
    scales: dict[Name, Scale]
    axes: dict[AxisName, Axis]
    paper: Text = ""
    settings: Settings = field(default_factory=CellSettings)
    metrics: Annotated[dict[Name, Text], Field(min_length=1)] = field(
        default_factory=lambda: {"test/accuracy": "test accuracy"}
    )
    spread: Name | None = None
    without: list[Annotated[dict[Name, Wanted], Field(min_length=1)]] = field(default_factory=list)
    choose: list[Choice] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    difference: Text | None = None
    claims: list[Text] = field(default_factory=list)
    report: Annotated[Text, AfterValidator(_rule)] = LAST
    headline: Annotated[list[Text], Field(max_length=HEADLINE_CLAIMS)] = field(default_factory=list)


@dataclass(frozen=True)
class Study:
    """A study at one scale.

    Attributes:
        name: Name of the study's file without its suffix.
        folder: Folder of the file.
        definition: Content of the file at this scale.
        scale_name: Name of the scale, such as ``quick``.
        axes: Settings of each label, keyed by axis and then by label.
        added: Learning rates that were added to grids, keyed by axis and value. An entry lists
            labels of other axes. Only combinations with these labels use the added value.
        folds: Number of folds, ``data.folds``; None if there is no axis ``data.fold``.
    """

    name: str
    folder: Path
    definition: Definition
    scale_name: str
    axes: Mapping[str, Mapping[str, Dotted]]
    added: Mapping[tuple[str, str], Sequence[Labels]] = field(default_factory=dict)
    folds: int | None = None

    @property
    def scale(self) -> Scale:
        """The scale of this study."""
        return self.definition.scales[self.scale_name]

    @property
    def choices(self) -> list[Choice]:
        """The study's choices, without axes that have a single label at this scale."""
        return [choice for choice in self.definition.choose if len(self.axes[choice.axis]) > 1]

    def known_labels(self) -> dict[str, list[str]]:
        """Return the labels of each axis at all scales."""
        labels = {axis: [*labels_of(axis, content)] for axis, content in self.definition.axes.items()}
        return {
            axis: [*dict.fromkeys([*labels.get(axis, []), *at_scale])]
            for axis, at_scale in (labels | dict(self.axes)).items()
        }

    def combinations(self, fixed: Mapping[str, object] | None = None) -> Iterator[Labels]:
        """Yield the combinations that have all labels in ``fixed``.

        A combination has one label for each axis.
        """
        for row in product(*self.axes.values()):
            labels = dict(zip(self.axes, row, strict=True))
            rows = [self.added[label] for label in labels.items() if label in self.added]
            if (
                matches(labels, fixed or {})
                and not any(matches(labels, omitted) for omitted in self.definition.without)
                and all(any(matches(labels, by) for by in of_label) for of_label in rows)
            ):
                yield labels

    def extended(self, axis: str, value: float, by: Labels) -> "Study":
        """Return the study with an additional value on an axis.

        Only combinations with the labels ``by`` use the additional value.
        """
        label = f"{value:g}"
        axes = {**self.axes, axis: {**self.axes[axis], label: {axis: value}}}
        added = {**self.added, (axis, label): [*self.added.get((axis, label), ()), by]}
        return replace(self, axes=axes, added=added)

    @property
    def base(self) -> list[str]:
        """Arguments of ``fit`` that name the configuration files shared by all cells."""
        return [self._config(path) for path in self.scale.base]

    def arguments(self, labels: Mapping[str, str], seed: int) -> list[str]:
        """Return the arguments of ``fit`` for a combination and a seed.

        These arguments must come after the arguments of :attr:`base`. Callbacks that
        ``trainer.callbacks+`` adds are kept if a label sets ``trainer.callbacks``.
        """
        of_labels = [self.axes[axis][label] for axis, label in labels.items()]
        arguments = []
        for settings in (self.definition.settings, self.scale.settings, *of_labels):
            arguments += [self._config(path) for path in settings.get("config", ())]
            arguments += [as_argument(name, x) for name, x in settings.items() if name not in SPECIAL]
        replaced = max(
            (i for i, x in enumerate(arguments) if x.startswith("--trainer.callbacks=")), default=0
        )
        added = [x for x in arguments[:replaced] if x.startswith("--trainer.callbacks+=")]
        return [*arguments, *added, f"--seed_everything={seed}"]

    def _config(self, path: str) -> str:
        return f"--config={(shipped(path, self.folder) or self.folder / path).resolve()}"

    def metric(self, labels: Mapping[str, str]) -> str | None:
        """Return the metric of the first label that sets a metric, or None."""
        metrics = (self.axes[axis][label].get("metric") for axis, label in labels.items())
        return next(filter(None, metrics), None)

    def seeds(self, labels: Mapping[str, str]) -> list[int]:
        """Return the seeds of a combination. A label can replace the scale's seeds."""
        seeds = (self.axes[axis][label].get("seeds") for axis, label in labels.items())
        return next(filter(None, seeds), self.scale.seeds)

    def published(self, labels: Mapping[str, str]) -> Published | None:
        """Return the published value of a combination, or None."""
        entries = (x for x in self.definition.published if matches(labels, rows_of(x)))
        return next(entries, None)


def matches(labels: Mapping[str, str], wanted: Mapping[str, object]) -> bool:
    """Return whether a combination has one of the wanted labels on each axis in ``wanted``."""
    return all(labels.get(axis) in [*map(str, listed(choices))] for axis, choices in wanted.items())


def rows_of(published: Mapping[str, object]) -> dict[str, object]:
    """Return the labels of the rows to which a published value belongs, keyed by axis."""
    return {axis: labels for axis, labels in published.items() if axis not in ("value", "deviation")}


def as_argument(name: str, value: Any) -> str:
    """Format a setting as an argument of the command line.

    If the name ends with ``+``, the command line appends the value to a list.
    """
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def labels_of(axis: str, content: list[Any] | Mapping[str, Dotted]) -> dict[str, Dotted]:
    """Return the settings of each label of an axis."""
    return {str(x): {axis: x} for x in content} if isinstance(content, list) else {**content}
