"""The findings of a study: the form of ``study.json``, which tables, figures and reports read."""

from typing import NotRequired, TypedDict

Labels = dict[str, str]
"""A label by axis."""


class RunFound(TypedDict):
    """A run: where it is, and what it took; the optional keys are those of finished runs.

    Attributes:
        seed: Its seed.
        directory: Its folder.
        phase: Such as ``"done"``, ``"failed"`` or ``"missing"``.
        why: What ended it, or why its result counts nonetheless.
        exchanges: Exchanges with the server in all rounds.
        origin: Which other runs it continues, in words.
    """

    seed: int
    directory: str
    phase: str
    why: str
    method: NotRequired[str]
    model: NotRequired[str]
    partition: NotRequired[str]
    rounds: NotRequired[int]
    planned_rounds: NotRequired[int]
    samples: NotRequired[int]
    upload_bytes: NotRequired[float]
    download_bytes: NotRequired[float]
    train_seconds: NotRequired[float]
    diverged: NotRequired[bool]
    diverged_round: NotRequired[int]
    exchanges: NotRequired[float]
    provenance: NotRequired[list[dict[str, str]]]
    data: NotRequired[dict[str, str]]
    loaded: NotRequired[dict[str, str]]
    computed_by: NotRequired[dict[str, object]]
    environment: NotRequired[dict[str, object]]
    origin: NotRequired[list[str]]


class Group(TypedDict):
    """A combination of labels with its runs, one for each seed.

    Attributes:
        labels: The labels by axis.
        metric: The metric that a label reads in place of the first; None without one.
        published: The published value; None without one.
        learning_rate: The client optimizer's; None if it is not known.
        values: By metric the value of each seed.
        runs: The runs.
        same_as: The labels of an earlier combination with the same runs and metric; None without one.
        costs_of: The labels of the combination that trained these runs, if only another metric is read of them; else None.
    """

    labels: Labels
    metric: NotRequired[str | None]
    published: float | None
    learning_rate: float | None
    values: dict[str, dict[str, float]]
    runs: list[RunFound]
    same_as: NotRequired[Labels | None]
    costs_of: NotRequired[Labels | None]


ChoiceFound = TypedDict(
    "ChoiceFound",
    {
        "axis": str,
        "sets": NotRequired[list[str]],  # the settings of its labels
        "for": Labels,  # the combination that it is chosen for
        "at": NotRequired[Labels],  # the labels of other axes at which it was tried
        "metric": str,
        "chosen": str | None,  # None before all trials are done
        "values": dict[str, float | None],  # the metric by label, None of a trial without a result
    },
)
"""A label that was chosen on validation data."""


class Verdict(TypedDict):
    """The verdict on a claim: ``holds``, ``does not hold`` or ``undecided``, and why in words."""

    claim: str
    verdict: str
    words: str


class Found(TypedDict):
    """Everything that a study has found.

    Attributes:
        name: The study's name.
        title: Its title.
        paper: Paper and table or figure; empty for our own.
        scale: ``quick``, ``reduced`` or ``full``.
        axes: The labels of each axis.
        choose: The axes whose label was chosen.
        spread: The axis whose labels are columns; None without one.
        difference: What a map of differences shows; None for no map.
        metrics: Columns of the table by the name of the metric.
        groups: The combinations.
        choices: The labels that were chosen.
        known: The labels of each axis at all scales.
        claims: The verdicts.
        options: Further settings of the command line.
        command: The command line.
    """

    name: str
    title: str
    paper: str
    scale: str
    axes: dict[str, list[str]]
    choose: list[str]
    spread: str | None
    difference: NotRequired[str | None]
    metrics: dict[str, str]
    groups: list[Group]
    choices: list[ChoiceFound]
    known: dict[str, list[str]]
    claims: list[Verdict]
    options: NotRequired[str]
    command: NotRequired[str]
