"""Types of a study's findings, which are the content of ``study.json``."""

from typing import NotRequired, TypedDict

Labels = dict[str, str]
"""Label of each axis, such as ``{"method": "GN", "E": "100"}``."""


class RunFound(TypedDict):
    """Findings of a run. Only finished runs have all optional keys.

    Attributes:
        seed: Seed of the run.
        directory: Run directory.
        phase: Phase such as ``"done"``, ``"failed"`` or ``"missing"``.
        why: Error that ended the run. For a stale result: what has changed since it was computed.
        exchanges: Number of exchanges with the server in all rounds together.
        origin: Descriptions of other runs that this run continues.
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
        labels: Label of each axis.
        metric: Metric that a label sets in place of the study's first metric, or None.
        published: Published value of the first metric, or None.
        published_deviation: Published standard deviation over seeds, or None.
        learning_rate: Learning rate of the client optimizer; None if unknown.
        values: Values of the runs, keyed by metric and then by seed.
        runs: Findings of the runs.
        same_as: Labels of an earlier combination with the same runs and metric, or None.
        costs_of: Labels of a combination that has the same runs, but uses the study's first metric.
            None if this combination also uses the study's first metric.
    """

    labels: Labels
    metric: NotRequired[str | None]
    published: float | None
    published_deviation: NotRequired[float | None]
    learning_rate: float | None
    values: dict[str, dict[str, float]]
    runs: list[RunFound]
    same_as: NotRequired[Labels | None]
    costs_of: NotRequired[Labels | None]


ChoiceFound = TypedDict(
    "ChoiceFound",
    {
        "axis": str,
        "sets": NotRequired[list[str]],  # names of all settings that the axis's labels set
        "for": Labels,  # labels of the axes ``by``, for which this choice is made
        "at": NotRequired[Labels],  # labels that the trials have on the other axes
        "metric": str,
        "seed": NotRequired[int],  # seed with which the trials run
        "chosen": str | None,  # the chosen label; None until all trials are done
        # the metric in each label's trial; None for a trial without a result
        "values": dict[str, float | None],
        "extended": NotRequired[list[str]],  # values by which the grid was extended
    },
)
"""A choice of a label, made on validation data."""


class Verdict(TypedDict):
    """Verdict on a claim. A verdict from fewer than two pairs of runs has no p-values.

    Attributes:
        claim: Text of the claim.
        verdict: ``holds``, ``does not hold``, ``undecided``, ``one pair agrees`` or
            ``one pair contradicts``.
        words: Reason for the verdict in words.
        p: Two-sided p-value.
        adjusted: P-value after Holm's correction for all claims of the family.
        family: Number of claims in the family.
        headline: Whether the claim's family consists of the headline claims.
        decides: Smallest difference or margin for which this number of seeds gives a verdict. Only
            undecided claims have this key.
    """

    claim: str
    verdict: str
    words: str
    p: NotRequired[float]
    adjusted: NotRequired[float]
    family: NotRequired[int]
    headline: NotRequired[bool]
    decides: NotRequired[float]


class Found(TypedDict):
    """Findings of a study.

    Attributes:
        name: Name of the study.
        title: Title of the study.
        paper: Paper and table or figure; empty if the study does not follow a paper.
        scale: Name of the scale, such as ``quick``.
        axes: Labels of each axis.
        choose: Axes whose label is chosen on validation data.
        spread: Axis whose labels are columns, or None.
        difference: Difference shown as a heat map, or None.
        metrics: Names of the table's columns, keyed by metric.
        best: For each metric of the runs' tasks: ``"max"`` if large values are good, else
            ``"min"``.
        groups: Combinations of labels with their runs.
        choices: Labels that were chosen on validation data, with their trials.
        known: All labels of each axis, including labels that only other scales have.
        claims: Verdicts on the claims.
        report: Rule that says which evaluations give a run's value. In an old file without this
            key, the value is from the last evaluation.
        options: Options of the command line that change results.
        command: Command line of the study.
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
    best: NotRequired[dict[str, str]]
    groups: list[Group]
    choices: list[ChoiceFound]
    known: dict[str, list[str]]
    claims: list[Verdict]
    report: NotRequired[str]
    options: NotRequired[str]
    command: NotRequired[str]
