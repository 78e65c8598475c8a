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
        why: Reason for the phase, such as an error message; ``""`` if no reason is known.
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
        metric: Metric that replaces the study's first metric, or None.
        published: Published value of the first metric, or None.
        published_deviation: Published standard deviation over seeds, or None.
        learning_rate: Learning rate of the client optimizer; None if unknown.
        values: Values of the runs, keyed by metric and then by seed.
        runs: Findings of the runs.
        same_as: Labels of an earlier combination with the same runs and metric, or None.
        costs_of: Labels of a combination with the same runs and the study's first metric, or None.
            It is set only if ``metric`` is set.
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
        "sets": NotRequired[list[str]],  # settings that differ between the labels
        "for": Labels,  # labels of the axes ``by`` for this choice
        "at": NotRequired[Labels],  # labels of the other axes in the trials
        "metric": str,
        "seed": NotRequired[int],  # seed of the trials
        "chosen": str | None,  # the chosen label; None until all trials are done
        # metric of each label's trial; None without a result
        "values": dict[str, float | None],
        "extended": NotRequired[list[str]],  # values that were added to the grid
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
        adjusted: P-value after Holm's correction for multiple claims.
        family: Number of claims that are corrected together.
        headline: Whether the claim is corrected together with the headline claims.
        decides: Smallest difference or margin that the present number of seeds can decide. Only
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
        best: Direction of each metric: ``"max"`` if large values are good, else ``"min"``.
        groups: Combinations of labels with their runs.
        choices: Labels that were chosen on validation data, with their trials.
        known: All labels of each axis, including labels that only other scales have.
        claims: Verdicts on the claims.
        report: Rule that says which evaluations give a run's value. Older files lack this key and
            use the last evaluation.
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
